"""The CUDA device: one GPU through the driver API."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Home, Kernel, MemoryInfo
from strata_cli.engine.device.cuda_driver import Context, Gpu, check
from strata_cli.engine.device.cuda_event import CudaEvent
from strata_cli.engine.device.cuda_kernels import Loader
from strata_cli.engine.device.cuda_memory import (
    Budget,
    CudaBuffer,
    DeviceBuffer,
    HostViewBuffer,
)
from strata_cli.engine.device.cuda_pinned import PinnedBuffer
from strata_cli.engine.device.cuda_stream import CudaStream
from strata_cli.engine.device.nvrtc import CubinCache, user_cache
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import DeviceError, OutOfMemory

logger = logging.getLogger(__name__)

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaOptions:
    """How a GPU is shared with others.

    Attributes:
        vram_bytes: hard cap on device memory; 0: what is free at the start, less the reserve.
        vram_reserve_bytes: what is then left to others.
        cache_folder: where compiled kernels are kept; None: the user's cache folder.
    """

    vram_bytes: int = 0
    vram_reserve_bytes: int = 700 * MIB
    cache_folder: Path | None = None


class _Closable(Protocol):
    def close(self) -> None: ...


Owner = TypeVar("Owner", bound=_Closable)


class CudaDevice:
    """One GPU: its primary context, memory under a budget, streams, and compiled kernels.

    Raises:
        OutOfMemory: the reserve leaves nothing, or the cap is more than is free.
        DeviceError: the driver refuses the context.
    """

    def __init__(self, gpu: Gpu, options: CudaOptions) -> None:
        self._gpu = gpu
        self._context = Context(gpu)
        try:
            self._context.enter()
            self._budget = Budget(_limit_bytes(self._driver_memory(), gpu, options))
        except DeviceError:
            self._context.drop()
            raise
        folder = options.cache_folder
        self._loader = Loader(self._context, CubinCache(folder) if folder else user_cache())
        self._streams: list[CudaStream] = []
        self._closed = False
        atexit.register(self.close)
        logger.info(
            "cuda:%d is %s, compute capability %d.%d, budget %s",
            gpu.ordinal,
            gpu.name,
            *gpu.capability,
            gib(self._budget.limit_bytes),
        )

    @property
    def name(self) -> str:
        return f"cuda:{self._gpu.ordinal}"

    @property
    def has_async_copy(self) -> bool:
        return True

    @property
    def has_own_memory(self) -> bool:
        return True

    def memory(self) -> MemoryInfo:
        """What may still be allocated: within the budget, and free on the GPU."""
        self._check_open()
        self._context.enter()
        self._context.holdings.reap()
        free, total = self._driver_memory()
        return MemoryInfo(min(free, self._budget.left_bytes), total)

    def allocate(self, nbytes: int) -> DeviceBuffer:
        self._check_open()
        if nbytes < 0:
            raise DeviceError(f"cannot allocate {nbytes} bytes")
        return self._own(DeviceBuffer(self._context, self._budget, nbytes))

    def allocate_pinned(self, nbytes: int) -> PinnedBuffer:
        self._check_open()
        return self._own(PinnedBuffer(self._context, nbytes))

    def wrap(self, data: NDArray[np.uint8]) -> HostViewBuffer:
        self._check_open()
        return self._own(HostViewBuffer(self._context, Home.PAGEABLE, data))

    def resident(self, data: NDArray[np.uint8]) -> CudaBuffer:
        """A read-only copy in device memory. Blocks until it is there."""
        with self.wrap(data) as source:
            buffer = DeviceBuffer(self._context, self._budget, data.size, read_only=True)
            if data.size:
                check(
                    f"cuMemcpyHtoD({data.size} bytes)",
                    self._gpu.driver.cuMemcpyHtoD(buffer.address, source.address, data.size),
                )
        return self._own(buffer)

    def prepare(
        self, kernels: Iterable[Kernel], compiling: Callable[[int], None] | None = None
    ) -> None:
        self._check_open()
        self._loader.prepare(kernels, compiling)

    def stream(self, name: str) -> CudaStream:
        self._check_open()
        stream = CudaStream(name, self._context, self._loader)
        self._streams = [*(other for other in self._streams if not other.is_closed), stream]
        return stream

    def event(self, *, timing: bool = False) -> CudaEvent:
        self._check_open()
        return self._own(CudaEvent(self._context, timing=timing))

    def synchronize(self) -> None:
        self._check_open()
        for stream in self._streams:
            if not stream.is_closed:
                stream.synchronize()

    def close(self) -> None:
        """Waits for the work in flight, then gives everything back to the driver."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for stream in self._streams:
            stream.close()
        for owner in list(self._context.owners):
            owner.close()
        self._loader.close()
        self._context.holdings.reap()
        self._context.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _own(self, owner: Owner) -> Owner:
        self._context.owners.add(owner)
        return owner

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"device {self.name} is closed")

    def _driver_memory(self) -> MemoryInfo:
        return MemoryInfo(*check("cuMemGetInfo()", self._gpu.driver.cuMemGetInfo()))


def _limit_bytes(memory: MemoryInfo, gpu: Gpu, options: CudaOptions) -> int:
    """The hard cap: what was asked for if it is free, else what is free less the reserve."""
    place = f"cuda:{gpu.ordinal}: free {gib(memory.free_bytes)} of {gib(memory.total_bytes)}"
    if options.vram_bytes > memory.free_bytes:
        raise OutOfMemory(
            f"vram_bytes is {gib(options.vram_bytes)}, more than {place}",
            hint="lower --vram-bytes, or close other GPU programs",
        )
    left = options.vram_bytes or memory.free_bytes - options.vram_reserve_bytes
    if left <= 0:
        raise OutOfMemory(
            f"the reserve of {gib(options.vram_reserve_bytes)} leaves nothing on {place}",
            hint="lower --vram-reserve-mib, or close other GPU programs",
        )
    return left
