"""The one door to numba: typed decorators, so that every host kernel is compiled the same way.

Float semantics are strict (no fastmath, no contraction): a result may not depend on how the
compiler vectorised a loop. Compiled code is cached on disk in a folder named after the sources of
the whole room: numba by itself would keep a kernel whose helper, in another file, has changed. A
cache that cannot be used costs time and a warning, never the run.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import numba as numba_package
from llvmlite.binding import get_host_cpu_name

from strata_cli.engine.device.cache_folder import open_cache, sources_digest

numba: Any = numba_package  # carries types in some versions, and not the same ones

logger = logging.getLogger(__name__)

_CACHE = open_cache("host-kernels", sources_digest(Path(__file__).parent.glob("*.py")))
_COMPLETE = (_CACHE.path or Path()) / "-".join(
    ("complete", sys.implementation.cache_tag, numba.__version__, get_host_cpu_name())
)

if _CACHE.path is not None:  # read by numba when a decorator asks for a cache
    numba.config.CACHE_DIR = str(_CACHE.path)

# Nobody calls these through a C function pointer, and that wrapper takes a sixth of compile time.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

# What unpickling and linking a damaged file was seen to raise, or may by their documentation.
_DAMAGED = (
    pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, TypeError,
    ValueError, ArithmeticError, MemoryError, RuntimeError,
)  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")


class _Keeper:
    """Whether compiled kernels are kept. Written by the thread that compiles, one at a time.

    Attributes:
        problem: why they are not; empty while they are.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def give_up(self, error: Exception) -> None:
        """Keep nothing from now on; the first call says so."""
        if not self.problem:
            reason = error.strerror if isinstance(error, OSError) else None
            self.problem = f"{_CACHE.path}: {reason or error}"
            logger.warning("compiled kernels cannot be kept for later starts: %s", self.problem)


_keeper = _Keeper(_CACHE.problem)


def why_uncached() -> str:
    """Why compiled kernels are not kept for later starts, on one line; empty when they are."""
    return _keeper.problem


def is_cold() -> bool:
    """True until keep_as_complete: compiling these sources for this processor takes seconds."""
    return bool(_keeper.problem) or not _COMPLETE.exists()


def keep_as_complete() -> None:
    """Note that the cache holds the kernels now, if it does, compiled for this processor."""
    if not _keeper.problem:
        with contextlib.suppress(OSError):  # a folder that cannot be written stays cold
            _COMPLETE.touch()


def nogil_jit(function: Callable[P, R]) -> Callable[P, R]:
    """Compile for the host CPU on first call; the compiled code releases the GIL."""
    if _keeper.problem:
        return cast(Callable[P, R], numba.njit(**_OPTIONS)(function))
    try:
        compiled = numba.njit(cache=True, **_OPTIONS)(function)
    except (OSError, RuntimeError) as error:  # numba finds no place for this function's cache
        _keeper.give_up(error)
        return cast(Callable[P, R], numba.njit(**_OPTIONS)(function))
    compiled._cache = _TolerantCache(compiled._cache)
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
    if not _keeper.problem:
        try:
            return _c_function(signature, function, cache=True)
        except _DAMAGED:
            _forget(function)
        except OSError as error:
            _keeper.give_up(error)
    return _c_function(signature, function, cache=False)


def named_copy(
    template: Callable[..., None], origin: Callable[..., Any], ending: str = "", **scope: Any
) -> Callable[..., None]:
    """A function to compile for another one: a template, and what it calls, in a scope of its own.

    numba keys its disk cache by a function's file, name and first line, and drops an entry when
    the file changes. So each copy claims to stand where its origin stands.
    """
    assert isinstance(template, FunctionType)
    code = template.__code__.replace(
        co_filename=origin.__code__.co_filename,
        co_firstlineno=origin.__code__.co_firstlineno,
        co_name=origin.__name__ + ending,
        co_qualname=origin.__qualname__ + ending,
    )
    return FunctionType(code, {**scope, "__name__": origin.__module__})


def _c_function(signature: Any, function: Callable[..., Any], *, cache: bool) -> Any:
    return numba.cfunc(signature, nopython=True, cache=cache, error_model="numpy")(function)


def _forget(function: Callable[..., Any]) -> None:
    """Empty a function's damaged cache, so that the next start can fill it."""
    from numba.core import caching

    open_function_cache: Callable[..., Any] = caching.FunctionCache
    try:
        cache = open_function_cache(function)
    except (OSError, RuntimeError) as error:  # it was not damaged: there is no place for it
        _keeper.give_up(error)
    else:
        _TolerantCache(cache).forget()


class _TolerantCache:
    """One function's cache in numba, where an error of the disk is a miss.

    numba itself lets such errors end the call that wanted to compile.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled code; None where it is absent, unreadable or damaged."""
        try:
            return self._cache.load_overload(signature, target)
        except OSError:
            return None
        except _DAMAGED:
            self.forget()
            return None

    def save_overload(self, signature: Any, code: Any) -> None:
        """Keep compiled code, if that can be."""
        if _keeper.problem:
            return
        try:
            self._cache.save_overload(signature, code)
        except OSError as error:
            _keeper.give_up(error)

    def forget(self) -> None:
        """Empty the cache of a function that is damaged, and say so."""
        logger.warning("damaged kernels in %s: compiling again", self._cache.cache_path)
        try:
            self._cache.flush()
        except OSError as error:
            _keeper.give_up(error)
