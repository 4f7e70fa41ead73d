"""The host device: real memory, real threads, real copies, kernels by their host bodies.

It is the reference for every other device, and it runs small models where there is no GPU.
"""

from __future__ import annotations

import atexit
import math
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Home, Kernel, MemoryInfo
from strata_cli.engine.device.cgroup import cgroup_processors
from strata_cli.engine.device.host_event import HostEvent
from strata_cli.engine.device.host_memory import (
    HostBuffer,
    anonymous_bytes,
    host_memory,
    locked_bytes,
)
from strata_cli.engine.device.host_stream import HostStream
from strata_cli.engine.device.host_workers import WorkerPool
from strata_cli.errors import ConfigError, DeviceError


def usable_threads() -> int:
    """Processors that this process may run on, or the time of which its container gives it."""
    usable, quota = len(os.sched_getaffinity(0)), cgroup_processors()
    return usable if quota is None else max(min(usable, math.ceil(quota)), 1)


class HostDevice:
    """The processor as a device.

    Args:
        num_threads: threads that share a launch, the stream's own included; 0 takes every
            processor this process may use.

    Raises:
        ConfigError: num_threads is negative.
    """

    def __init__(self, num_threads: int = 0) -> None:
        if num_threads < 0:
            raise ConfigError(
                f"threads must not be negative, got {num_threads}", hint="0 takes all processors"
            )
        self._pool = WorkerPool(num_threads or usable_threads())
        self._streams: list[HostStream] = []
        self._buffers: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
        self._closed = False
        # A daemon thread that wakes inside a dying interpreter can crash it; end them before.
        atexit.register(self.close)

    @property
    def name(self) -> str:
        return "host"

    @property
    def num_threads(self) -> int:
        return self._pool.num_threads

    @property
    def has_async_copy(self) -> bool:
        return False

    @property
    def has_own_memory(self) -> bool:
        return False

    def memory(self) -> MemoryInfo:
        return host_memory()

    def allocate(self, nbytes: int) -> HostBuffer:
        self._check_open()
        return self._own(HostBuffer(anonymous_bytes(nbytes), Home.DEVICE))

    def allocate_pinned(self, nbytes: int) -> HostBuffer:
        self._check_open()
        return self._own(HostBuffer(locked_bytes(nbytes), Home.PINNED))

    def wrap(self, data: NDArray[np.uint8]) -> HostBuffer:
        self._check_open()
        return self._own(HostBuffer(data, Home.PAGEABLE))

    def resident(self, data: NDArray[np.uint8]) -> HostBuffer:
        """The bytes themselves, read-only: kernels on the host read a memory map at full speed."""
        self._check_open()
        view = data.view()
        view.flags.writeable = False
        return self._own(HostBuffer(view, Home.PAGEABLE))

    def prepare(
        self, kernels: Iterable[Kernel], compiling: Callable[[int], None] | None = None
    ) -> None:
        """Nothing to do: numba compiles a kernel at its first call, for the types it then sees."""

    def stream(self, name: str) -> HostStream:
        self._check_open()
        stream = HostStream(name, self._pool)
        self._streams.append(stream)
        return stream

    def event(self, *, timing: bool = False) -> HostEvent:
        self._check_open()
        return HostEvent(timing=timing)

    def synchronize(self) -> None:
        self._check_open()
        for stream in self._streams:
            if not stream.is_closed:
                stream.synchronize()

    def close(self) -> None:
        """Ends every stream (queued work is dropped), then the workers, then frees the buffers."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for stream in self._streams:
            stream.stop()
        for stream in self._streams:
            stream.close()
        self._pool.close()
        for buffer in list(self._buffers):
            buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _own(self, buffer: HostBuffer) -> HostBuffer:
        self._buffers.add(buffer)
        return buffer

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError("host device is closed")
