"""Streams, events and graphs of the host device: in-order queues, each with its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import (
    Event,
    Graph,
    Kernel,
    KernelArgument,
    Launch,
    Stream,
    Tensor,
)
from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.engine.device.host_memory import HostBuffer
from strata_cli.engine.device.host_workers import CHUNKS_PER_THREAD, WorkerPool
from strata_cli.engine.device.row_copies import row_runs
from strata_cli.errors import DeviceError, ShapeError

LOOK_S = 1.0  # between two looks at whether the stream's thread still lives


class _Ticket:
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


class _Operation(NamedTuple):
    """One entry of a stream's queue: work with a name for messages, a record, or the end.

    ``alive`` holds what the work reaches by address alone.
    """

    label: str
    run: Callable[[], None] | None = None
    ticket: _Ticket | None = None
    alive: tuple[Any, ...] = ()


class HostEvent:
    """A point in a host stream. Times are taken when the stream's thread reaches the record."""

    __slots__ = ("_closed", "_timing", "ticket")

    def __init__(self, *, timing: bool) -> None:
        self._timing = timing
        self._closed = False
        self.ticket: _Ticket | None = None

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
        self.operations: list[_Operation] = []
        self._closed = False

    def check_open(self) -> None:
        if self._closed:
            raise DeviceError("graph is closed")

    def close(self) -> None:
        self._closed = True
        self.operations = []


def resolve(argument: KernelArgument) -> Any:
    """A kernel argument as the host function gets it: tensors become arrays over their bytes."""
    if not isinstance(argument, Tensor):
        return argument
    memory = _memory_of(argument)
    return np.ndarray(argument.shape, argument.dtype, memory, argument.offset_bytes)


def _memory_of(tensor: Tensor) -> NDArray[np.uint8]:
    buffer = tensor.buffer
    if not isinstance(buffer, HostBuffer):
        raise DeviceError(f"a host stream needs a host buffer, got {type(buffer).__name__}")
    return buffer.memory()


class BodyArguments(NamedTuple):
    """What a kernel's host body is called with, and the arrays that it may reach by address."""

    values: tuple[Any, ...]
    arrays: tuple[Any, ...]


def body_arguments(kernel: Kernel, args: Sequence[KernelArgument]) -> BodyArguments:
    """The arguments of a launch as the kernel's host body takes them."""
    arrays = tuple([resolve(argument) for argument in args])
    return BodyArguments(arrays if kernel.bind is None else kernel.bind(*arrays), arrays)


def _flat(tensor: Tensor) -> NDArray[np.uint8]:
    return np.ndarray((tensor.nbytes,), np.uint8, _memory_of(tensor), tensor.offset_bytes)


def _writable(tensor: Tensor) -> NDArray[np.uint8]:
    flat = _flat(tensor)
    if not flat.flags.writeable:
        raise DeviceError(f"cannot write {tensor.nbytes} bytes into a read-only buffer")
    return flat


class _CopyViews(NamedTuple):
    dst: NDArray[np.uint8]
    src: NDArray[np.uint8]


def _copy_views(dst: Tensor, src: Tensor) -> _CopyViews:
    to, source = _writable(dst), _flat(src)
    if to.size != source.size:
        raise ShapeError(f"copy of {source.size} bytes into {to.size} bytes")
    return _CopyViews(to, source)


def _copy_all(copies: list[_CopyViews]) -> None:
    for dst, src in copies:
        np.copyto(dst, src)


class HostStream:
    """An in-order queue and the thread that runs it.

    The owner's side only appends to the queue, and the thread sleeps in it when it is empty, so a
    burst of launches wakes the thread once. ``_recording`` is the graph being captured, ``_sides``
    the streams that record into it as well.
    ``_failure`` and ``_label`` are written by the stream's thread alone, ``_recording`` and
    ``_closed`` by the owner (or the device's close).
    """

    def __init__(self, name: str, pool: WorkerPool) -> None:
        self._name = name
        self._pool = pool
        self._queue: SimpleQueue[_Operation] = SimpleQueue()
        self._closed = False
        self._recording: HostGraph | None = None
        self._sides: list[HostStream] = []
        self._failure: DeviceError | None = None
        self._label = ""
        self._thread = HelperThread(self._serve, f"strata-{name}")
        self._thread.start()

    @property
    def name(self) -> str:
        return self._name

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def num_multiprocessors(self) -> int:
        return 0

    @property
    def capability(self) -> tuple[int, int]:
        return (0, 0)

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        items = launch.items
        values, arrays = body_arguments(kernel, args)
        chunks = min(items // max(launch.grain, 1), self._pool.num_threads * CHUNKS_PER_THREAD)
        if chunks <= 1 or self._pool.num_threads == 1:
            run = partial(kernel.host, 0, items, *values)
        else:
            run = partial(self._pool.run, kernel.host, items, chunks, values)
        self._emit(_Operation(kernel.name, run, alive=arrays))

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._emit(_Operation("copy", partial(np.copyto, *_copy_views(dst, src))))

    def copy_many(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        views = [_copy_views(dst, src) for dst, src in pairs]
        self._emit(_Operation("copy", partial(_copy_all, views)))

    def copy_rows(
        self, dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
    ) -> int:
        runs = row_runs(dst, dst_rows, src, src_rows)
        self.copy_many(runs.pairs(dst, src))
        return len(runs.rows)

    def fill(self, dst: Tensor, byte: int) -> None:
        if not 0 <= byte <= 255:
            raise ShapeError(f"fill byte {byte} is outside 0..255")
        self._emit(_Operation("fill", partial(_writable(dst).fill, byte)))

    def call(self, function: Callable[[], None]) -> None:
        self._emit(_Operation("call", function))

    def record(self, event: Event) -> None:
        self._check_not_capturing("record")
        own = host_event(event)
        ticket = _Ticket(self._thread)
        self._emit(_Operation("record", ticket=ticket))
        own.ticket = ticket

    def wait(self, event: Event) -> None:
        self._check_not_capturing("wait")
        ticket = host_event(event).ticket
        if ticket is not None:
            self._emit(_Operation("wait", partial(_pass, ticket)))

    def synchronize(self) -> None:
        self._check_not_capturing("synchronize")
        ticket = _Ticket(self._thread)
        self._emit(_Operation("synchronize", ticket=ticket))
        ticket.wait()
        ticket.check()

    def fork(self, side: Stream) -> None:
        own = _host_stream(side)
        if self._recording is None:
            self._before(own)
            return
        self._sides.append(own)  # first, so that an interrupt leaves it to end_capture()
        own._recording = self._recording  # which keeps everything in the order of the calls

    def join(self, side: Stream) -> None:
        own = _host_stream(side)
        if self._recording is None:
            own._before(self)
        elif own._recording is self._recording:
            own._recording = None

    def capture(self) -> AbstractContextManager[Graph]:
        return _Capture(self, HostGraph())

    def begin_capture(self, graph: HostGraph) -> None:
        """From here on operations go into the graph."""
        self._check_not_capturing("capture")
        self._check_open()
        self._recording = graph

    def end_capture(self, graph: HostGraph) -> None:
        """Ends the capture of this graph, if it is under way."""
        if self._recording is graph:
            self._recording = None
            while self._sides:
                self._sides.pop()._recording = None

    def replay(self, graph: Graph) -> None:
        self._check_not_capturing("replay")
        if not isinstance(graph, HostGraph):
            raise DeviceError(f"a host stream needs a host graph, got {type(graph).__name__}")
        graph.check_open()
        self._emit(_Operation("graph", partial(self._run_all, graph.operations)))

    @property
    def is_closed(self) -> bool:
        return self._closed

    def stop(self) -> None:
        """Refuses new work and drops what is queued; does not wait for what runs."""
        if not self._closed:
            self._closed = True
            self._queue.put(_END)

    def close(self) -> None:
        """Ends the stream: what runs is waited for, what is queued behind it is dropped."""
        self.stop()
        self._thread.join()

    def _emit(self, operation: _Operation) -> None:
        if self._closed:
            raise DeviceError(f"stream {self._name!r} is closed: cannot {operation.label}")
        if self._recording is not None:
            self._recording.operations.append(operation)
        else:
            self._queue.put(operation)

    def _before(self, other: HostStream) -> None:
        """Later work of the other waits for what is enqueued here."""
        event = HostEvent(timing=False)
        self.record(event)
        other.wait(event)

    def _check_open(self) -> None:
        if self._closed:
            raise DeviceError(f"stream {self._name!r} is closed")

    def _check_not_capturing(self, what: str) -> None:
        if self._recording is not None:
            raise DeviceError(
                f"stream {self._name!r} is capturing a graph: cannot {what}",
                hint="a graph holds launches, copies, fills and calls; do the rest outside",
            )

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not _END:
            if self._closed and self._failure is None:
                self._failure = DeviceError(
                    f"stream {self._name!r} was closed before its work was done",
                    hint="synchronize before closing",
                )
            if operation.ticket is not None:
                operation.ticket.complete(self._failure)
            elif operation.run is not None and self._failure is None:
                self._run(operation)
            del operation  # an idle stream must not keep its last arrays alive

    def _run(self, operation: _Operation) -> None:
        self._label = operation.label
        assert operation.run is not None
        try:
            operation.run()
        except BaseException as error:  # noqa: BLE001  a stream keeps any failure for its owner
            self._failure = DeviceError(
                f"stream {self._name!r} failed in {self._label}: {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error

    def _run_all(self, operations: list[_Operation]) -> None:
        for self._label, run, _, _ in operations:
            assert run is not None
            run()


def _host_stream(stream: Stream) -> HostStream:
    if not isinstance(stream, HostStream):
        raise DeviceError(f"a host stream needs a host stream, got {type(stream).__name__}")
    return stream


class _Capture(NamedTuple):
    """The block of a capture.

    An interrupt can come at any line, even before the first one of __exit__. Then the capture ends
    when nothing refers to its block any more. A tuple, because it is never there by half.
    """

    stream: HostStream
    graph: HostGraph

    def __enter__(self) -> Graph:
        self.stream.begin_capture(self.graph)
        return self.graph

    def __exit__(self, *_: object) -> None:
        self.stream.end_capture(self.graph)

    def __del__(self) -> None:
        self.stream.end_capture(self.graph)


_END = _Operation("end")


def _pass(ticket: _Ticket) -> None:
    """Body of a wait: a stream that waited for failed work fails too; its input is missing."""
    ticket.wait()
    ticket.check()
