"""Host memory as buffers: anonymous pages for the device home, locked pages for the pinned home."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Home, MemoryInfo
from strata_cli.engine.device.cgroup import cgroup_memory
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import DeviceError, OutOfMemory

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
NEVER_OVERCOMMIT = "2"
_libc = ctypes.CDLL(None, use_errno=True)


class HostBuffer:
    """Host memory with one owner.

    Arrays made from it keep the pages mapped, so work that is already enqueued survives close().
    """

    __slots__ = ("__weakref__", "_address", "_bytes", "_home", "_nbytes")

    def __init__(self, data: NDArray[np.uint8], home: Home) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise DeviceError(
                f"a buffer needs contiguous uint8 [nbytes], got {data.dtype} {data.shape}",
                hint="pass array.reshape(-1).view(np.uint8)",
            )
        self._bytes: NDArray[np.uint8] | None = data
        self._home = home
        self._nbytes = data.size
        self._address = int(data.__array_interface__["data"][0])

    @property
    def home(self) -> Home:
        return self._home

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def address(self) -> int:
        self.memory()
        return self._address

    @property
    def host_bytes(self) -> NDArray[np.uint8] | None:
        data = self.memory()
        return None if self._home is Home.DEVICE else data

    def memory(self) -> NDArray[np.uint8]:
        """The bytes, whatever the home; for this device's own copies and kernels.

        Raises:
            DeviceError: the buffer is closed.
        """
        if self._bytes is None:
            raise DeviceError(f"{self._home.value} buffer of {self._nbytes} bytes is closed")
        return self._bytes

    def close(self) -> None:
        self._bytes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def host_memory() -> MemoryInfo:
    """Available and total memory: of this machine, or of the container where that has less."""
    available, total = _meminfo("MemAvailable", "MemTotal")
    machine = MemoryInfo(free_bytes=available, total_bytes=total)
    return min(machine, cgroup_memory() or machine)


def anonymous_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Fresh page-aligned memory, in huge pages where that is possible. Unmapped with its last view.

    Raises:
        OutOfMemory: more than the machine has available.
    """
    if nbytes < 0:
        raise DeviceError(f"cannot allocate {nbytes} bytes")
    free, total = host_memory()
    if nbytes > free:
        raise _too_big(nbytes, free, total)
    try:
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise _refused(nbytes, free, error) from error
    if nbytes >= HUGE_PAGE_BYTES:
        _ask_for_huge_pages(pages)
    return np.frombuffer(pages, np.uint8, count=nbytes)


def locked_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Page-locked memory; ordinary memory, with one warning, where the memlock limit forbids it.

    Nothing breaks without the lock on this device: copies are plain memory copies either way.

    Raises:
        OutOfMemory: more than the machine has available.
    """
    data = anonymous_bytes(nbytes)
    address = data.__array_interface__["data"][0]
    if nbytes and _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) != 0:
        _warn_unlocked(nbytes, ctypes.get_errno())
    return data


def memlock_limit() -> str:
    """How much memory this process may lock, for messages."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else gib(soft)


def _meminfo(*names: str) -> list[int]:
    """Bytes of these lines of /proc/meminfo; 0 where there is no such line."""
    found = dict.fromkeys(names, 0)
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return [found[name] for name in names]


def _refused(nbytes: int, free: int, error: OSError) -> OutOfMemory:
    """Memory that is there and may not be had: a limit on what is promised is in the way."""
    reasons = []
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        reasons.append(f"ulimit -v allows this process {gib(addresses)}")
    if OVERCOMMIT.read_text("ascii").strip() == NEVER_OVERCOMMIT:
        limit, promised = _meminfo("CommitLimit", "Committed_AS")
        reasons.append(
            f"vm.overcommit_memory is 2, and {gib(promised)} of {gib(limit)} are promised already"
        )
    return OutOfMemory(
        f"host memory: {gib(nbytes)} are refused although {gib(free)} are available: "
        f"{'; '.join(reasons) or error.strerror}",
        hint="raise that limit (ulimit -v, vm.overcommit_ratio, more swap), or lower the context",
    )


def _too_big(nbytes: int, free: int, total: int) -> OutOfMemory:
    return OutOfMemory(
        f"host memory: need {gib(nbytes)}, available {gib(free)} of {gib(total)}",
        hint="lower the context, close other programs, or use a smaller model",
    )


def _ask_for_huge_pages(pages: mmap.mmap) -> None:
    """Advice only: a kernel built without huge pages answers EINVAL, and small pages do as well."""
    advice: Any = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    try:
        pages.madvise(advice)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


class _Warned:
    """Whether the unlocked-memory warning was given.

    Written by whichever thread allocates first; a race costs a second line, nothing else.
    """

    unlocked = False


def _warn_unlocked(nbytes: int, code: int) -> None:
    if _Warned.unlocked:
        return
    _Warned.unlocked = True
    logger.warning(
        "pinned memory is not page-locked: mlock of %s failed (%s), RLIMIT_MEMLOCK is %s; "
        "raise it with ulimit -l or LimitMEMLOCK= in the systemd unit",
        gib(nbytes),
        os.strerror(code),
        memlock_limit(),
    )
