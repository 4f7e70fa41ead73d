"""Many short continuations of sequences, read as mixed batches; the sequences stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.branch import BranchRoom
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort
from strata_cli.engine.forward.state import SequenceState
from strata_cli.engine.prefill.chunks import all_rows, enqueue_pass, prefill, streaming
from strata_cli.engine.prefill.mixed import last_rows
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.prefill.watching import NO_WATCH, Watch
from strata_cli.errors import Cancelled


def plan_batches(
    lengths: Sequence[int], most_rows: int, most_suffixes: int | None = None
) -> Iterator[range]:
    """Consecutive suffixes that are read together.

    Args:
        lengths: tokens of each suffix.
        most_rows: of a batch; a longer suffix is a batch of its own.
        most_suffixes: of a batch; None: any number.
    """
    start, rows = 0, 0
    for index, length in enumerate(lengths):
        is_full = rows + length > most_rows or index - start == most_suffixes
        if index > start and is_full:
            yield range(start, index)
            start, rows = index, 0
        rows += length
    if start < len(lengths):
        yield range(start, len(lengths))


class Branch(NamedTuple):
    """What would be read if a sequence went on by it alone.

    Attributes:
        state: of the sequence.
        ids: at least one token; they fit the context behind its position.
    """

    state: SequenceState
    ids: list[int]


def read_branches(
    forward: Forward,
    port: RowPort,
    room: BranchRoom,
    branches: Sequence[Branch],
    *,
    wanted: Literal["last", "all"] = "last",
    is_exact: bool = True,
    watch: Watch = NO_WATCH,
    streamer: PromptStreamer | None = None,
    cancellation: Cancellation = NEVER,
) -> list[NDArray[np.float32]]:
    """The logits that each branch would lead to.

    Sequences stay where they are. Snapshots of later positions can no longer be restored.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        room: for the running state of branches.
        branches: of any sequences, in any order.
        wanted: which of a branch's rows.
        is_exact: whether their tokens are computed as a canonical read would.
        watch: looks on.
        streamer: brings experts that are not resident; None: all are.
        cancellation: ends it between two passes, or where a pass's experts are waited for.

    Returns:
        For each branch "last": one row [V]; "all": [its tokens, V].

    Raises:
        Cancelled: the sequences are where they were, and whole.
    """
    most_rows = forward.workspace.num_tokens
    read_long = partial(
        prefill,
        forward,
        port,
        wanted=wanted,
        is_exact=is_exact,
        watch=watch,
        streamer=streamer,
        cancellation=cancellation,
    )
    rows: list[NDArray[np.float32]] = []
    lengths = [len(branch.ids) for branch in branches]
    for batch in plan_batches(lengths, most_rows, forward.workspace.most_segments):
        cancellation.check()
        together = [branches[index] for index in batch]
        state = together[0].state
        if len(together[0].ids) > most_rows:
            rows.append(_read_and_return(together[0], read_long))
            continue
        ids = [token for branch in together for token in branch.ids]
        num_tokens, segments = len(ids), _segments(together, room)
        with streaming(streamer, num_tokens, most_rows, cancellation) as stream:
            for branch in together:
                branch.state.begin_branches()
            ring_slots = 0 if stream is None else stream.ring_slots(num_tokens)
            watched = watch.chunk(
                forward, state.position, num_tokens, ring_slots=ring_slots, is_dumped=False
            )
            with watched:
                enqueue_pass(forward, port, Batch(num_tokens, segments), ids, watch, stream)
        if wanted == "last":
            rows += last_rows(forward, port, segments)
        else:
            blocks = np.concatenate(all_rows(forward, port, num_tokens))
            rows += [blocks[segment.start : segment.stop] for segment in segments]
    return rows


def _read_and_return(
    branch: Branch, read: Callable[[SequenceState, list[int]], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Read a branch that no pass has room for as a prompt, then put its sequence back."""
    state, ids = branch
    snapshot = state.snapshot()
    try:
        rows = read(state, ids)
        state.restore(snapshot)
    except BaseException as error:
        state.is_consistent = False  # nothing goes on behind a part of a suffix
        if isinstance(error, Cancelled):
            state.restore(snapshot)
        raise
    return rows


def _segments(branches: Sequence[Branch], room: BranchRoom) -> tuple[Segment, ...]:
    segments, start = [], 0
    for state, ids in branches:
        segments.append(Segment(state, start, start + len(ids), room))
        start += len(ids)
    return tuple(segments)
