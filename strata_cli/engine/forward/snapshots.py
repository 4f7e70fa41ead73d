"""Host memory that running states are copied to: page-locked, and used again by later copies.

A GPU copies to page-locked memory at the link's rate, to other memory through a buffer of its
driver, at a tenth of that. Locking memory takes longer than such a copy, so it stays locked.

Copies out and back run on the one stream that uses the state, so that each sees what those ahead of
it left, and nobody need wait for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Event, Stream, Tensor
from strata_cli.engine.device.transfer import host_tensor
from strata_cli.errors import OutOfMemory

MOST_UNUSED = 2  # blocks that wait for another copy behind the next one
ALIGN_BYTES = 64


class Lease(NamedTuple):
    """A block of memory, given back when nobody refers to the lease any more.

    A tuple, because it is never there by half, wherever an interrupt comes.
    """

    room: SnapshotRoom
    buffer: Buffer

    def __del__(self) -> None:
        self.room.give_back(self.buffer)


class SnapshotRoom:
    """Blocks for copies of the same tensors. A context manager.

    Used from the thread that owns the stream; what a lease held may come back from any.

    Args:
        device: of the tensors.
        stream: that copies run on.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._unused: list[Buffer] = []
        self._under_way: list[tuple[Event, Lease]] = []
        self._is_closed = False

    def copy(
        self, tensors: Sequence[Tensor], *, waits: bool = True
    ) -> tuple[tuple[NDArray[Any], ...], Lease]:
        """Copies of tensors, which are whole as long as the lease lives.

        Args:
            tensors: the same ones every time.
            waits: for the stream; else only what runs on it behind this may read the copies.
        """
        lease = Lease(self, self._block(_offsets(tensors)[-1]))
        copies = _windows(lease.buffer, tensors)
        pairs = [(to, t) for to, t in zip(copies, tensors, strict=True) if t.nbytes]
        self._stream.copy_many(pairs)
        if waits:
            self._stream.synchronize()
        else:
            self._hold(lease)
        return tuple(to.numpy() for to in copies), lease

    def put_back(
        self, tensors: Sequence[Tensor], parts: Sequence[NDArray[Any]], lease: Lease | None
    ) -> None:
        """Copy such copies, wherever they lie now, over their tensors.

        Args:
            tensors: as they were copied.
            parts: the copies.
            lease: of the memory that they are in; None: of their own, which is waited for.
        """
        if lease is not None:
            copies = _windows(lease.buffer, tensors)
            self._stream.copy_many(
                [(t, c) for t, c in zip(tensors, copies, strict=True) if t.nbytes]
            )
            self._hold(lease)
            return
        for tensor, part in zip(tensors, parts, strict=True):
            if tensor.nbytes:
                self._stream.copy(tensor, host_tensor(self._device, np.ascontiguousarray(part)))
        self._stream.synchronize()

    def _hold(self, lease: Lease) -> None:
        """Keep a block until what is enqueued has used it: locked memory must not go before."""
        self._under_way = [each for each in self._under_way if not each[0].query()]
        event = self._device.event()
        self._stream.record(event)
        self._under_way.append((event, lease))

    def give_back(self, buffer: Buffer) -> None:
        """For a lease that ends: its block may be used again.

        In any thread and at any time, for Python collects garbage when it likes, also where the
        stream is being recorded and nothing else may be asked of the device: nothing is closed.
        """
        if not self._is_closed:
            self._unused.append(buffer)

    def close(self) -> None:
        """Give back what nobody uses; the rest follows as leases end. Safe to call twice."""
        self._is_closed = True
        if self._under_way:
            self._stream.synchronize()
            self._under_way.clear()
        while self._unused:
            self._unused.pop().close()

    def __enter__(self) -> SnapshotRoom:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _block(self, nbytes: int) -> Buffer:
        """At least so many bytes; ordinary memory where no more can be locked."""
        while len(self._unused) > MOST_UNUSED + 1:  # one is wanted now
            self._unused.pop(0).close()
        while self._unused:
            buffer = self._unused.pop()
            if buffer.nbytes >= nbytes:
                return buffer
            buffer.close()
        try:
            return self._device.allocate_pinned(max(nbytes, 1))
        except OutOfMemory:
            return self._device.wrap(np.empty(max(nbytes, 1), np.uint8))


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Where each tensor's copy begins in a block, and the end of all."""
    sizes = (-(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES for tensor in tensors)
    return [0, *accumulate(sizes)]


def _windows(buffer: Buffer, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The copies of tensors in a block."""
    return [
        Tensor.over(buffer, tensor.shape, tensor.dtype, offset)
        for tensor, offset in zip(tensors, _offsets(tensors), strict=False)
    ]
