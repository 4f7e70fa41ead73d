"""When a device did what: spans between two points of its streams, on the trace's clock."""

from __future__ import annotations

import time
from collections import deque
from itertools import chain, repeat
from typing import Any, NamedTuple

from strata_cli.engine.device.base import Device, Event, Stream
from strata_cli.engine.trace import NO_TRACE, Trace

ANCHOR_TRIES = 5
EAGER_LOOKS = 1000  # without a nap; longer waits are for earlier work, and followed by better tries
LATER_NAP_S = 100e-6


class _Span(NamedTuple):
    ev: str
    start: Event
    stop: Event
    chunk: int
    fields: dict[str, Any]


class _Anchor(NamedTuple):
    event: Event
    t_ns: int


class Spans:
    """Marks points in streams and writes what lies between two of them once it is over.

    Costs events with timing where the trace is on, one call where it is off. Used by one thread at
    a time. The first mark after a finish() waits for its stream, to learn what the device's time
    is on the host's clock.

    Args:
        device: makes the events; None only with a trace that is off.
        trace: where spans go.
    """

    def __init__(self, device: Device | None, trace: Trace) -> None:
        self._device = device
        self.trace = trace
        self.is_on = trace.is_on
        self._anchor: _Anchor | None = None
        self._open: deque[_Span] = deque()
        self._used: dict[int, int] = {}  # spans that still need an event, by its id
        self._free: list[Event] = []

    def mark(self, stream: Stream) -> Event | None:
        """A point behind all that the stream was given so far; None where the trace is off."""
        if not self.is_on:
            return None
        if self._anchor is None:
            self._anchor = self._find_anchor(stream)
        event = self._event()
        stream.record(event)
        return event

    def span(self, ev: str, start: Event | None, stop: Event | None, **fields: Any) -> None:
        """Write an event about what lies between two marks, when the device has passed the second.

        A mark may bound several spans, but is gone after the flush() or finish() that wrote them.
        """
        if start is None or stop is None:
            return
        for event in (start, stop):
            self._used[id(event)] = self._used.get(id(event), 0) + 1
        self._open.append(_Span(ev, start, stop, self.trace.chunk, fields))

    def flush(self) -> None:
        """Write the spans that are over. Never blocks."""
        while self._open and self._open[0].stop.query():
            self._write(self._open.popleft())

    def finish(self) -> None:
        """Blocks until all spans are over and written."""
        while self._open:
            self._open[0].stop.synchronize()
            self._write(self._open.popleft())
        if self._anchor is not None:
            self._free.append(self._anchor.event)
            self._anchor = None

    def close(self) -> None:
        """Drops what is not written and gives the events back. Safe to call twice."""
        events = {id(event): event for span in self._open for event in (span.start, span.stop)}
        if self._anchor is not None:
            events[id(self._anchor.event)] = self._anchor.event
        for event in (*events.values(), *self._free):
            event.close()
        self._open.clear()
        self._free.clear()
        self._anchor = None

    def _write(self, span: _Span) -> None:
        assert self._anchor is not None
        t_ns = self._anchor.t_ns + round(span.start.elapsed_ms(self._anchor.event) * 1e6)
        dur_us = round(span.stop.elapsed_ms(span.start) * 1e3, 1)
        self.trace.event(span.ev, t_ns=t_ns, chunk=span.chunk, **span.fields, dur_us=dur_us)
        for event in (span.start, span.stop):
            self._used[id(event)] -= 1
            if not self._used[id(event)]:
                del self._used[id(event)]
                self._free.append(event)

    def _event(self) -> Event:
        if self._free:
            return self._free.pop()
        assert self._device is not None
        return self._device.event(timing=True)

    def _find_anchor(self, stream: Stream) -> _Anchor:
        """A point of the stream whose time on the host's clock is known best."""
        best, best_ns = self._try_anchor(stream)
        for _ in range(ANCHOR_TRIES - 1):
            anchor, error_ns = self._try_anchor(stream)
            if error_ns < best_ns:
                best, anchor, best_ns = anchor, best, error_ns
            self._free.append(anchor.event)
        return best

    def _try_anchor(self, stream: Stream) -> tuple[_Anchor, int]:
        """A point of the stream, and within how many nanoseconds its time is known."""
        event = self._event()
        before_ns = self.trace.now_ns()
        stream.record(event)
        for nap_s in chain(repeat(0.0, EAGER_LOOKS), repeat(LATER_NAP_S)):
            if event.query():
                break
            time.sleep(nap_s)
        error_ns = (self.trace.now_ns() - before_ns) // 2
        return _Anchor(event, before_ns + error_ns), error_ns


NO_SPANS = Spans(None, NO_TRACE)
