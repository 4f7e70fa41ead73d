"""Page-locked host memory of a CUDA device, in the three forms that a driver may grant it."""

from __future__ import annotations

import ctypes
import logging
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Home
from strata_cli.engine.device.cuda_driver import Context, check
from strata_cli.engine.device.cuda_memory import HostViewBuffer
from strata_cli.engine.device.host_memory import anonymous_bytes, host_memory
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import DeviceError, OutOfMemory

logger = logging.getLogger(__name__)

PAGE_BYTES = mmap.PAGESIZE
SLICE_BYTES = 1 << 30  # what is registered at a time when the whole cannot be
FILL_BYTES = 64 << 20  # what one thread touches at a time
FILL_THREADS = 16
UNSUPPORTED = frozenset({"CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED"})
MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it


class Piece(NamedTuple):
    """One registered stretch of host memory."""

    address: int
    nbytes: int


class PinnedBuffer(HostViewBuffer):
    """Page-locked host memory that kernels read and write in place.

    Anonymous memory in huge pages, touched by several threads and then registered: whole, or in
    slices of SLICE_BYTES where the driver refuses the whole. Registering touched memory is ten
    times faster than cuMemHostAlloc, and arrays over it outlive close(). Where registering is not
    supported at all, cuMemHostAlloc gives the memory.

    Raises:
        OutOfMemory: the machine has not enough, or the driver would not lock it.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        context.enter()
        context.holdings.reap()
        size = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
        pages = _LockedPages(context, anonymous_bytes(size if nbytes >= 0 else nbytes))
        populate(pages.memory)
        super().__init__(context, Home.PINNED, pages.memory[:nbytes])
        self._key = context.holdings.take(self, pages, pages.lock)
        self._bytes = pages.memory[:nbytes]
        self._address = pages.address
        self.pieces_bytes = SLICE_BYTES if len(pages.pieces) > 1 else 0

    def close(self) -> None:
        super().close()
        self.context.holdings.give(self._key)


class _LockedPages:
    """Host memory and the lock on it. It stays mapped for as long as it is registered.

    Attributes:
        memory: uint8 [nbytes], whole pages; another than before where the driver gave it.
        address: at which kernels find it, once it is locked.
        pieces: that are registered; none where the driver gave the memory.
    """

    def __init__(self, context: Context, memory: NDArray[np.uint8]) -> None:
        self._context = context
        self.memory = memory
        self.address = 0
        self.pieces: list[Piece] = []

    def lock(self) -> None:
        """See PinnedBuffer."""
        self._context.enter()
        pieces = register(self._context, self.memory)
        if pieces is None:
            logger.warning("cuMemHostRegister is not supported here: page-locking is slower")
            self.memory = host_alloc(self._context, self.memory.size)
        self.pieces = pieces or []
        whole = Piece(int(self.memory.__array_interface__["data"][0]), self.memory.size)
        self.address = mapped_address(self._context, whole, self.pieces)

    def free(self) -> None:
        unregister(self.pieces, self._context)


def populate(data: NDArray[np.uint8]) -> None:
    """Gives every page of fresh memory its frame, by several threads. Contents stay zero."""
    starts = range(0, data.size, FILL_BYTES)
    if len(starts) == 1:
        _populate_part(data)
        return
    with ThreadPoolExecutor(min(FILL_THREADS, len(starts))) as threads:
        list(threads.map(lambda at: _populate_part(data[at : at + FILL_BYTES]), starts))


_libc = ctypes.CDLL(None, use_errno=True)


def _populate_part(part: NDArray[np.uint8]) -> None:
    address = ctypes.c_void_p(part.__array_interface__["data"][0])
    if _libc.madvise(address, ctypes.c_size_t(part.size), MADV_POPULATE_WRITE) != 0:
        part[::PAGE_BYTES] = 0  # an older kernel: touch the pages ourselves


def register(context: Context, data: NDArray[np.uint8]) -> list[Piece] | None:
    """Locks host memory for the GPU: whole, else slice by slice.

    Returns:
        the registered pieces in order; None where the driver cannot register memory at all.

    Raises:
        OutOfMemory: not even in slices; nothing stays registered.
    """
    whole = Piece(int(data.__array_interface__["data"][0]), data.size)
    status = _register_piece(context, whole)
    if not int(status):
        return [whole]
    if status.name in UNSUPPORTED:
        return None
    if whole.nbytes <= SLICE_BYTES:
        raise _cannot_lock(whole.nbytes, 0, status)
    logger.warning(
        "page-locking %s in slices of %s: the whole gave %s",
        gib(whole.nbytes),
        gib(SLICE_BYTES),
        status.name,
    )
    return _register_slices(context, whole)


def _register_slices(context: Context, whole: Piece) -> list[Piece]:
    pieces: list[Piece] = []
    for offset in range(0, whole.nbytes, SLICE_BYTES):
        piece = Piece(whole.address + offset, min(SLICE_BYTES, whole.nbytes - offset))
        status = _register_piece(context, piece)
        if int(status):
            unregister(pieces, context)
            raise _cannot_lock(whole.nbytes, offset, status)
        pieces.append(piece)
    return pieces


def _register_piece(context: Context, piece: Piece) -> Any:
    """CUresult of registering: the caller knows what a refusal means."""
    driver = context.gpu.driver
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    return driver.cuMemHostRegister(piece.address, piece.nbytes, flags)[0]


def unregister(pieces: list[Piece], context: Context) -> None:
    """Unlocks the pieces and forgets them; waits for the GPU first, whose copies may use them.

    Never raises: used in cleanup.
    """
    if pieces:
        context.enter()
        context.gpu.driver.cuCtxSynchronize()
    while pieces:
        context.gpu.driver.cuMemHostUnregister(pieces.pop().address)


def _cannot_lock(nbytes: int, locked_bytes: int, status: Any) -> OutOfMemory:
    free_bytes, total_bytes = host_memory()
    return OutOfMemory(
        f"cannot page-lock host memory: need {gib(nbytes)}, locked {gib(locked_bytes)}, "
        f"available {gib(free_bytes)} of {gib(total_bytes)} (cuMemHostRegister: {status.name})",
        hint="close other programs, raise ulimit -l, or use a smaller model",
    )


class _HostAllocation:
    """Memory from cuMemHostAlloc, freed with the last array over it."""

    def __init__(self, context: Context, nbytes: int) -> None:
        self._context = context
        driver = context.gpu.driver
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._address = int(
            check(f"cuMemHostAlloc({nbytes})", driver.cuMemHostAlloc(nbytes, flags))
        )
        context.hold()
        self.__array_interface__ = {
            "data": (self._address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "_address"):
            self._context.enter()
            self._context.gpu.driver.cuMemFreeHost(self._address)
            self._context.drop()


def host_alloc(context: Context, nbytes: int) -> NDArray[np.uint8]:
    """Page-locked memory straight from the driver."""
    return np.asarray(_HostAllocation(context, nbytes))


def mapped_address(context: Context, whole: Piece, pieces: list[Piece]) -> int:
    """The address at which kernels find page-locked memory.

    Raises:
        DeviceError: the pieces do not lie side by side on the device, so no one address exists.
    """
    driver = context.gpu.driver
    seen = [
        int(
            check(
                f"cuMemHostGetDevicePointer(slice of {piece.nbytes} bytes)",
                driver.cuMemHostGetDevicePointer(piece.address, 0),
            )
        )
        for piece in pieces or [whole]
    ]
    start = seen[0]
    for piece, address in zip(pieces, seen, strict=False):
        if address - start != piece.address - whole.address:
            raise DeviceError(
                f"page-locked slices of {gib(whole.nbytes)} are scattered on the device",
                hint="free host memory so that it can be locked in one piece",
            )
    return start
