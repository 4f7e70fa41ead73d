"""Events and graphs of a CUDA device."""

from __future__ import annotations

from functools import partial
from typing import Any

from strata_cli.engine.device.base import Event
from strata_cli.engine.device.cuda_calls import Failure
from strata_cli.engine.device.cuda_driver import Context, check, failed
from strata_cli.engine.device.cuda_waiting import wait_until
from strata_cli.errors import DeviceError


class CudaEvent:
    """A CUevent. One made with timing can be read by elapsed_ms."""

    _handle: Any = None  # also of one whose making was interrupted

    def __init__(self, context: Context, *, timing: bool) -> None:
        driver = context.gpu.driver
        flags = driver.CUevent_flags
        self._context = context
        self._timing = timing
        self.failure: Failure | None = None
        context.enter()
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self._handle = check("cuEventCreate()", driver.cuEventCreate(int(flag)))

    @property
    def handle(self) -> Any:
        if self._handle is None:
            raise DeviceError("event is closed")
        return self._handle

    def query(self) -> bool:
        self._context.enter()
        answer = self._context.gpu.driver.cuEventQuery(self.handle)
        done = is_done("cuEventQuery()", answer[0])
        if done and self.failure is not None:
            self.failure.check()
        return done

    def synchronize(self) -> None:
        wait_until(self.query)

    def elapsed_ms(self, start: Event) -> float:
        if not self._timing or not cuda_event(start)._timing:
            raise DeviceError("event was made without timing", hint="device.event(timing=True)")
        self._context.enter()
        driver = self._context.gpu.driver
        answer = driver.cuEventElapsedTime(cuda_event(start).handle, self.handle)
        return float(check("cuEventElapsedTime()", answer))

    def close(self) -> None:
        if self._handle is not None:
            self._context.enter()
            self._context.gpu.driver.cuEventDestroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        if self._handle is not None:
            self._context.orphans.append(partial(_destroy_event, self._handle))


def _destroy_event(handle: Any, context: Context) -> None:
    context.enter()
    context.gpu.driver.cuEventDestroy(handle)


def is_done(call: str, status: Any) -> bool:
    """What a query's CUresult says: done, or not yet; any other answer raises DeviceError."""
    if not int(status):
        return True
    if status.name == "CUDA_ERROR_NOT_READY":
        return False
    raise failed(call, status)


def cuda_event(event: Event) -> CudaEvent:
    """The event as this device's own.

    Raises:
        DeviceError: it belongs to another device.
    """
    if not isinstance(event, CudaEvent):
        raise DeviceError(f"a CUDA stream needs a CUDA event, got {type(event).__name__}")
    return event


class CudaGraph:
    """A CUgraphExec, and what must live as long: the buffers and host functions inside it."""

    _exec: Any = None  # also of one whose making was interrupted

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_open = True
        self.kept: list[object] = []

    @property
    def handle(self) -> Any:
        if not self._is_open or self._exec is None:
            raise DeviceError("graph is closed" if not self._is_open else "graph is not complete")
        return self._exec

    def instantiate(self, graph: Any) -> None:
        """Makes the captured CUgraph executable and destroys it."""
        driver = self._context.gpu.driver
        try:
            self._exec = check("cuGraphInstantiate()", driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def close(self) -> None:
        self._is_open = False
        if self._exec is not None:
            self._context.enter()
            self._context.gpu.driver.cuGraphExecDestroy(self._exec)
            self._exec = None
        self.kept.clear()

    def __del__(self) -> None:
        if self._exec is not None:
            self._context.orphans.append(partial(_destroy_graph, self._exec, self.kept))


def _destroy_graph(handle: Any, _kept: list[object], context: Context) -> None:
    context.enter()
    context.gpu.driver.cuGraphExecDestroy(handle)
