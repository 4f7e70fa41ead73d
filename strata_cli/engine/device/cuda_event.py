"""Events and graphs of a CUDA device."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

from strata_cli.engine.device.base import Event
from strata_cli.engine.device.cuda_calls import Failure
from strata_cli.engine.device.cuda_driver import Context, check, failed
from strata_cli.engine.device.cuda_waiting import wait_until
from strata_cli.errors import DeviceError


class _Handle:
    """A handle of the driver's.

    Args:
        context: whose driver.
        destroy: the driver's function that ends it.
        kept: lives until then.

    Attributes:
        value: the handle; None: there is none yet, or no more.
    """

    def __init__(self, context: Context, destroy: str, kept: list[object] | None = None) -> None:
        self._context = context
        self._destroy = destroy
        self._kept = kept
        self.value: Any = None

    def make_event(self, flag: int) -> None:
        self._context.enter()
        self.value = check("cuEventCreate()", self._context.gpu.driver.cuEventCreate(flag))

    def free(self) -> None:
        value, self.value = self.value, None
        if value is not None:
            self._context.enter()
            getattr(self._context.gpu.driver, self._destroy)(value)


class CudaEvent:
    """A CUevent. One made with timing can be read by elapsed_ms."""

    def __init__(self, context: Context, *, timing: bool) -> None:
        flags = context.gpu.driver.CUevent_flags
        self._context = context
        self._timing = timing
        self.failure: Failure | None = None
        self._event = _Handle(context, "cuEventDestroy")
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        self._key = context.holdings.take(
            self, self._event, partial(self._event.make_event, int(flag))
        )

    @property
    def handle(self) -> Any:
        if self._event.value is None:
            raise DeviceError("event is closed")
        return self._event.value

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
        self._context.holdings.give(self._key)


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
    """A CUgraphExec, and what must live as long: the buffers and host functions inside it.

    Attributes:
        block: what captures it, from its beginning on.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._is_open = True
        self.kept: list[object] = []
        self.block: weakref.ref[object] | None = None
        self._exec = _Handle(context, "cuGraphExecDestroy", self.kept)
        self._key = context.holdings.claim(self, self._exec)

    @property
    def handle(self) -> Any:
        if not self._is_open or self._exec.value is None:
            raise DeviceError("graph is closed" if not self._is_open else "graph is not complete")
        return self._exec.value

    def is_abandoned(self) -> bool:
        """Whether its capture was left without an end."""
        return self.block is not None and self.block() is None

    def instantiate(self, graph: Any) -> None:
        """Makes the captured CUgraph executable and destroys it; nothing may interrupt this."""
        driver = self._context.gpu.driver
        try:
            self._exec.value = check("cuGraphInstantiate()", driver.cuGraphInstantiate(graph, 0))
        finally:
            driver.cuGraphDestroy(graph)

    def close(self) -> None:
        self._is_open = False
        self._context.holdings.give(self._key)
        self.kept.clear()
