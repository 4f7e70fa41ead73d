"""The host's side of a pass: token ids and positions in, logits out, through pinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Event, Stream, Tensor
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.state import SequenceState
from strata_cli.engine.forward.workspace import Workspace


class RowPort:
    """Pinned staging for a workspace's ids, positions and logits.

    Owned by the thread that enqueues on the stream. Staging memory is rewritten only after the copy
    that read it has run.
    """

    def __init__(self, device: Device, stream: Stream, workspace: Workspace) -> None:
        self._stream = stream
        self._workspace = workspace
        rows = workspace.num_tokens
        vocab = workspace.take("logits", 1).shape[1]
        self._inputs = device.allocate_pinned(8 * rows)
        self._ids = Tensor.over(self._inputs, (rows,), np.int32)
        self._positions = Tensor.over(self._inputs, (rows,), np.int32, 4 * rows)
        self._outputs = device.allocate_pinned(4 * vocab * workspace.logit_rows)
        self._logits = Tensor.over(self._outputs, (workspace.logit_rows, vocab), np.float32)
        table = workspace.segments(workspace.most_segments)
        self._tables = device.allocate_pinned(table.nbytes)
        self._inputs_read: Event = device.event()
        self._logits_copied: Event = device.event()
        self._is_marked = True

    def stage(self, ids: Sequence[int], positions: Sequence[int] | range) -> None:
        """Write ids and positions where enqueue_inputs will copy them from.

        Blocks until the previous copy has run; if a pass was interrupted before it could be marked,
        until everything has.
        """
        if self._is_marked:
            self._inputs_read.synchronize()
        else:
            self._stream.synchronize()
        self._is_marked = False
        num = len(ids)
        self._ids.rows(0, num).numpy()[:] = ids
        self._positions.rows(0, num).numpy()[:] = positions

    def enqueue_inputs(self, num: int) -> None:
        """Enqueue the copy of the staged ids and positions to the workspace."""
        self._stream.copy(self._workspace.take("ids", num), self._ids.rows(0, num))
        self._stream.copy(self._workspace.take("positions", num), self._positions.rows(0, num))

    def enqueue_segments(self, rows: NDArray[np.int64]) -> Tensor:
        """Enqueue the copy of a table of segments to the workspace, behind stage().

        Args:
            rows: as segment_rows() makes them.

        Returns:
            Where they will be.
        """
        staged = Tensor.over(self._tables, rows.shape, np.int64)
        staged.numpy()[:] = rows
        table = self._workspace.segments(rows.shape[1])
        self._stream.copy(table, staged)
        return table

    def mark_inputs(self) -> None:
        """Record that everything enqueued so far must run before staging is rewritten."""
        self._stream.record(self._inputs_read)
        self._is_marked = True

    def enqueue_logits(self, logits: Tensor) -> None:
        """Enqueue the copy of logits [rows, V] to pinned memory."""
        self._stream.copy(self._logits.rows(0, logits.shape[0]), logits)

    def mark_logits(self) -> None:
        """Record that the logits are there once everything enqueued so far has run."""
        self._stream.record(self._logits_copied)

    def read_logits(self, rows: int) -> NDArray[np.float32]:
        """Wait for the stream and return a copy of the logits, [rows, V]."""
        self._stream.synchronize()
        return np.array(self._logits.rows(0, rows).numpy())

    def read_marked_logits(self, rows: int) -> NDArray[np.float32]:
        """The same, but wait for no more than what the last mark_logits() was behind."""
        self._logits_copied.synchronize()
        return np.array(self._logits.rows(0, rows).numpy())

    def close(self) -> None:
        """Gives the pinned memory back. Safe to call twice."""
        self._inputs_read.close()
        self._logits_copied.close()
        self._inputs.close()
        self._tables.close()
        self._outputs.close()


def single(state: SequenceState, num_tokens: int) -> Batch:
    """A batch whose rows all belong to one sequence."""
    return Batch(num_tokens, (Segment(state, 0, num_tokens),))


def positions_of(batch: Batch) -> list[int]:
    """The position of every row of a batch that is about to be enqueued."""
    return [
        position
        for segment in batch.segments
        for position in range(
            segment.state.position, segment.state.position + segment.stop - segment.start
        )
    ]


@contextmanager
def advancing(
    state: SequenceState, ids: list[int], *, is_exact: bool = True, layer_by_layer: bool = False
) -> Iterator[None]:
    """Around the enqueueing of one pass: counts its tokens only when all of it was enqueued.

    Args:
        state: of the sequence.
        ids: tokens of the pass.
        is_exact: whether all of them are computed as a canonical read would.
        layer_by_layer: see SequenceState.begin_pass().

    Raises:
        StateError: an earlier pass of this sequence was interrupted halfway.
    """
    state.begin_pass(layer_by_layer=layer_by_layer)
    yield
    state.end_pass(ids, is_exact=is_exact)
