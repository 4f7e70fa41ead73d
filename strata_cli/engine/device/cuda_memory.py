"""Memory of a CUDA device: buffers in VRAM under a hard budget, and host memory as it is."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Home
from strata_cli.engine.device.cuda_driver import Context, check
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import DeviceError, OutOfMemory

GRANULE_BYTES = 512  # the driver rounds small allocations up to at least this


class Budget:
    """How many bytes of device memory may be in use at once.

    ``used_bytes`` has many writers (any thread may free), all under the lock.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes

    def take(self, nbytes: int) -> None:
        """Counts an allocation.

        Raises:
            OutOfMemory: it would pass the limit; nothing is counted.
        """
        with self._lock:
            if nbytes > self.left_bytes:
                raise OutOfMemory(
                    f"device memory: need {gib(nbytes)}, "
                    f"left {gib(self.left_bytes)} of the {gib(self.limit_bytes)} budget",
                    hint="raise --vram-bytes, or lower the context or the expert cache",
                )
            self.used_bytes += nbytes

    def give(self, nbytes: int) -> None:
        with self._lock:
            self.used_bytes -= nbytes


class CudaBuffer:
    """Memory that kernels and copies of one CUDA device reach by address.

    ``pieces_bytes`` is the length of the separately registered pieces of page-locked memory, which
    one copy must not straddle; 0 where there is only one.
    """

    pieces_bytes = 0

    def __init__(self, context: Context, home: Home, nbytes: int, *, read_only: bool) -> None:
        self.context = context
        self.is_read_only = read_only
        self._home = home
        self._nbytes = nbytes
        self._address = 0
        self._is_open = True

    @property
    def home(self) -> Home:
        return self._home

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def address(self) -> int:
        if not self._is_open:
            raise DeviceError(f"{self._home.value} buffer of {self._nbytes} bytes is closed")
        return self._address

    @property
    def host_bytes(self) -> NDArray[np.uint8] | None:
        _ = self.address
        return None

    def close(self) -> None:
        self._is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Allocation:
    """Device memory, and its share of the budget."""

    def __init__(self, context: Context, budget: Budget, nbytes: int) -> None:
        self._context = context
        self._budget = budget
        self._nbytes = -(-max(nbytes, 1) // GRANULE_BYTES) * GRANULE_BYTES
        self._held: list[int] = []

    @property
    def address(self) -> int:
        return self._held[0]

    def take(self) -> None:
        """See DeviceBuffer."""
        self._context.enter()
        self._context.holdings.reap()
        self._budget.take(self._nbytes)
        try:
            self._held.append(int(allocate(self._context, self._nbytes)))
        except BaseException:
            self._budget.give(self._nbytes)
            raise

    def free(self) -> None:
        while self._held:
            self._context.enter()
            self._context.gpu.driver.cuMemFree(self._held.pop())
            self._budget.give(self._nbytes)


class DeviceBuffer(CudaBuffer):
    """Memory of the GPU. Freeing it waits for the GPU, so work in flight may still use it.

    Raises:
        OutOfMemory: the budget or the GPU has not enough left.
    """

    def __init__(
        self, context: Context, budget: Budget, nbytes: int, *, read_only: bool = False
    ) -> None:
        super().__init__(context, Home.DEVICE, nbytes, read_only=read_only)
        allocation = _Allocation(context, budget, nbytes)
        self._key = context.holdings.take(self, allocation, allocation.take)
        self._address = allocation.address

    def close(self) -> None:
        super().close()
        self.context.holdings.give(self._key)


def allocate(context: Context, nbytes: int) -> Any:
    """CUdeviceptr of fresh device memory; an error names need, free and total."""
    driver = context.gpu.driver
    try:
        return check(f"cuMemAlloc({nbytes})", driver.cuMemAlloc(nbytes))
    except OutOfMemory as error:
        free, total = check("cuMemGetInfo()", driver.cuMemGetInfo())
        raise OutOfMemory(
            f"device memory of cuda:{context.gpu.ordinal}: need {gib(nbytes)}, "
            f"free {gib(free)} of {gib(total)} ({error.message})",
            hint=error.hint,
        ) from error


class HostViewBuffer(CudaBuffer):
    """Host memory that the host sees as well: pageable bytes as they are, or page-locked ones."""

    def __init__(self, context: Context, home: Home, data: NDArray[np.uint8]) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise DeviceError(
                f"a buffer needs contiguous uint8 [nbytes], got {data.dtype} {data.shape}",
                hint="pass array.reshape(-1).view(np.uint8)",
            )
        super().__init__(context, home, data.size, read_only=not data.flags.writeable)
        self._bytes: NDArray[np.uint8] | None = data
        self._address = int(data.__array_interface__["data"][0])

    @property
    def host_bytes(self) -> NDArray[np.uint8] | None:
        _ = self.address
        return self._bytes

    def close(self) -> None:
        super().close()
        self._bytes = None


class Span(NamedTuple):
    """A stretch of bytes: the first one, relative to the start of a copy, and how many."""

    start: int
    nbytes: int


def spans(src: CudaBuffer, src_at: int, dst: CudaBuffer, dst_at: int, nbytes: int) -> list[Span]:
    """Cuts a copy where it would straddle two registered pieces of either buffer."""
    if not src.pieces_bytes and not dst.pieces_bytes:
        return [Span(0, nbytes)] if nbytes else []
    cuts: list[Span] = []
    done = 0
    while done < nbytes:
        length = nbytes - done
        for buffer, at in ((src, src_at), (dst, dst_at)):
            if buffer.pieces_bytes:
                length = min(length, buffer.pieces_bytes - (at + done) % buffer.pieces_bytes)
        cuts.append(Span(done, length))
        done += length
    return cuts
