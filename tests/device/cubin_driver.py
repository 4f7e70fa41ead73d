"""A driver without a GPU that knows the compiled functions, and refuses what they could not run.

It reads what the compiler wrote into the machine code: each function's parameters, its registers,
the threads that it was compiled for and the shared memory that it declares.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import NamedTuple

from strata_cli.engine.device.cuda_driver import Gpu
from tests.device.fake_driver import OK, FakeDriver, Result

HOPPER = (9, 0)
SHARED_BYTES = 227 << 10  # of a block, with asking; a kibibyte less than the multiprocessor has
SHARED_WITHOUT_ASKING = 48 << 10
REGISTERS = 65_536  # of a block
REGISTER_GRANULE = 8
MAX_THREADS = 1_024
MAX_GRID = ((1 << 31) - 1, 65_535, 65_535)

# Attributes of a function's .nv.info section, and how each is stored.
INFO_PARAMETER, INFO_MAX_THREADS, INFO_WITH_SIZE = 0x17, 0x05, 4


@dataclass(frozen=True)
class CompiledFunction:
    """What machine code says about a function.

    Attributes:
        parameter_bytes: size of each parameter, in order.
        registers: per thread.
        max_threads: per block.
        shared_bytes: that it declares.
    """

    parameter_bytes: tuple[int, ...]
    registers: int
    max_threads: int
    shared_bytes: int


@dataclass(frozen=True)
class _Section:
    name: str
    info: int
    data: bytes
    nbytes: int


def compiled_functions(image: bytes) -> dict[str, CompiledFunction]:
    """The functions of a cubin, by symbol."""
    sections = {section.name: section for section in _sections(image)}
    functions = {}
    for name, text in sections.items():
        if not name.startswith(".text."):
            continue
        symbol = name.removeprefix(".text.")
        parameters: dict[int, int] = {}
        max_threads = MAX_THREADS
        for attribute, payload in _attributes(sections[f".nv.info.{symbol}"].data):
            if attribute == INFO_PARAMETER:
                _, ordinal, _, packed = struct.unpack("<IHHI", payload)
                parameters[ordinal] = packed >> 18
            elif attribute == INFO_MAX_THREADS:
                x, y, z = struct.unpack("<III", payload)
                max_threads = x * y * z
        shared = sections.get(f".nv.shared.{symbol}")
        functions[symbol] = CompiledFunction(
            tuple(parameters[i] for i in range(len(parameters))),
            text.info >> 24,
            max_threads,
            shared.nbytes if shared else 0,
        )
    return functions


def _sections(image: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    entries = [
        struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_bytes) for i in range(count)
    ]
    names = entries[names_index][4]
    sections = []
    for name_at, kind, _, _, start, nbytes, _, info, _, _ in entries:
        name = image[names + name_at : image.index(b"\0", names + name_at)].decode()
        has_bytes = kind != 8  # SHT_NOBITS
        data = image[start : start + nbytes] if has_bytes else b""
        sections.append(_Section(name, info, data, nbytes))
    return sections


def _attributes(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == INFO_WITH_SIZE:
            found.append((attribute, data[at : at + size]))
            at += size
    return found


class Launched(NamedTuple):
    """A launch, as the driver got it; parameters are the bytes of each."""

    symbol: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    is_early: bool
    parameters: tuple[bytes, ...]


class CubinDriver(FakeDriver):
    """Takes real machine code, and checks every launch against it.

    Attributes:
        launches: symbols launched, in order.
        launched: the same launches with all that they were given, while it is a list.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory_bytes = 80 << 30
        self.launches: list[str] = []
        self.launched: list[Launched] | None = None
        self._functions: dict[bytes, CompiledFunction] = {}
        self._allowed: dict[bytes, int] = {}
        self._values["cuModuleLoadData"] = self._load
        self._effects |= {
            "cuFuncSetAttribute": self._allow_shared,
            "cuLaunchKernel": lambda symbol, *shape: self._check(
                symbol, shape[:3], shape[3:6], shape[6], shape[8], is_early=False
            ),
            "cuLaunchKernelEx": lambda config, symbol, parameters, _: self._check(
                symbol,
                (config.gridDimX, config.gridDimY, config.gridDimZ),
                (config.blockDimX, config.blockDimY, config.blockDimZ),
                config.sharedMemBytes,
                parameters,
                is_early=getattr(config, "numAttrs", 0) > 0,
            ),
        }

    def cuFuncGetParamInfo(self, symbol: bytes, index: int) -> tuple[Result, int, int]:  # noqa: N802  the driver's name
        sizes = self._functions[symbol].parameter_bytes
        if index < len(sizes):
            return OK, 0, sizes[index]
        return Result.CUDA_ERROR_INVALID_VALUE, 0, 0

    def _load(self, address: int) -> tuple[str]:
        functions = compiled_functions(_image_at(address))
        self._functions |= {symbol.encode(): function for symbol, function in functions.items()}
        return ("module",)

    def _allow_shared(self, symbol: bytes, key: int, nbytes: int) -> None:
        if key != self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
            return
        assert nbytes + self._functions[symbol].shared_bytes <= SHARED_BYTES, symbol
        self._allowed[symbol] = nbytes

    def _check(
        self,
        symbol: bytes,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        parameters: int,
        *,
        is_early: bool,
    ) -> None:
        function = self._functions[symbol]
        threads = block[0] * block[1] * block[2]
        registers = -(-function.registers // REGISTER_GRANULE) * REGISTER_GRANULE
        where = f"{symbol.decode()} grid {grid} block {block} shared {shared_bytes}: {function}"
        for extent, most in zip(grid, MAX_GRID, strict=True):
            assert 0 < extent <= most, where
        assert 0 < threads <= function.max_threads, where
        assert threads * registers <= REGISTERS, where
        allowed = self._allowed.get(symbol, SHARED_WITHOUT_ASKING - function.shared_bytes)
        assert shared_bytes <= allowed, where
        self.launches.append(symbol.decode())
        if self.launched is not None:
            sizes = function.parameter_bytes
            places = (ctypes.c_void_p * len(sizes)).from_address(parameters)
            given = tuple(map(ctypes.string_at, places, sizes))
            name = symbol.decode()
            self.launched.append(Launched(name, grid, block, shared_bytes, is_early, given))


def _image_at(address: int) -> bytes:
    """A cubin in memory, whose length only its own tables tell."""
    header = ctypes.string_at(address, 64)
    (table,) = struct.unpack_from("<Q", header, 0x28)
    (programs,) = struct.unpack_from("<Q", header, 0x20)
    program_bytes, num_programs, entry_bytes, count = struct.unpack_from("<HHHH", header, 0x36)
    end = max(table + entry_bytes * count, programs + program_bytes * num_programs)
    entries = ctypes.string_at(address + table, entry_bytes * count)
    for i in range(count):
        kind, start, nbytes = struct.unpack_from("<I16xQQ", entries, i * entry_bytes + 4)
        if kind != 8:
            end = max(end, start + nbytes)
    return ctypes.string_at(address, end)


def hopper(driver: CubinDriver) -> Gpu:
    """A GPU of the reference kind."""
    return Gpu(driver, 0, 0, "Fake GPU", HOPPER, driver.version, SHARED_BYTES, 132)
