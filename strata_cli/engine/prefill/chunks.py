"""Prompt tokens in, chunk by chunk; the state filled and the wanted logits out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.forward.batch import Batch
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort, advancing, positions_of, single
from strata_cli.engine.forward.segments import segment_rows, wants_table
from strata_cli.engine.forward.state import SequenceState
from strata_cli.engine.prefill.prompt_stream import PromptStream
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.prefill.watching import NO_WATCH, Watch

Wanted: TypeAlias = Literal["last", "all", "none"]
Progress: TypeAlias = Callable[[int, int], None]


def prefill(
    forward: Forward,
    port: RowPort,
    state: SequenceState,
    ids: list[int],
    *,
    wanted: Wanted = "last",
    is_exact: bool = True,
    progress: Progress | None = None,
    watch: Watch = NO_WATCH,
    streamer: PromptStreamer | None = None,
    cancellation: Cancellation = NEVER,
    meanwhile: Callable[[], None] | None = None,
) -> NDArray[np.float32]:
    """Read tokens into a sequence, in chunks of at most the workspace's tokens.

    Where the chunks are cut does not change a bit of the result.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        state: the sequence; its position advances by len(ids), chunk by chunk.
        ids: at least one token; they must fit the context.
        wanted: which rows' logits to return.
        is_exact: whether the tokens are computed as a canonical read would.
        progress: called with (tokens read, tokens in all) after each chunk.
        watch: looks on.
        streamer: brings experts that are not resident; None: all are.
        cancellation: ends it between two chunks, or where a chunk's experts are waited for.
        meanwhile: called once all tokens count as read, while the last one's logits are computed;
            nobody waits for what it enqueues. Not where these are not what is wanted.

    Returns:
        "last": logits [V] of the last token; "all": [len(ids), V]; "none": [0].

    Raises:
        Cancelled: the chunks before are read, and the sequence is whole unless one was under way.
    """
    chunk_tokens = forward.workspace.num_tokens
    collected: list[NDArray[np.float32]] = []
    with streaming(streamer, len(ids), chunk_tokens, cancellation) as stream:
        for start in range(0, len(ids), chunk_tokens):
            cancellation.check()
            chunk = ids[start : start + chunk_tokens]
            _read_chunk(forward, port, state, chunk, is_exact, watch, stream)
            if wanted == "all":
                collected += all_rows(forward, port, len(chunk))
            elif progress is not None:
                forward.stream.synchronize()
            if progress is not None:
                progress(start + len(chunk), len(ids))
    if wanted == "none":
        return np.empty(0, dtype=np.float32)
    if wanted == "all":
        return np.concatenate(collected)
    last = len(chunk)
    port.enqueue_logits(forward.head(last - 1, last))
    port.mark_logits()
    if meanwhile is not None:
        meanwhile()
    row: NDArray[np.float32] = port.read_marked_logits(1)[0]
    return row


@contextmanager
def streaming(
    streamer: PromptStreamer | None,
    num_tokens: int,
    chunk_tokens: int,
    cancellation: Cancellation = NEVER,
) -> Iterator[PromptStream | None]:
    """Around passes over so many tokens: what streams their experts, None where all are resident.

    Args:
        streamer: of the engine, or None.
        num_tokens: of all passes together.
        chunk_tokens: most in one pass.
        cancellation: ends the waits for experts.
    """
    if streamer is None:
        yield None
    else:
        with streamer.prompt(num_tokens, chunk_tokens, cancellation) as stream:
            yield stream


def _read_chunk(
    forward: Forward,
    port: RowPort,
    state: SequenceState,
    chunk: list[int],
    is_exact: bool,
    watch: Watch,
    stream: PromptStream | None,
) -> None:
    """Enqueue one pass. Until all of it is, the sequence counts as interrupted."""
    num, position = len(chunk), state.position
    ring_slots = 0 if stream is None else stream.ring_slots(num)
    with (
        watch.chunk(forward, position, num, ring_slots=ring_slots),
        advancing(state, chunk, is_exact=is_exact, layer_by_layer=True),
    ):
        enqueue_pass(forward, port, single(state, num), chunk, watch, stream)


def enqueue_pass(
    forward: Forward,
    port: RowPort,
    batch: Batch,
    ids: list[int],
    watch: Watch,
    stream: PromptStream | None,
) -> None:
    """Enqueue a pass over the rows of a batch, whose tokens are the ids."""
    num = batch.num_tokens
    port.stage(ids, positions_of(batch))
    port.enqueue_inputs(num)  # ahead of the experts, which the link is busy with for long
    if wants_table(forward.stream, batch, forward.workspace.most_segments):
        rows = segment_rows(forward.spec, forward.workspace, batch.segments)
        batch = replace(batch, table=port.enqueue_segments(rows))
    port.mark_inputs()
    with nullcontext() if stream is None else stream.chunk(num) as feed:
        forward.run(batch, watch.spans, feed)


def all_rows(forward: Forward, port: RowPort, num_tokens: int) -> list[NDArray[np.float32]]:
    """Logits after each row of the last pass, in blocks [n, V]."""
    rows = []
    step = forward.workspace.logit_rows
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        port.enqueue_logits(forward.head(start, stop))
        rows.append(port.read_logits(stop - start))
    return rows
