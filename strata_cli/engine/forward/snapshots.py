"""Host memory that running states are copied to: page-locked, and used again by later copies.

A GPU copies to page-locked memory at the link's rate, to other memory through a buffer of its
driver, at a tenth of that. Locking memory takes longer than such a copy, so it stays locked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Stream, Tensor
from strata_cli.engine.device.transfer import host_tensor
from strata_cli.errors import OutOfMemory

MOST_UNUSED = 2  # blocks that wait for the next copy
ALIGN_BYTES = 64


class Lease:
    """A block of memory, given back when nobody refers to the lease any more."""

    def __init__(self, room: SnapshotRoom, buffer: Buffer) -> None:
        self._room = room
        self.buffer = buffer

    def __del__(self) -> None:
        self._room.give_back(self.buffer)


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
        self._is_closed = False

    def copy(self, tensors: Sequence[Tensor]) -> tuple[tuple[NDArray[Any], ...], Lease]:
        """Copies of tensors, which are whole as long as the lease lives. Waits for the stream."""
        offsets = np.cumsum([0, *(-(-t.nbytes // ALIGN_BYTES) * ALIGN_BYTES for t in tensors)])
        lease = Lease(self, self._block(int(offsets[-1])))
        pairs = [
            (Tensor.over(lease.buffer, t.shape, t.dtype, int(offset)), t)
            for t, offset in zip(tensors, offsets[:-1], strict=True)
        ]
        self._stream.copy_many([pair for pair in pairs if pair[1].nbytes])
        self._stream.synchronize()
        return tuple(to.numpy() for to, _ in pairs), lease

    def put_back(self, tensors: Sequence[Tensor], parts: Sequence[NDArray[Any]]) -> None:
        """Copy such copies, wherever they lie now, over their tensors. Waits for the stream."""
        for tensor, part in zip(tensors, parts, strict=True):
            if tensor.nbytes:
                self._stream.copy(tensor, host_tensor(self._device, np.ascontiguousarray(part)))
        self._stream.synchronize()

    def give_back(self, buffer: Buffer) -> None:
        """For a lease that ends: its block may be used again."""
        if self._is_closed or len(self._unused) >= MOST_UNUSED:
            buffer.close()
        else:
            self._unused.append(buffer)

    def close(self) -> None:
        """Give back what nobody uses; the rest follows as leases end. Safe to call twice."""
        self._is_closed = True
        while self._unused:
            self._unused.pop().close()

    def __enter__(self) -> SnapshotRoom:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _block(self, nbytes: int) -> Buffer:
        """At least so many bytes; ordinary memory where no more can be locked."""
        while self._unused:
            buffer = self._unused.pop()
            if buffer.nbytes >= nbytes:
                return buffer
            buffer.close()
        try:
            return self._device.allocate_pinned(max(nbytes, 1))
        except OutOfMemory:
            return self._device.wrap(np.empty(max(nbytes, 1), np.uint8))
