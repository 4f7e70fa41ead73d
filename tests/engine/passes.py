"""Runs passes of an engine by hand: layer by layer with everything laid open, or mixed batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Pattern
from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine
from strata_cli.engine.engine import Sequence as EngineSequence
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.rows import advancing
from strata_cli.engine.kernels.embed import embed_streams
from tests.reference.qwen4exp import ModelPass


def read_in_the_open(engine: Engine, ids: list[int]) -> ModelPass:
    """Read a prompt, of one chunk at most, and keep what every layer computed."""
    forward, take, num = engine._forward, engine._forward.workspace.take, len(ids)
    spec, x = engine.spec, take("x", num)
    with engine.sequence() as sequence, _staged(engine, [(sequence, ids)]) as batch:
        embed_streams(forward.stream, take("ids", num), forward.weights.embed, x)
        seen = ModelPass(np.empty(0), np.empty(0), margin=np.full(num, np.inf))
        for layer, weights in enumerate(forward.weights.layers):
            forward.layer(layer, weights, batch, x)
            seen.residual.append(_fetch(engine, "x", num))
            ids_of_layer = forward.expert_ids(layer, num)  # few rows keep every layer's
            seen.router_ids.append(download(engine._device, forward.stream, ids_of_layer))
            seen.router_weights.append(_fetch(engine, "expert_weights", num))
            if spec.index_ratio[layer]:
                seen.allowed[layer] = _allowed(engine, num, spec.index_ratio[layer])
            if weights.ngram is not None:
                seen.ngram_rows = _fetch(engine, "ngram_rows", num)
        seen.logits, seen.final = _head(engine, num)
    return seen


def read_together(
    engine: Engine, parts: Sequence[tuple[EngineSequence, list[int]]]
) -> list[NDArray[np.float32]]:
    """Read tokens of several sequences in one mixed batch; the logits of each part, [T, V]."""
    num = sum(len(ids) for _, ids in parts)
    with _staged(engine, parts) as batch:
        engine._forward.run(batch)
        logits, _ = _head(engine, num)
    return [logits[segment.start : segment.stop] for segment in batch.segments]


@contextmanager
def interrupt(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, operation: str, after: int
) -> Iterator[None]:
    """Inside the block, the stream's operation raises KeyboardInterrupt, after so many that pass.

    The block must end in that interrupt. Launches that are repeated together count one by one.
    """
    allowed, repeat, left = getattr(engine._stream, operation), engine._stream.repeat, after

    def count(number: int) -> None:
        nonlocal left
        if left < number:
            raise KeyboardInterrupt
        left -= number

    def counted(*args: Any) -> None:
        count(1)
        allowed(*args)

    def counted_together(pattern: Pattern, addresses: NDArray[np.int64]) -> None:
        count(pattern.num_launches)
        repeat(pattern, addresses)

    with monkeypatch.context() as patch:
        patch.setattr(engine._stream, operation, counted)
        if operation == "launch":
            patch.setattr(engine._stream, "repeat", counted_together)
        with pytest.raises(KeyboardInterrupt):
            yield


@contextmanager
def _staged(engine: Engine, parts: Sequence[tuple[EngineSequence, list[int]]]) -> Iterator[Batch]:
    """Ids and positions on their way to the workspace; counted as read when the block ends."""
    port, segments, start = engine._port, [], 0
    ids = [token for _, tokens in parts for token in tokens]
    positions: list[int] = []
    with ExitStack() as states:
        for sequence, tokens in parts:
            states.enter_context(advancing(sequence._state, tokens))
            positions += range(sequence.position, sequence.position + len(tokens))
            segments.append(Segment(sequence._state, start, start + len(tokens)))
            start += len(tokens)
        port.stage(ids, positions)
        port.enqueue_inputs(len(ids))
        port.mark_inputs()
        yield Batch(len(ids), tuple(segments))


def _head(engine: Engine, num: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits [num, V] and what the output matrix multiplied, [num, D]."""
    forward, logits, final = engine._forward, [], []
    step = forward.workspace.logit_rows
    for start in range(0, num, step):
        stop = min(start + step, num)
        rows = forward.head(start, stop)
        logits.append(download(engine._device, forward.stream, rows))
        final.append(_fetch(engine, "y", stop - start))
    return np.concatenate(logits), np.concatenate(final)


def _allowed(engine: Engine, num: int, ratio: int) -> NDArray[np.bool_]:
    """The positions that a prompt's tokens attended to: selected blocks and the tail, [T, T]."""
    budget = engine.spec.indexer_budget_tokens // ratio
    whole = engine._forward.workspace.take_shaped("selected", num, budget)
    selected = download(engine._device, engine._stream, whole)
    counts = _fetch(engine, "num_selected", num)
    allowed = np.zeros((num, num), dtype=bool)
    for t in range(num):
        for block in selected[t, : counts[t]]:
            allowed[t, block * ratio : (block + 1) * ratio] = True
        allowed[t, (t + 1) // ratio * ratio : t + 1] = True
    return allowed


def _fetch(engine: Engine, name: str, rows: int) -> NDArray[Any]:
    return download(engine._device, engine._stream, engine._forward.workspace.take(name, rows))
