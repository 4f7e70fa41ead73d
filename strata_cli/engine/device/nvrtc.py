"""Kernels from CUDA C++ to machine code: NVRTC, and a cache on disk of what it made."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from strata_cli.engine.device.cache_folder import open_cache
from strata_cli.errors import ConfigError, DeviceError

logger = logging.getLogger(__name__)

# One arithmetic: a fused multiply-add is written as fmaf, never made by the compiler, so that two
# instances of a template round alike.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_MAGIC = b"strata-cubin-1\n"


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing to compile.

    Attributes:
        name: file name, for messages.
        text: the source.
        headers: every header it includes with quotes, by the name it is included under.
        defines: macros, "NAME" or "NAME=VALUE".
        instances: template instances to compile, such as "matmul<Q4_K, 2>".
    """

    name: str
    text: str
    headers: Mapping[str, str] = field(default_factory=dict)
    defines: tuple[str, ...] = ()
    instances: tuple[str, ...] = ()


class Cubin(NamedTuple):
    """Machine code, and the symbol of each template instance in it."""

    image: bytes
    symbols: dict[str, str]


def read_unit(
    path: Path, *, defines: tuple[str, ...] = (), instances: tuple[str, ...] = ()
) -> Unit:
    """The source file with its headers; quoted includes are files of the same folder.

    Raises:
        DeviceError: a file cannot be read.
    """
    text = _read(path)
    headers: dict[str, str] = {}
    wanted = _INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        if name not in headers:
            headers[name] = _read(path.parent / name)
            wanted += _INCLUDE.findall(headers[name])
    return Unit(path.name, text, headers, defines, instances)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DeviceError(f"cannot read the kernel source {path}: {error.strerror}") from error


def target(capability: tuple[int, int]) -> str:
    """Architecture to compile for: from Hopper on with the features of exactly that chip."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def cache_key(unit: Unit, architecture: str, compiler: str) -> str:
    """Hash of all that decides what comes out: source, headers, options, target, compiler."""
    parts = [unit.name, unit.text, architecture, compiler, *OPTIONS, *unit.defines]
    parts += ["instances", *unit.instances]
    for name in sorted(unit.headers):
        parts += [name, unit.headers[name]]
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


class Compiler:
    """NVRTC. Calls release the GIL, so several threads may compile at once.

    Raises:
        ConfigError: NVRTC is not installed.
    """

    def __init__(self) -> None:
        hint = "pip install 'strata-cli[cuda]', or --device host"
        try:
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise ConfigError("cuda-python is not installed", hint=hint) from error
        self._nvrtc: Any = nvrtc
        try:
            _, major, minor = nvrtc.nvrtcVersion()
        except RuntimeError as error:  # the bindings look for libnvrtc at the first call
            raise ConfigError("libnvrtc, the kernel compiler, was not found", hint=hint) from error
        self.version = f"nvrtc {major}.{minor}"

    def compile(self, unit: Unit, architecture: str) -> Cubin:
        """Compiles for one architecture, such as "sm_90a".

        Raises:
            DeviceError: with the compiler's whole log.
        """
        nvrtc = self._nvrtc
        names = [name.encode() for name in unit.headers]
        texts = [text.encode() for text in unit.headers.values()]
        status, program = nvrtc.nvrtcCreateProgram(
            unit.text.encode(), unit.name.encode(), len(names), texts, names
        )
        self._check("nvrtcCreateProgram", unit, status)
        try:
            return self._compile(program, unit, architecture)
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def _compile(self, program: Any, unit: Unit, architecture: str) -> Cubin:
        nvrtc = self._nvrtc
        for instance in unit.instances:
            (status,) = nvrtc.nvrtcAddNameExpression(program, instance.encode())
            self._check(f"nvrtcAddNameExpression({instance})", unit, status)
        options = [f"--gpu-architecture={architecture}", *OPTIONS]
        options += [f"--define-macro={define}" for define in unit.defines]
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status):
            raise DeviceError(
                f"{unit.name} does not compile for {architecture} ({status.name}), "
                f"{self.version}, {' '.join(options)}:\n{self._log(program)}"
            )
        symbols: dict[str, str] = {}
        for instance in unit.instances:
            status, symbol = nvrtc.nvrtcGetLoweredName(program, instance.encode())
            self._check(f"nvrtcGetLoweredName({instance})", unit, status)
            symbols[instance] = symbol.decode()
        status, size = nvrtc.nvrtcGetCUBINSize(program)
        self._check("nvrtcGetCUBINSize", unit, status)
        image = bytes(size)
        (status,) = nvrtc.nvrtcGetCUBIN(program, image)
        self._check("nvrtcGetCUBIN", unit, status)
        return Cubin(image, symbols)

    def _log(self, program: Any) -> str:
        _, size = self._nvrtc.nvrtcGetProgramLogSize(program)
        log = bytes(size)
        self._nvrtc.nvrtcGetProgramLog(program, log)
        return log.rstrip(b"\0\n ").decode(errors="replace")

    @staticmethod
    def _check(call: str, unit: Unit, status: Any) -> None:
        if int(status):
            raise DeviceError(f"{call} for {unit.name}: {status.name} ({int(status)})")


class CubinCache:
    """Compiled kernels in a folder, one file per key, shared by any number of processes.

    A file is written under another name and renamed, so it is there whole or not at all; two
    processes that compile the same thing write the same bytes. A file that does not match its own
    checksum counts as absent.

    Args:
        folder: where to keep them; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._is_writable = True

    def load(self, key: str) -> Cubin | None:
        """The entry, or None where it is absent or damaged."""
        if self.folder is None:
            return None
        path = self.folder / _file_name(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        cubin = _unpack(data)
        if cubin is None:
            logger.warning("damaged cache entry %s (%d bytes): compiling again", path, len(data))
        return cubin

    def store(self, key: str, cubin: Cubin) -> None:
        """Writes the entry. A folder that cannot be written costs a warning and the next start."""
        if self.folder is None or not self._is_writable:
            return
        try:
            _write_whole(self.folder / _file_name(key), _pack(cubin))
        except OSError as error:
            self._is_writable = False
            logger.warning("cannot keep compiled kernels in %s: %s", self.folder, error.strerror)


def user_cache() -> CubinCache:
    """The user's cache of compiled kernels; where there is none, says why and keeps nothing."""
    folder = open_cache("cubins")
    if folder.path is None:
        logger.warning("compiling kernels at every start, they cannot be kept: %s", folder.problem)
    return CubinCache(folder.path)


def _file_name(key: str) -> str:
    return f"{key}.cubin"


def _write_whole(path: Path, data: bytes) -> None:
    """Write a file under another name, then rename it.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as entry:
            undo.callback(Path(entry.name).unlink, missing_ok=True)
            entry.write(data)
        os.replace(entry.name, path)


def _pack(cubin: Cubin) -> bytes:
    """magic, sha256 of the rest, length of the symbol table, symbol table as JSON, image."""
    table = json.dumps(cubin.symbols, sort_keys=True).encode()
    body = len(table).to_bytes(8, "little") + table + cubin.image
    return _MAGIC + hashlib.sha256(body).digest() + body


def _unpack(data: bytes) -> Cubin | None:
    start = len(_MAGIC) + 32
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(body).digest():
        return None
    length = int.from_bytes(body[:8], "little")
    return Cubin(body[8 + length :], json.loads(body[8 : 8 + length]))


class Build:
    """One unit to be made for one GPU, and the key that its machine code is kept under."""

    def __init__(self, unit: Unit, capability: tuple[int, int], compiler: Compiler) -> None:
        self._unit = unit
        self._architecture = target(capability)
        self._compiler = compiler
        self.key = cache_key(unit, self._architecture, compiler.version)

    def run(self, cache: CubinCache) -> Cubin:
        """Compiles, and keeps the result in the cache."""
        logger.debug("compiling %s for %s", self._unit.name, self._architecture)
        cubin = self._compiler.compile(self._unit, self._architecture)
        cache.store(self.key, cubin)
        return cubin
