"""Python functions inside a CUDA stream: how the driver calls them, and what their failures do."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

from strata_cli.errors import DeviceError


class Failure:
    """The first exception of a stream's host functions, and the streams whose work it read.

    ``error`` is written by the driver's callback thread, ``inputs`` by the stream's owner.
    """

    def __init__(self, stream_name: str) -> None:
        self._stream_name = stream_name
        self.error: BaseException | None = None
        self.inputs: set[Failure] = set()

    def first(self) -> Failure | None:
        """The failure that this stream must not work behind: its own or one it waited for."""
        seen: set[Failure] = set()
        open_failures = [self]
        while open_failures:
            failure = open_failures.pop()
            if failure.error is not None:
                return failure
            seen.add(failure)
            open_failures += failure.inputs - seen
        return None

    def check(self) -> None:
        """Raises the first failure as a DeviceError with its cause."""
        failure = self.first()
        if failure is not None:
            raise DeviceError(
                f"stream {failure._stream_name!r} failed in call: "
                f"{type(failure.error).__name__}: {failure.error}"
            ) from failure.error


class HostCalls:
    """Python functions that the driver calls, by number, through one C function.

    ``pending`` is written by the owners of streams and, for functions called once, popped by the
    driver's thread; each number is used by one of the two at a time.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._entry = prototype(self._run)  # must live as long as the process may call it
        self.address = ctypes.cast(self._entry, ctypes.c_void_p).value or 0

    def add(self, function: Callable[[], None]) -> int:
        number = next(self._numbers)
        self.pending[number] = function
        return number

    def _run(self, number: int) -> None:
        self.pending[number]()


host_calls = HostCalls()


def launch_in_graph(driver: Any, stream: Any, number: int) -> tuple[Any]:
    """Adds a host function to a stream that is being captured; answers as a binding does.

    Straight to the driver: the bindings pass their own record of the call along and free it after
    the first run, and a graph runs it again and again.
    """
    library = ctypes.CDLL("libcuda.so.1")
    launch = library.cuLaunchHostFunc
    launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return (driver.CUresult(launch(int(stream), host_calls.address, number)),)


class CallInGraph:
    """Keeps a host function callable for as long as the graph that holds it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __del__(self) -> None:
        host_calls.pending.pop(self._number, None)
