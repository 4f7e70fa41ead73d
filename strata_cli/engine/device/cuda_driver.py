"""The one door to the CUDA driver API: finding a GPU, checked calls, and the context of a thread.

``Any`` lives here and beside it because cuda-python ships no types.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from strata_cli.engine.device.cuda_batch import BatchCopy, load_batch_copy
from strata_cli.engine.device.holdings import Holdings
from strata_cli.engine.device.shelter import Shelter
from strata_cli.errors import ConfigError, DeviceError, OutOfMemory

MIN_CAPABILITY = (7, 5)
MIN_DRIVER = 13_000  # the driver must be of the major version that the bindings were made for

_INSTALL = "pip install 'strata-cli[cuda]', or --device host"
_LOST = "the GPU's context is lost: start again; compute-sanitizer names the kernel at fault"
_HINTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": "lower --vram-bytes or the context, or close other GPU programs",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the compiled kernels are for another GPU: delete the cache",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the NVIDIA driver",
    "CUDA_ERROR_INSUFFICIENT_DRIVER": "update the NVIDIA driver",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the machine: the driver was updated under it",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "update the NVIDIA driver",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the GPU in exclusive mode",
    "CUDA_ERROR_DEVICE_NOT_LICENSED": "the virtual GPU needs its licence",
    "CUDA_ERROR_SYSTEM_NOT_READY": "start the NVIDIA fabric manager",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _LOST,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _LOST,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _LOST,
    "CUDA_ERROR_INVALID_PC": _LOST,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _LOST,
    "CUDA_ERROR_ASSERT": _LOST,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": _LOST,
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is damaged: restart it, then start again",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "the GPU's link is damaged: restart it, then start again",
}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that can be used.

    Attributes:
        driver: the module cuda.bindings.driver.
        ordinal: its number, as in cuda:N.
        handle: CUdevice.
        name: what its maker calls it.
        capability: compute capability, (major, minor).
        driver_version: CUDA version of the driver, 1000 * major + 10 * minor.
        shared_bytes: most dynamic shared memory of a thread block.
        num_multiprocessors: how many it has.
        batch_copy: many copies by their addresses; None: the bindings take them.
    """

    driver: Any
    ordinal: int
    handle: Any
    name: str
    capability: tuple[int, int]
    driver_version: int
    shared_bytes: int = 48 << 10
    num_multiprocessors: int = 1
    batch_copy: BatchCopy | None = None


def failed(call: str, status: Any) -> DeviceError:
    """The error for a driver call that did not answer CUDA_SUCCESS."""
    name = status.name
    kind = OutOfMemory if name == "CUDA_ERROR_OUT_OF_MEMORY" else DeviceError
    return kind(f"{call}: {name} ({int(status)})", hint=_HINTS.get(name, ""))


def check(call: str, answer: tuple[Any, ...]) -> Any:
    """The value of a driver call: None, the one result, or a tuple of several.

    Args:
        call: the call with its numbers, for the message.
        answer: what the binding returned, the CUresult first.

    Raises:
        DeviceError: the CUresult is not CUDA_SUCCESS; OutOfMemory where it says so.
    """
    status, *values = answer
    if int(status):
        raise failed(call, status)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def find_gpu(ordinal: int) -> Gpu:
    """The GPU with this number.

    Raises:
        ConfigError: there is none, or it cannot be used; says what was found and what to do.
    """
    found = find_driver()
    if ordinal >= found.num_gpus:
        raise ConfigError(
            f"there is no device cuda:{ordinal}: found {found.num_gpus} GPU(s)",
            hint=f"cuda:0 to cuda:{found.num_gpus - 1}, or host"
            if found.num_gpus
            else "--device host",
        )
    return _describe(found.driver, ordinal, found.version)


class FoundDriver(NamedTuple):
    """The driver of this machine's GPUs.

    Attributes:
        driver: the module cuda.bindings.driver.
        version: CUDA version, 1000 * major + 10 * minor.
        num_gpus: that it lists.
    """

    driver: Any
    version: int
    num_gpus: int


def find_driver() -> FoundDriver:
    """The driver, if it is one that can be used.

    Raises:
        ConfigError: it is missing, too old, or finds no GPU at all; says what to do.
    """
    driver = _load_driver()
    version = check("cuDriverGetVersion()", driver.cuDriverGetVersion())
    if version < MIN_DRIVER:
        raise ConfigError(
            f"the NVIDIA driver supports CUDA {_dotted(version)}, need {_dotted(MIN_DRIVER)}",
            hint="update the NVIDIA driver, or --device host",
        )
    return FoundDriver(driver, version, check("cuDeviceGetCount()", driver.cuDeviceGetCount()))


def _load_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError(
            "a cuda device needs cuda-python, which is not installed", hint=_INSTALL
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the bindings look for libcuda at the first call
        raise ConfigError(
            "no NVIDIA driver was found on this machine", hint="install it, or --device host"
        ) from error
    if int(status):
        raise ConfigError(
            f"the NVIDIA driver finds no usable GPU: cuInit(0): {status.name}",
            hint=_HINTS.get(status.name, "--device host"),
        )
    return driver


def _describe(driver: Any, ordinal: int, driver_version: int) -> Gpu:
    handle = check(f"cuDeviceGet({ordinal})", driver.cuDeviceGet(ordinal))
    name = check("cuDeviceGetName()", driver.cuDeviceGetName(128, handle))
    attribute = driver.CUdevice_attribute
    major, minor, shared_bytes, num_multiprocessors = (
        check(f"cuDeviceGetAttribute({key.name})", driver.cuDeviceGetAttribute(key, handle))
        for key in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )
    )
    text = name.split(b"\0")[0].decode(errors="replace")
    if (major, minor) < MIN_CAPABILITY:
        raise ConfigError(
            f"cuda:{ordinal} ({text}) has compute capability {major}.{minor}, need 7.5 or newer",
            hint="another GPU, or --device host",
        )
    return Gpu(
        driver,
        ordinal,
        handle,
        text,
        (major, minor),
        driver_version,
        shared_bytes,
        num_multiprocessors,
        load_batch_copy(),
    )


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class _Current(threading.local):
    """Token of the context that this thread made current last; a context itself would be kept."""

    token: object = None


_current = _Current()


class _Closable(Protocol):
    def close(self) -> None: ...


class Context:
    """The GPU's primary context, held until the device is closed and its last memory is gone.

    Memory of cuMemHostAlloc holds it, so that arrays over it stay readable after close().

    ``owners`` are the open buffers, events and graphs, closed with the device; ``holdings`` are
    what the driver gave to them. Memory, graphs and modules are taken and given back in the
    ``shelter``. ``_holders`` is written under the lock.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.owners: weakref.WeakSet[_Closable] = weakref.WeakSet()
        self._token = object()
        self._lock = threading.Lock()
        self._holders = 1
        driver = gpu.driver
        flags = int(driver.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC)
        # Refused where another library already uses the context with other flags: no harm.
        driver.cuDevicePrimaryCtxSetFlags(gpu.handle, flags)
        self._handle: Any = check(
            f"cuDevicePrimaryCtxRetain(cuda:{gpu.ordinal})",
            driver.cuDevicePrimaryCtxRetain(gpu.handle),
        )
        self.shelter = Shelter(f"strata-cuda-{gpu.ordinal}")
        self.holdings = Holdings(self.shelter)

    def enter(self) -> None:
        """Makes the context current in the calling thread; cheap when it is already."""
        if _current.token is not self._token:
            if self._handle is None:
                raise DeviceError(f"device cuda:{self.gpu.ordinal} is closed")
            check("cuCtxSetCurrent()", self.gpu.driver.cuCtxSetCurrent(self._handle))
            _current.token = self._token

    def hold(self) -> None:
        """Keeps the context until a drop() more."""
        with self._lock:
            self._holders += 1

    def drop(self) -> None:
        """Lets go of the context; the last one gives it, and its memory, back to the driver."""
        with self._lock:
            self._holders -= 1
            is_last = self._holders == 0
        if is_last:
            self.shelter.close()
            self._handle, self._token = None, object()
            self.gpu.driver.cuDevicePrimaryCtxRelease(self.gpu.handle)
