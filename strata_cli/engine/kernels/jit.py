"""The one door to numba: typed decorators, so that every host kernel is compiled the same way.

Float semantics are strict (no fastmath, no contraction): a result may not depend on how the
compiler vectorised a loop. Compiled code is cached on disk in a folder named after the sources of
the whole room: numba by itself would keep a kernel whose helper, in another file, has changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba as numba_package
from llvmlite.binding import get_host_cpu_name

from strata_cli.engine.device.cache_folder import cache_root, sources_digest

numba: Any = numba_package  # carries types in some versions, and not the same ones

_CACHE = cache_root() / "host-kernels" / sources_digest(Path(__file__).parent.glob("*.py"))
_COMPLETE = _CACHE / "-".join(
    ("complete", sys.implementation.cache_tag, numba.__version__, get_host_cpu_name())
)

numba.config.CACHE_DIR = str(_CACHE)  # read by numba when a decorator asks for a cache

# Nobody calls these through a C function pointer, and that wrapper takes a sixth of compile time.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

P = ParamSpec("P")
R = TypeVar("R")


def is_cold() -> bool:
    """True until keep_as_complete: compiling these sources for this processor takes seconds."""
    return not _COMPLETE.exists()


def keep_as_complete() -> None:
    """Note that the cache holds the kernels now, compiled for this processor."""
    with contextlib.suppress(OSError):  # a folder that cannot be written stays cold
        _COMPLETE.touch()


def nogil_jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile for the host CPU on first call; the compiled code releases the GIL."""
    compiled = numba.njit(cache=True, **_OPTIONS)(function)
    return cast(Callable[P, R], compiled)


def inline_jit(function: Callable[P, R]) -> Callable[P, R]:
    """A helper that only compiled functions may call; LLVM inlines it where that pays."""
    compiled = numba.njit(no_cpython_wrapper=True, **_OPTIONS)(function)
    return cast(Callable[P, R], compiled)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Typed alias of numba's intrinsic decorator."""
    from numba.extending import intrinsic as numba_intrinsic

    return cast(Callable[..., Any], numba_intrinsic(function))


def c_function(signature: Any, function: Callable[..., Any]) -> Any:
    """Compile now, or load from the disk cache, as a C function; ``.address`` is its entry.

    The caller keeps the result alive as long as the address is in use.
    """
    return numba.cfunc(signature, nopython=True, cache=True, error_model="numpy")(function)
