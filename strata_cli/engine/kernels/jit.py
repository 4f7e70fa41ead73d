"""The one door to numba: typed decorators, so that every host kernel is compiled the same way.

Float semantics are strict (no fastmath, no contraction): a result may not depend on how the
compiler vectorised a loop. Compiled code is cached on disk in a folder named after the sources of
the whole room: numba by itself would keep a kernel whose helper, in another file, has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba

from strata_cli.engine.device.cache_folder import cache_root, sources_digest

_CACHE = cache_root() / "host-kernels" / sources_digest(Path(__file__).parent.glob("*.py"))
IS_COLD = not _CACHE.exists()
"""True when this process is the first to compile these sources, which takes some seconds."""

numba.config.CACHE_DIR = str(_CACHE)  # read by numba when a decorator asks for a cache

# Nobody calls these through a C function pointer, and that wrapper takes a sixth of compile time.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

P = ParamSpec("P")
R = TypeVar("R")


def nogil_jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile for the host CPU on first call; the compiled code releases the GIL."""
    compiled = numba.njit(cache=True, **_OPTIONS)(function)
    return cast(Callable[P, R], compiled)


def inline_jit(function: Callable[P, R]) -> Callable[P, R]:
    """A helper that compiled functions call; LLVM inlines it where that pays."""
    compiled = numba.njit(**_OPTIONS)(function)
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
