"""Prompt tokens in, chunk by chunk; the state filled and the wanted logits out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort, advancing, single
from strata_cli.engine.forward.state import SequenceState
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
    progress: Progress | None = None,
    watch: Watch = NO_WATCH,
) -> NDArray[np.float32]:
    """Read tokens into a sequence, in chunks of at most the workspace's tokens.

    Where the chunks are cut does not change a bit of the result.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        state: the sequence; its position advances by len(ids), chunk by chunk.
        ids: at least one token; they must fit the context.
        wanted: which rows' logits to return.
        progress: called with (tokens read, tokens in all) after each chunk.
        watch: looks on.

    Returns:
        "last": logits [V] of the last token; "all": [len(ids), V]; "none": [0].
    """
    chunk_tokens = forward.workspace.num_tokens
    collected: list[NDArray[np.float32]] = []
    for start in range(0, len(ids), chunk_tokens):
        chunk = ids[start : start + chunk_tokens]
        with watch.chunk(forward, state.position, len(chunk)), advancing(state, chunk):
            port.stage(chunk, range(state.position, state.position + len(chunk)))
            port.enqueue_inputs(len(chunk))
            port.mark_inputs()
            forward.run(single(state, len(chunk)), watch.spans)
        if wanted == "all":
            collected += _all_rows(forward, port, len(chunk))
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
    row: NDArray[np.float32] = port.read_logits(1)[0]
    return row


def _all_rows(forward: Forward, port: RowPort, num_tokens: int) -> list[NDArray[np.float32]]:
    rows = []
    step = forward.workspace.logit_rows
    for start in range(0, num_tokens, step):
        stop = min(start + step, num_tokens)
        port.enqueue_logits(forward.head(start, stop))
        rows.append(port.read_logits(stop - start))
    return rows
