"""Looks at processor, locked memory and software of this machine."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib.util import find_spec
from pathlib import Path

from strata_cli.engine.device.cache_folder import open_cache
from strata_cli.engine.device.host import usable_threads
from strata_cli.launch.machine import NO_LIMIT, Memlock, Processor, Software

CPUINFO = Path("/proc/cpuinfo")
STATUS = Path("/proc/self/status")
SYSTEMD = Path("/run/systemd/system")  # there when systemd is the first process: sd_booted(3)
CAP_IPC_LOCK = 14
SERVER_PACKAGES = (
    *(() if sys.version_info >= (3, 14) else ("backports.zstd",)),
    "llguidance",
    "msgspec",
    "prometheus_client",
    "starlette",
    "tomlkit",
    "uvicorn",
)


def probe_processor(cpuinfo: Path = CPUINFO) -> Processor:
    """The processor and how much of it this process may use."""
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.machine()
    features = fields.get("flags") or fields.get("Features", "")
    return Processor(name, usable_threads(), os.cpu_count() or 1, frozenset(features.split()))


def probe_memlock(status: Path = STATUS) -> Memlock:
    """The limit of locked memory of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Memlock(_bytes(soft), _bytes(hard), _may_lock_all(status))


def probe_software(booted: Path = SYSTEMD) -> Software:
    """What is installed and can be used."""
    cache = open_cache("host-kernels")
    return Software(
        python=platform.python_version(),
        missing=tuple(name for name in SERVER_PACKAGES if not _is_there(name)),
        has_systemd=booted.is_dir(),
        cache_folder="" if cache.path is None else str(cache.path.parent),
        cache_problem=cache.problem,
    )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _bytes(limit: int) -> int:
    return NO_LIMIT if limit == resource.RLIM_INFINITY else limit


def _may_lock_all(status: Path) -> bool:
    for line in status.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False
