"""Kernels of a CUDA device: compiled, loaded, and ready to launch with packed arguments."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from strata_cli.engine.device.base import Kernel, KernelArgument, Tensor
from strata_cli.engine.device.cuda_driver import Context, check
from strata_cli.engine.device.nvrtc import Build, Compiler, Cubin, CubinCache, Unit, read_unit
from strata_cli.errors import DeviceError

KERNELS_FOLDER = Path(__file__).parent.parent / "kernels"
COMPILE_THREADS = 16
SHARED_BYTES_WITHOUT_ASKING = 48 << 10
# From so much on, blocks crowd each other out. Left to itself, the driver gives a kernel hardly
# more shared memory than one block needs, and the rest to the L1 cache: one block runs at a time.
CROWDING_SHARED_BYTES = 16 << 10
SHARED_MEMORY_PERCENT = 100  # of what a multiprocessor can give, for such kernels; -1: the driver's
CELL_BYTES = 8  # every argument has a cell of its own in the block that the driver reads
PARAMETER_BYTES = {"Q": 8, "q": 8, "f": 4}


class Function:
    """A loaded CUDA function, and how much dynamic shared memory it may use so far."""

    def __init__(self, context: Context, kernel: Kernel, handle: Any) -> None:
        self._context = context
        self.kernel = kernel
        self.handle = handle
        self.shared_bytes = CROWDING_SHARED_BYTES

    def allow_shared(self, nbytes: int) -> None:
        """Lets launches use this much dynamic shared memory, and several blocks share the most.

        Not the latter where the kernel is better served by a cache.

        Raises:
            DeviceError: it is more than the GPU has per block.
        """
        attributes = self._context.gpu.driver.CUfunction_attribute
        if self.shared_bytes == CROWDING_SHARED_BYTES and not self.kernel.keeps_cache:
            percent = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._set(percent, SHARED_MEMORY_PERCENT, "percent of shared memory")
        if nbytes > SHARED_BYTES_WITHOUT_ASKING:
            most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._set(most, nbytes, "shared bytes")
        self.shared_bytes = max(nbytes, SHARED_BYTES_WITHOUT_ASKING)

    def _set(self, key: Any, value: int, what: str) -> None:
        driver = self._context.gpu.driver
        call = f"cuFuncSetAttribute({self.kernel.name}, {what} {value})"
        check(call, driver.cuFuncSetAttribute(self.handle, key, value))

    def parameter_bytes(self) -> list[int]:
        """Size of each parameter, from the compiled code."""
        driver = self._context.gpu.driver
        sizes: list[int] = []
        while True:  # the driver refuses the index behind the last one
            status, _, nbytes = driver.cuFuncGetParamInfo(self.handle, len(sizes))
            if int(status):
                return sizes
            sizes.append(nbytes)


class Arguments:
    """The block of arguments that launches of one kernel on one stream are made from.

    The driver reads it during the call, so the stream's one thread uses it again and again.

    Attributes:
        kinds: of the arguments: "Q" a pointer, "q" a long long, "f" a float.

    Raises:
        DeviceError: the arguments are not what the compiled function takes.
    """

    __slots__ = ("_block", "_pack_into", "_pointers", "address", "function", "kinds")

    def __init__(self, function: Function, args: tuple[KernelArgument, ...]) -> None:
        kinds = [_kind(argument) for argument in args]
        _check_parameters(function, kinds)
        cells = "".join(kind.ljust(2, "x") if kind != "f" else "f4x" for kind in kinds)
        packer = struct.Struct("<" + cells.replace("Qx", "Q").replace("qx", "q"))
        self.function = function
        self.kinds = kinds
        self._pack_into = packer.pack_into
        self._block = ctypes.create_string_buffer(max(CELL_BYTES * len(kinds), 1))
        start = ctypes.addressof(self._block)
        starts = [start + CELL_BYTES * index for index in range(len(kinds))]
        self._pointers = (ctypes.c_void_p * max(len(kinds), 1))(*starts)
        self.address = ctypes.addressof(self._pointers)

    def fill(self, args: tuple[KernelArgument, ...]) -> None:
        """Writes the arguments of the next launch into the block."""
        try:
            values = [a.address if isinstance(a, Tensor) else a for a in args]
            self._pack_into(self._block, 0, *values)
        except struct.error as error:
            kinds = [type(argument).__name__ for argument in args]
            raise DeviceError(
                f"kernel {self.function.kernel.name}: {kinds} do not fit its parameters: {error}"
            ) from error


def _kind(argument: KernelArgument) -> str:
    if isinstance(argument, Tensor):
        return "Q"
    return "f" if isinstance(argument, float) else "q"


def _check_parameters(function: Function, kinds: list[str]) -> None:
    passed = [PARAMETER_BYTES[kind] for kind in kinds]
    taken = function.parameter_bytes()
    if passed != taken:
        raise DeviceError(
            f"kernel {function.kernel.name} takes parameters of {taken} bytes, got {passed}",
            hint="a Tensor is a pointer, an int a long long, a float a float",
        )


class _UnitName(NamedTuple):
    """What is compiled together: all extern "C" functions of a source, or one instance."""

    source: str
    defines: tuple[str, ...]
    instances: tuple[str, ...]


class Loader:
    """Kernels by value, compiled on first use. Safe for several threads."""

    def __init__(self, context: Context, cache: CubinCache) -> None:
        self._context = context
        self._cache = cache
        self._compiler: Compiler | None = None
        self._lock = threading.Lock()
        self._modules: dict[_UnitName, tuple[Any, Cubin]] = {}
        self._functions: dict[Kernel, Function] = {}

    def function(self, kernel: Kernel) -> Function:
        """The loaded function of a kernel.

        Raises:
            DeviceError: it has no CUDA function, does not compile, or does not load.
        """
        found = self._functions.get(kernel)
        if found is None:
            self.prepare([kernel])
            found = self._functions[kernel]
        return found

    def prepare(
        self, kernels: Iterable[Kernel], compiling: Callable[[int], None] | None = None
    ) -> None:
        """Compiles what is missing, several units at once, then loads it."""
        with self._lock:
            missing = dict.fromkeys(kernel for kernel in kernels if kernel not in self._functions)
            names = {_unit_name(kernel) for kernel in missing} - self._modules.keys()
            for name, cubin in self._build_all(sorted(names), compiling):
                self._context.shelter.run(partial(self._load, name, cubin))
            for kernel in missing:
                self._functions[kernel] = self._find(kernel)

    def close(self) -> None:
        """Unloads every module. Never raises: used in cleanup."""
        self._context.enter()
        for module, _ in self._modules.values():
            self._context.gpu.driver.cuModuleUnload(module)
        self._modules.clear()
        self._functions.clear()

    def _build_all(
        self, names: list[_UnitName], compiling: Callable[[int], None] | None
    ) -> list[tuple[_UnitName, Cubin]]:
        if not names:
            return []
        compiler = self._compiler = self._compiler or Compiler()
        units = [Build(_read(name), self._context.gpu.capability, compiler) for name in names]
        with ThreadPoolExecutor(min(COMPILE_THREADS, len(names))) as threads:
            found = list(threads.map(self._cache.load, [unit.key for unit in units]))
            absent = found.count(None)
            if absent and compiling is not None:
                compiling(absent)
            made = threads.map(lambda unit, cubin: cubin or unit.run(self._cache), units, found)
            return list(zip(names, made, strict=True))

    def _load(self, name: _UnitName, cubin: Cubin) -> None:
        self._context.enter()
        image = np.frombuffer(cubin.image, np.uint8)
        module = check(
            f"cuModuleLoadData({name.source}, {image.size} bytes)",
            self._context.gpu.driver.cuModuleLoadData(image.__array_interface__["data"][0]),
        )
        self._modules[name] = (module, cubin)

    def _find(self, kernel: Kernel) -> Function:
        module, cubin = self._modules[_unit_name(kernel)]
        written = kernel.function or kernel.name
        symbol = cubin.symbols.get(written, written)
        handle = check(
            f"cuModuleGetFunction({kernel.source}, {symbol})",
            self._context.gpu.driver.cuModuleGetFunction(module, symbol.encode()),
        )
        return Function(self._context, kernel, handle)


def _unit_name(kernel: Kernel) -> _UnitName:
    if not kernel.source:
        raise DeviceError(f"kernel {kernel.name} has no CUDA function", hint="--device host")
    instances = (kernel.function,) if "<" in kernel.function else ()
    return _UnitName(kernel.source, kernel.defines, instances)


def _read(name: _UnitName) -> Unit:
    path = KERNELS_FOLDER / name.source
    return read_unit(path, defines=name.defines, instances=name.instances)
