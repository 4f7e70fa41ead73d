"""Events and graphs of the host device, and what their records are made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from strata_cli.engine.device.base import Event
from strata_cli.errors import DeviceError

LOOK_S = 1.0  # between two looks at whether the stream's thread still lives


class Ticket:
    """One record of an event: done once, with a time and perhaps an error.

    The stream's thread writes ``error``, ``time_ns`` and then ``done``. Waiters add a lock to
    ``gates`` and look at ``done`` again; the stream's thread sets ``done`` first and opens the
    gates after, so one of the two always sees the other. If that thread has ended instead, whoever
    asks is told.
    """

    __slots__ = ("_thread", "done", "error", "gates", "time_ns")

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread
        self.done = False
        self.time_ns = 0
        self.error: DeviceError | None = None
        self.gates: list[threading.Lock] = []

    def complete(self, error: DeviceError | None) -> None:
        self.error = error
        self.time_ns = time.perf_counter_ns()
        self.done = True
        while self.gates:
            self.gates.pop().release()

    def wait(self) -> None:
        """Sleeps until done. In the main thread a signal handler, so Ctrl-C, ends the wait."""
        if self.done:
            return
        gate = threading.Lock()
        gate.acquire()
        self.gates.append(gate)
        while not self.done and not gate.acquire(timeout=LOOK_S):
            self.check()

    def check(self) -> None:
        """Raises what the stream failed with, or that nobody works on it any more."""
        may_come = self.done or self._thread.is_alive()
        if not may_come and not self.done:  # again: its last act may have been this ticket
            raise DeviceError(
                f"thread {self._thread.name!r} of the host device has ended before its work",
                hint="restart: what it was to compute is lost",
            )
        if self.error is not None:
            raise _again(self.error)


def _again(error: DeviceError) -> DeviceError:
    """The error as a new exception, since raising one object twice piles up its traceback."""
    fresh = DeviceError(error.message, hint=error.hint)
    fresh.__cause__ = error.__cause__
    return fresh


class Operation(NamedTuple):
    """One entry of a stream's queue: work with a name for messages, a record, or the end.

    ``alive`` holds what the work reaches by address alone.
    """

    label: str
    run: Callable[[], None] | None = None
    ticket: Ticket | None = None
    alive: tuple[Any, ...] = ()


class HostEvent:
    """A point in a host stream. Times are taken when the stream's thread reaches the record."""

    __slots__ = ("_closed", "_timing", "ticket")

    def __init__(self, *, timing: bool) -> None:
        self._timing = timing
        self._closed = False
        self.ticket: Ticket | None = None

    def query(self) -> bool:
        self.check_open()
        if self.ticket is None:
            return True
        is_done = self.ticket.done
        self.ticket.check()
        return is_done

    def synchronize(self) -> None:
        self.check_open()
        if self.ticket is not None:
            self.ticket.wait()
            self.ticket.check()

    def elapsed_ms(self, start: Event) -> float:
        return (self.reached_ns() - host_event(start).reached_ns()) / 1e6

    def reached_ns(self) -> int:
        """When the latest record was reached, on the clock of time.perf_counter_ns."""
        self.check_open()
        if not self._timing:
            raise DeviceError("event was made without timing", hint="device.event(timing=True)")
        if self.ticket is None or not self.ticket.done:
            raise DeviceError("event has no time yet: its record was not reached")
        return self.ticket.time_ns

    def check_open(self) -> None:
        if self._closed:
            raise DeviceError("event is closed")

    def close(self) -> None:
        self._closed = True
        self.ticket = None


def host_event(event: Event) -> HostEvent:
    """The event as this device's own.

    Raises:
        DeviceError: it belongs to another device, or is closed.
    """
    if not isinstance(event, HostEvent):
        raise DeviceError(f"a host stream needs a host event, got {type(event).__name__}")
    event.check_open()
    return event


class HostGraph:
    """Recorded operations with their arrays resolved."""

    __slots__ = ("_closed", "operations")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._closed = False

    def check_open(self) -> None:
        if self._closed:
            raise DeviceError("graph is closed")

    def close(self) -> None:
        self._closed = True
        self.operations = []
