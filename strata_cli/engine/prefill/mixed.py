"""One pass over rows of several sequences: pieces of prompts, and steps beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort, advancing
from strata_cli.engine.forward.state import SequenceState
from strata_cli.engine.prefill.chunks import enqueue_pass, streaming
from strata_cli.engine.prefill.streamer import PromptStreamer
from strata_cli.engine.prefill.watching import NO_WATCH, Watch

Floats: TypeAlias = NDArray[np.float32]
TakeRows: TypeAlias = Callable[[Floats], None]


class Piece(NamedTuple):
    """What one sequence reads in a pass.

    Attributes:
        state: of the sequence.
        ids: at least one token.
        wants_logits: of its last token.
        take_rows: called with the logits of all its tokens, [n, V] at a time; None: nobody wants
            them.
        meanwhile: called once all tokens count as read, while the logits of the last one are
            computed, if they are wanted; nobody waits for what it enqueues.
    """

    state: SequenceState
    ids: Sequence[int]
    wants_logits: bool = True
    take_rows: TakeRows | None = None
    meanwhile: Callable[[], None] | None = None

    @property
    def is_step(self) -> bool:
        """Whether a decoder reads it just as well."""
        return len(self.ids) == 1 and self.wants_logits and self.take_rows is None


def read_mixed(
    forward: Forward,
    port: RowPort,
    pieces: Sequence[Piece],
    *,
    is_exact: bool = True,
    watch: Watch = NO_WATCH,
    streamer: PromptStreamer | None = None,
    cancellation: Cancellation = NEVER,
) -> list[Floats | None]:
    """Read a piece of each sequence in one pass. Blocks until it is done.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        pieces: each sequence once; together no more tokens than the workspace has rows.
        is_exact: whether all are computed as a canonical read would.
        watch: looks on.
        streamer: brings experts that are not resident; None: all are.
        cancellation: ends it where experts are waited for.

    Returns:
        For each piece the logits [V] of its last token, None where they are not wanted.

    Raises:
        StateError: an earlier pass of one was interrupted halfway; nothing has changed.
        Cancelled: all sequences of the pass are interrupted halfway.
    """
    for piece in pieces:  # all, before the pass of any is begun
        piece.state.require_consistent()
    ids = [token for piece in pieces for token in piece.ids]
    num, segments = len(ids), _segments(pieces)
    with streaming(streamer, num, forward.workspace.num_tokens, cancellation) as stream:
        ring_slots = 0 if stream is None else stream.ring_slots(num)
        position, is_dumped = pieces[0].state.position, len(pieces) == 1
        with (
            watch.chunk(forward, position, num, ring_slots=ring_slots, is_dumped=is_dumped),
            ExitStack() as passes,
        ):
            for piece in pieces:
                passes.enter_context(
                    advancing(piece.state, list(piece.ids), is_exact=is_exact, layer_by_layer=True)
                )
            enqueue_pass(forward, port, Batch(num, segments), ids, watch, stream)
        for piece, segment in zip(pieces, segments, strict=True):
            if piece.take_rows is not None:
                _hand_rows(forward, port, segment, piece.take_rows)
        wanted = [
            segment for piece, segment in zip(pieces, segments, strict=True) if piece.wants_logits
        ]
        rows = last_rows(forward, port, wanted, [p.meanwhile for p in pieces if p.wants_logits])
        result = [next(rows) if piece.wants_logits else None for piece in pieces]
        if not wanted:
            forward.stream.synchronize()
    return result


def last_rows(
    forward: Forward,
    port: RowPort,
    segments: Sequence[Segment],
    meanwhile: Iterable[Callable[[], None] | None] = (),
) -> Iterator[Floats]:
    """Logits after each of some segments, in order, of the last pass.

    Moves the last rows to the front, so that one product does all: other rows are gone then.

    Args:
        forward: enqueued the pass.
        port: staging of the forward's workspace.
        segments: of the pass.
        meanwhile: called, but for None, while the last logits are computed.
    """
    if not segments:
        return
    x: Tensor = forward.workspace.take("x", segments[-1].stop)
    for index, segment in enumerate(segments):
        # In order: a row is overwritten by one from behind it, when it was itself moved already.
        if segment.stop - 1 != index:
            last = x.rows(segment.stop - 1, segment.stop)
            forward.stream.copy(x.rows(index, index + 1), last)
    step = forward.workspace.logit_rows
    for start in range(0, len(segments), step):
        stop = min(start + step, len(segments))
        port.enqueue_logits(forward.head(start, stop))
        port.mark_logits()
        for call in meanwhile if stop == len(segments) else ():
            if call is not None:
                call()
        yield from port.read_marked_logits(stop - start)


def _segments(pieces: Sequence[Piece]) -> tuple[Segment, ...]:
    segments, start = [], 0
    for piece in pieces:
        segments.append(Segment(piece.state, start, start + len(piece.ids)))
        start += len(piece.ids)
    return tuple(segments)


def _hand_rows(forward: Forward, port: RowPort, segment: Segment, take: TakeRows) -> None:
    step = forward.workspace.logit_rows
    for start in range(segment.start, segment.stop, step):
        stop = min(start + step, segment.stop)
        port.enqueue_logits(forward.head(start, stop))
        take(port.read_logits(stop - start))
