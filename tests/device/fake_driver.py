"""A stand-in for cuda.bindings.driver: it keeps accounts, and fails where a test says so.

Device memory is only numbers here; host functions are really called, through their C address.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

from strata_cli.engine.device.cuda_driver import Context, Gpu


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = Result.CUDA_SUCCESS


class FakeDriver:
    """Every function of the driver that the device room calls.

    Attributes:
        calls: name and arguments of each call, in order.
        answers: results to give to the next calls of a function; success when there is none.
        memory_bytes: what the GPU has.
        version: of the driver.
        num_gpus: how many it finds.
        capability: of each GPU.
        parameter_bytes: parameters that every function says it takes.
        map_host: from the address of registered memory to the address on the device.
    """

    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CUctx_flags = SimpleNamespace(CU_CTX_SCHED_BLOCKING_SYNC=4)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0, CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2)
    CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT=9,
    )
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=SimpleNamespace(name="major"),
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=SimpleNamespace(name="minor"),
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=SimpleNamespace(name="shared"),
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=SimpleNamespace(name="multiprocessors"),
    )
    CUmemcpyAttributes = SimpleNamespace
    CUlaunchConfig = CUlaunchAttribute = CUlaunchAttributeValue = SimpleNamespace
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=6)
    CUdeviceptr = int
    CUresult = Result
    CUhostFn = int

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, list[Result]] = defaultdict(list)
        self.memory_bytes = 1 << 34
        self.version = 13_000
        self.num_gpus = 1
        self.capability = (9, 0)
        self.parameter_bytes: list[int] = []
        self.map_host: Any = lambda address: address
        self.allocated: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self._next_address = 1 << 40
        self._host_memory: list[Any] = []
        self._values = self._value_table()
        self._effects = self._effect_table()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *args: self._answer(name, args)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        return [args for called, args in self.calls if called == name]

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, args))
        status = self.answers[name].pop(0) if self.answers[name] else OK
        if name == "cuMemHostRegister" and args[0] in self.registered:
            status = Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        if status:
            return (status, 0) if name in self._values else (status,)
        if name in self._effects:
            self._effects[name](*args)
        return (OK, *self._values[name](*args)) if name in self._values else (OK,)

    @property
    def free_bytes(self) -> int:
        return self.memory_bytes - sum(self.allocated.values())

    def cuFuncGetParamInfo(self, _function: bytes, index: int) -> tuple[Result, int, int]:  # noqa: N802  the driver's name
        if index < len(self.parameter_bytes):
            return OK, 8 * index, self.parameter_bytes[index]
        return Result.CUDA_ERROR_INVALID_VALUE, 0, 0

    def _allocate(self, nbytes: int) -> tuple[int]:
        self._next_address += 1 << 32
        self.allocated[self._next_address] = nbytes
        return (self._next_address,)

    def _allocate_host(self, nbytes: int, _flags: int) -> tuple[int]:
        self._host_memory.append(ctypes.create_string_buffer(nbytes))
        return (ctypes.addressof(self._host_memory[-1]),)

    def _call_host(self, _stream: str, entry: int, number: int) -> None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(entry)(number)

    def _value_table(self) -> dict[str, Callable[..., tuple[Any, ...]]]:
        """What a call gives back behind its result."""
        return {
            "cuDriverGetVersion": lambda: (self.version,),
            "cuDeviceGetCount": lambda: (self.num_gpus,),
            "cuDeviceGet": lambda ordinal: (ordinal,),
            "cuDeviceGetPCIBusId": lambda _, device: (b"0000:%02x:00.0\0" % (0x1B + device),),
            "cuDeviceGetName": lambda length, _: (b"Fake GPU".ljust(length, b"\0"),),
            "cuDeviceGetAttribute": lambda key, _: (
                {
                    "major": self.capability[0],
                    "minor": self.capability[1],
                    "shared": 232_448,
                    "multiprocessors": 132,
                }[key.name],
            ),
            "cuDevicePrimaryCtxRetain": lambda _: ("context",),
            "cuMemGetInfo": lambda: (self.free_bytes, self.memory_bytes),
            "cuMemAlloc": self._allocate,
            "cuMemHostAlloc": self._allocate_host,
            "cuMemHostGetDevicePointer": lambda address, _: (self.map_host(address),),
            "cuStreamCreate": lambda _: ("stream",),
            "cuEventCreate": lambda _: ("event",),
            "cuEventElapsedTime": lambda *_: (1.5,),
            "cuStreamEndCapture": lambda _: ("graph",),
            "cuGraphInstantiate": lambda *_: ("exec",),
            "cuModuleLoadData": lambda _: ("module",),
            "cuModuleGetFunction": lambda _, symbol: (symbol,),
        }

    def _effect_table(self) -> dict[str, Callable[..., object]]:
        """What a call changes."""
        return {
            "cuMemFree": self.allocated.pop,
            "cuMemHostRegister": lambda at, nbytes, _: self.registered.update({at: nbytes}),
            "cuMemHostUnregister": self.registered.pop,
            "cuLaunchHostFunc": self._call_host,
        }


def fake_gpu(driver: FakeDriver) -> Gpu:
    return Gpu(driver, 0, 0, "Fake GPU", driver.capability, driver.version)


def fake_context(driver: FakeDriver) -> Context:
    context = Context(fake_gpu(driver))
    driver.calls.clear()
    return context
