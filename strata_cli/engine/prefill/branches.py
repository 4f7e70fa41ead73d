"""Many short continuations of one prefix, read as mixed batches; the prefix stays as it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.forward.branch import BranchRoom
from strata_cli.engine.forward.layers import Batch, Forward, Segment
from strata_cli.engine.forward.rows import RowPort
from strata_cli.engine.forward.state import SequenceState
from strata_cli.engine.prefill.chunks import all_rows, enqueue_pass, prefill, streaming
from strata_cli.engine.prefill.mixed import last_rows
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.prefill.watching import NO_WATCH, Watch
from strata_cli.errors import Cancelled


def plan_batches(lengths: Sequence[int], most_rows: int) -> Iterator[range]:
    """Consecutive suffixes that are read together.

    Args:
        lengths: tokens of each suffix.
        most_rows: of a batch; a longer suffix is a batch of its own.
    """
    start, rows = 0, 0
    for index, length in enumerate(lengths):
        if index > start and rows + length > most_rows:
            yield range(start, index)
            start, rows = index, 0
        rows += length
    if start < len(lengths):
        yield range(start, len(lengths))


def read_branches(
    forward: Forward,
    port: RowPort,
    state: SequenceState,
    room: BranchRoom,
    suffixes: Sequence[list[int]],
    *,
    wanted: Literal["last", "all"] = "last",
    is_exact: bool = True,
    watch: Watch = NO_WATCH,
    streamer: PromptStreamer | None = None,
    cancellation: Cancellation = NEVER,
) -> list[NDArray[np.float32]]:
    """The logits that each suffix would lead to if the sequence went on by it alone.

    The sequence stays where it is. Snapshots of later positions can no longer be restored.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        state: of the sequence.
        room: for the running state of branches.
        suffixes: each at least one token; each fits the context behind the position.
        wanted: which of a suffix's rows.
        is_exact: whether their tokens are computed as a canonical read would.
        watch: looks on.
        streamer: brings experts that are not resident; None: all are.
        cancellation: ends it between two passes, or where a pass's experts are waited for.

    Returns:
        For each suffix "last": one row [V]; "all": [its tokens, V].

    Raises:
        Cancelled: the sequence is where it was, and whole.
    """
    most_rows = forward.workspace.num_tokens
    rows: list[NDArray[np.float32]] = []
    for batch in plan_batches([len(ids) for ids in suffixes], most_rows):
        cancellation.check()
        together = [suffixes[index] for index in batch]
        if len(together[0]) > most_rows:
            snapshot = state.snapshot()
            try:
                row = prefill(
                    forward,
                    port,
                    state,
                    together[0],
                    wanted=wanted,
                    is_exact=is_exact,
                    watch=watch,
                    streamer=streamer,
                    cancellation=cancellation,
                )
            except Cancelled:
                state.restore(snapshot)
                raise
            state.restore(snapshot)
            rows.append(row)
            continue
        num_tokens = sum(map(len, together))
        with streaming(streamer, num_tokens, most_rows, cancellation) as stream:
            state.begin_branches()
            segments = _branches(state, room, together)
            ring_slots = 0 if stream is None else stream.ring_slots(num_tokens)
            watched = watch.chunk(
                forward, state.position, num_tokens, ring_slots=ring_slots, is_dumped=False
            )
            with watched:
                ids = [token for suffix in together for token in suffix]
                enqueue_pass(forward, port, Batch(num_tokens, segments), ids, watch, stream)
        if wanted == "last":
            rows += last_rows(forward, port, segments)
        else:
            blocks = np.concatenate(all_rows(forward, port, num_tokens))
            rows += [blocks[segment.start : segment.stop] for segment in segments]
    return rows


def _branches(
    state: SequenceState, room: BranchRoom, suffixes: Sequence[list[int]]
) -> tuple[Segment, ...]:
    segments, start = [], 0
    for suffix in suffixes:
        segments.append(Segment(state, start, start + len(suffix), room))
        start += len(suffix)
    return tuple(segments)
