"""Streams of the host device: in-order queues, each with its own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import (
    Call,
    Event,
    Graph,
    Kernel,
    KernelArgument,
    Launch,
    Pattern,
    Stream,
    Tensor,
)
from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.engine.device.host_arrays import (
    body_arguments,
    copy_all,
    copy_views,
    writable,
)
from strata_cli.engine.device.host_event import HostEvent, HostGraph, Operation, Ticket, host_event
from strata_cli.engine.device.host_workers import CHUNKS_PER_THREAD, WorkerPool
from strata_cli.engine.device.row_copies import row_runs
from strata_cli.errors import DeviceError, ShapeError


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
        self._queue: SimpleQueue[Operation] = SimpleQueue()
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
        self._emit(Operation(kernel.name, run, alive=arrays))

    def pattern(self, _calls: Sequence[Call], _addresses: NDArray[np.int64], /) -> Pattern | None:
        return None  # what it runs is much longer than a launch takes

    def repeat(self, _pattern: Pattern, _addresses: NDArray[np.int64], /) -> None:
        raise DeviceError("the host has no patterns of launches")

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self._emit(Operation("copy", partial(np.copyto, *copy_views(dst, src))))

    def copy_many(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        views = [copy_views(dst, src) for dst, src in pairs]
        self._emit(Operation("copy", partial(copy_all, views)))

    def copy_rows(
        self, dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
    ) -> int:
        runs = row_runs(dst, dst_rows, src, src_rows)
        self.copy_many(runs.pairs(dst, src))
        return len(runs.rows)

    def fill(self, dst: Tensor, byte: int) -> None:
        if not 0 <= byte <= 255:
            raise ShapeError(f"fill byte {byte} is outside 0..255")
        self._emit(Operation("fill", partial(writable(dst).fill, byte)))

    def call(self, function: Callable[[], None]) -> None:
        self._emit(Operation("call", function))

    def record(self, event: Event) -> None:
        self._check_not_capturing("record")
        own = host_event(event)
        ticket = Ticket(self._thread)
        self._emit(Operation("record", ticket=ticket))
        own.ticket = ticket

    def wait(self, event: Event) -> None:
        self._check_not_capturing("wait")
        ticket = host_event(event).ticket
        if ticket is not None:
            self._emit(Operation("wait", partial(_pass, ticket)))

    def synchronize(self) -> None:
        self._check_not_capturing("synchronize")
        ticket = Ticket(self._thread)
        self._emit(Operation("synchronize", ticket=ticket))
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
        self._emit(Operation("graph", partial(self._run_all, graph.operations)))

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

    def _emit(self, operation: Operation) -> None:
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

    def _run(self, operation: Operation) -> None:
        self._label = operation.label
        assert operation.run is not None
        try:
            operation.run()
        except BaseException as error:  # noqa: BLE001  a stream keeps any failure for its owner
            self._failure = DeviceError(
                f"stream {self._name!r} failed in {self._label}: {type(error).__name__}: {error}"
            )
            self._failure.__cause__ = error

    def _run_all(self, operations: list[Operation]) -> None:
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


_END = Operation("end")


def _pass(ticket: Ticket) -> None:
    """Body of a wait: a stream that waited for failed work fails too; its input is missing."""
    ticket.wait()
    ticket.check()
