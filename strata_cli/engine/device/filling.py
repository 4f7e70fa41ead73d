"""Fills memory from memory-mapped files: several threads read, and a device copies meanwhile."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import Arena, ArenaContents
from strata_cli.engine.device.base import Device, Event, Tensor
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import DeviceError

PIECE_BYTES = 32 << 20  # what one thread reads and one copy moves
NUM_SLOTS = 10
IN_COPY_SLOTS = 2  # of them: what the device copies while threads fill the others
MOST_THREADS = 8  # more do not read faster from the page cache than a PCIe link takes it

PREFETCHED_BYTES = 1 << 20  # smaller stretches are not worth a system call of their own
MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it
EHWPOISON = 133  # nor does errno name this
UNREADABLE = (errno.EFAULT, errno.EIO, EHWPOISON)  # any other answer: no such advice here
_libc = ctypes.CDLL(None, use_errno=True)


def fill(device: Device, arena: Arena, progress: Callable[[int], None]) -> None:
    """Bring an arena's contents into its buffer. Blocks until they are there.

    Interrupted, it ends its threads and leaves the buffer half filled.

    Args:
        device: whose buffer it is.
        arena: with all its tensors added.
        progress: called in this thread with the number of bytes done since the last call.

    Raises:
        DeviceError: a source cannot be read any more (its file was cut, or the disk fails), or a
            copy failed.
        OutOfMemory: there is no room for the pinned staging buffer.
    """
    contents = arena.contents()
    data = arena.buffer.host_bytes
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="strata-fill") as threads:
        if data is None:
            _fill_through_staging(device, arena, contents, threads, progress)
        else:
            _fill_directly(data[: arena.used_bytes], contents, threads, progress)


def _num_threads() -> int:
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


class _Piece(NamedTuple):
    """A stretch of an arena."""

    start: int
    nbytes: int


def _pieces(nbytes: int) -> Iterator[_Piece]:
    for start in range(0, nbytes, PIECE_BYTES):
        yield _Piece(start, min(PIECE_BYTES, nbytes - start))


def _fill_directly(
    data: NDArray[np.uint8],
    contents: ArenaContents,
    threads: ThreadPoolExecutor,
    progress: Callable[[int], None],
) -> None:
    def read(piece: _Piece) -> int:
        out = data[piece.start : piece.start + piece.nbytes]
        contents.copy_to(out, piece.start, read_ahead)
        return piece.nbytes

    for nbytes in threads.map(read, _pieces(data.size)):  # left early, it cancels the rest
        progress(nbytes)


class Rows(NamedTuple):
    """Rows of a memory-mapped file and their places in host memory.

    Attributes:
        out: uint8 [n, nbytes]; the rows may lie apart.
        source: uint8 [n, nbytes], contiguous.
    """

    out: NDArray[np.uint8]
    source: NDArray[np.uint8]


def fill_rows(parts: Iterable[Rows], progress: Callable[[int], None]) -> None:
    """Copy rows from files to their places, by several threads. Blocks until they are there.

    Args:
        parts: what goes where; places must not overlap. In the files' order it is fastest. May
            take its time: the parts before are copied meanwhile.
        progress: called in this thread with the number of bytes done since the last call.

    Raises:
        DeviceError: a source cannot be read any more (its file was cut, or the disk fails).
    """
    with ThreadPoolExecutor(_num_threads(), thread_name_prefix="strata-fill") as threads:
        try:
            for nbytes in threads.map(_copy_rows, _row_pieces(parts)):
                progress(nbytes)
        except BaseException:  # also of the parts, while threads copy those before
            threads.shutdown(cancel_futures=True)
            raise


def _row_pieces(parts: Iterable[Rows]) -> Iterator[Rows]:
    for out, source in parts:
        together = max(1, PIECE_BYTES // max(source.shape[1], 1))
        for first in range(0, len(source), together):
            yield Rows(out[first : first + together], source[first : first + together])


def _copy_rows(piece: Rows) -> int:
    read_ahead(piece.source)
    np.copyto(piece.out, piece.source)
    return piece.source.nbytes


class _Slot(NamedTuple):
    """Pinned room for one piece, and the point behind the copy that reads it."""

    room: Tensor
    copied: Event


class _Reading(NamedTuple):
    """A piece on its way into its slot."""

    piece: _Piece
    slot: _Slot
    done: Future[None]


def _fill_through_staging(
    device: Device,
    arena: Arena,
    contents: ArenaContents,
    threads: ThreadPoolExecutor,
    progress: Callable[[int], None],
) -> None:
    """A ring of slots: threads fill them ahead, copies leave them in order."""
    with ExitStack() as resources:
        slots = _open_slots(device, arena.used_bytes, resources)
        stream = device.stream("fill")
        resources.callback(stream.close)
        readings: deque[_Reading] = deque()
        most_readings = max(len(slots) - IN_COPY_SLOTS, 1)
        # Whatever ends this, no thread may write into a slot whose memory is gone.
        resources.callback(lambda: _give_up(readings))

        def enqueue_first() -> None:
            reading = readings[0]
            reading.done.result()
            start, nbytes = reading.piece
            to = Tensor.over(arena.buffer, (nbytes,), np.uint8, start)
            stream.copy(to, reading.slot.room.rows(0, nbytes))
            stream.record(reading.slot.copied)
            readings.popleft()
            progress(nbytes)

        for index, piece in enumerate(_pieces(arena.used_bytes)):
            if len(readings) == most_readings:
                enqueue_first()
            slot = slots[index % len(slots)]
            slot.copied.synchronize()
            out = slot.room.numpy()[: piece.nbytes]
            done = threads.submit(contents.copy_to, out, piece.start, read_ahead)
            readings.append(_Reading(piece, slot, done))
        while readings:
            enqueue_first()
        stream.synchronize()


def _open_slots(device: Device, nbytes: int, resources: ExitStack) -> list[_Slot]:
    count = min(NUM_SLOTS, -(-nbytes // PIECE_BYTES))
    pinned = resources.enter_context(device.allocate_pinned(count * PIECE_BYTES))
    slots = []
    for index in range(count):
        event = device.event()
        resources.callback(event.close)
        room = Tensor.over(pinned, (PIECE_BYTES,), np.uint8, index * PIECE_BYTES)
        slots.append(_Slot(room, event))
    return slots


def _give_up(readings: deque[_Reading]) -> None:
    """Cancel what has not begun and wait for the rest. Their errors no longer matter."""
    for reading in readings:
        reading.done.cancel()
    for reading in readings:
        if not reading.done.cancelled():
            reading.done.exception()


def read_ahead(source: NDArray[np.uint8], least_bytes: int | None = None) -> None:
    """Have the kernel read and map all pages of a stretch at once, instead of one fault each.

    Args:
        source: contiguous.
        least_bytes: shorter stretches are left to the faults; None: PREFETCHED_BYTES.

    Raises:
        DeviceError: a page cannot be read; touching it would kill the process with SIGBUS.
    """
    if source.size < (PREFETCHED_BYTES if least_bytes is None else least_bytes):
        return
    address = int(source.__array_interface__["data"][0])
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = ctypes.c_size_t(address + source.size - first)
    if _libc.madvise(ctypes.c_void_p(first), length, MADV_POPULATE_READ) == 0:
        return
    code = ctypes.get_errno()
    if code in UNREADABLE:
        raise DeviceError(
            f"cannot read {gib(source.size)} of the model file ({os.strerror(code)})",
            hint="the file was cut or the disk fails: check it, then start again",
        )
