"""Host memory that running states are copied to: page-locked, and used again by later copies.

A GPU copies to page-locked memory at the link's rate, to other memory through a buffer of its
driver, at a tenth of that. Locking memory takes longer than such a copy, so it stays locked.

Copies out run on the one stream that uses the state, so that each sees what those ahead of it left,
and nobody need wait for them. Copies back are bound by the link, and a pass needs what they bring
layer by layer: where a device copies beside kernels, they run on a stream of their own but for the
first, and the pass waits for each group of them as late as it can. They are not enqueued before the
pass has begun: its tokens come over the same link, which takes what it was given first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Event, Stream, Tensor
from strata_cli.engine.device.transfer import host_tensor
from strata_cli.errors import DeviceError, OutOfMemory

MOST_UNUSED = 2  # blocks that wait for another copy behind the next one
ALIGN_BYTES = 64


class Lease(NamedTuple):
    """A block of memory, given back when nobody refers to the lease any more.

    A tuple, because it is never there by half, wherever an interrupt comes.

    Attributes:
        room: of the block.
        buffer: the block.
        copies: windows of it, one for each tensor.
    """

    room: SnapshotRoom
    buffer: Buffer
    copies: tuple[Tensor, ...]

    def __del__(self) -> None:
        self.room.give_back(self.buffer)


class Group(NamedTuple):
    """Tensors that are put back together; no layer before this one needs them."""

    layer: int
    num_tensors: int


class _Waiting(NamedTuple):
    """Copies back that are not enqueued yet: (tensor, copy), and their groups."""

    pairs: list[tuple[Tensor, Tensor]]
    groups: Sequence[Group]
    lease: Lease


class SnapshotRoom:
    """Blocks for copies of the same tensors. A context manager.

    Used from the thread that owns the stream; what a lease held may come back from any.

    Args:
        device: of the tensors.
        stream: that uses them.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._side: Stream | None = None
        self._events: list[Event] = []
        self._waiting: _Waiting | None = None
        self._arriving: list[tuple[int, Event]] = []
        self._is_returning = False
        self._unused: list[Buffer] = []
        self._under_way: list[tuple[Event, Lease]] = []
        self._spare: list[Event] = []
        self._is_closed = False

    def copy(
        self, tensors: Sequence[Tensor], *, waits: bool = True
    ) -> tuple[tuple[NDArray[Any], ...], Lease]:
        """Copies of tensors, which are whole as long as the lease lives.

        Args:
            tensors: the same ones every time.
            waits: for the stream; else only what runs on it behind this may read the copies.
        """
        buffer = self._block(_offsets(tensors)[-1])
        lease = Lease(self, buffer, _windows(buffer, tensors))
        pairs = [(to, t) for to, t in zip(lease.copies, tensors, strict=True) if t.nbytes]
        self._stream.copy_many(pairs)
        if waits:
            self._stream.synchronize()
        else:
            self._hold(lease, self._stream)
        return tuple(to.numpy() for to in lease.copies), lease

    def put_back(
        self,
        tensors: Sequence[Tensor],
        parts: Sequence[NDArray[Any]],
        lease: Lease | None,
        groups: Sequence[Group] = (),
    ) -> None:
        """Copy such copies, wherever they lie now, over their tensors.

        What the stream is given next finds the first group in its place, later ones behind
        wait_for(), and all of them behind settle(), which must come before another put_back().

        Args:
            tensors: as they were copied.
            parts: the copies.
            lease: of the memory that they are in; None: of their own, which is waited for.
            groups: all tensors, in order, by when they are needed; none: all at once.
        """
        if lease is None:
            for tensor, part in zip(tensors, parts, strict=True):
                if tensor.nbytes:
                    self._stream.copy(tensor, host_tensor(self._device, np.ascontiguousarray(part)))
            self._stream.synchronize()
            return
        pairs = [*zip(tensors, lease.copies, strict=True)]
        if len(groups) < 2 or not self._device.has_async_copy:
            self._stream.copy_many(_with_bytes(pairs))
            self._hold(lease, self._stream)
            return
        first = groups[0].num_tensors
        self._stream.copy_many(_with_bytes(pairs[:first]))
        while len(self._events) < len(groups):
            self._events.append(self._device.event())
        self._stream.record(self._events[0])  # what the others must come behind
        self._waiting = _Waiting(pairs[first:], groups[1:], lease)

    def wait_for(self, layer: int) -> None:
        """What the stream is given next finds those groups in their place that a layer needs.

        Behind the first layer, the others are enqueued.
        """
        if self._waiting is not None and layer:
            self._copy_beside(self._waiting)
        while self._arriving and self._arriving[0][0] <= layer:
            self._stream.wait(self._arriving[0][1])
            del self._arriving[0]
            self._is_returning = bool(self._arriving)

    def settle(self) -> None:
        """What the stream is given next finds everything in its place, wherever Ctrl-C came."""
        if self._is_returning and self._side is not None:
            self._stream.join(self._side)
        if self._waiting is not None:
            self._stream.copy_many(_with_bytes(self._waiting.pairs))
            self._hold(self._waiting.lease, self._stream)
        self._waiting = None
        self._arriving = []
        self._is_returning = False

    def _copy_beside(self, waiting: _Waiting) -> None:
        """Enqueue copies on the other stream."""
        self._side = side = self._side or self._device.stream("returning")
        begun, *events = self._events
        self._is_returning = True  # before anything is
        side.wait(begun)
        arriving, first = list[tuple[int, Event]](), 0
        for group, event in zip(waiting.groups, events, strict=False):
            side.copy_many(_with_bytes(waiting.pairs[first : first + group.num_tensors]))
            side.record(event)
            arriving.append((group.layer, event))
            first += group.num_tensors
        self._hold(waiting.lease, side)
        self._arriving = arriving
        self._waiting = None

    def _hold(self, lease: Lease, stream: Stream) -> None:
        """Keep a block until what is enqueued has used it: locked memory must not go before."""
        held = [(each, each[0].query()) for each in self._under_way]
        self._under_way = [each for each, is_over in held if not is_over]
        self._spare += [each[0] for each, is_over in held if is_over]
        event = self._spare.pop() if self._spare else self._device.event()
        stream.record(event)
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
        self._waiting = None
        if self._side is not None:
            self._side.close()
        if self._under_way:
            with suppress(DeviceError):  # a stream that is closed already has waited
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


def _windows(buffer: Buffer, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The copies of tensors in a block."""
    return tuple(
        Tensor.over(buffer, tensor.shape, tensor.dtype, offset)
        for tensor, offset in zip(tensors, _offsets(tensors), strict=False)
    )


def _with_bytes(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(to, source) for to, source in pairs if to.nbytes]
