"""The trace: what a run did and when, as flat events that are written as JSON lines.

An event is one JSON object: ``v`` (schema version), ``t_ns`` (monotonic nanoseconds since the
trace began; of a span, its begin), ``ev`` (its name), ``chunk`` (number of its prompt chunk,
-1 outside) and the fields that EVENTS lists for the name. ``dur_us`` is the length of a span in
microseconds. Within a version, names and fields are added but never removed or given another
meaning: readers skip what they do not know.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import orjson

from strata_cli.errors import InputError, StrataError, path_text

logger = logging.getLogger(__name__)

VERSION = 1
STDERR = "1"  # the target, as the setting spells it
OUTSIDE = -1  # the chunk of an event that belongs to none

Event: TypeAlias = dict[str, Any]
Sink: TypeAlias = Callable[[Event], None]

EVENTS: Mapping[str, tuple[str, ...]] = {
    # the run, on the host's clock
    "run.begin": ("model", "device", "num_layers", "num_experts", "chunk_tokens", "num_resident"),
    "prompt.begin": ("position", "tokens"),
    "prompt.end": ("tokens", "dur_us"),
    "chunk.begin": ("position", "tokens", "ring_slots"),
    "chunk.end": ("tokens", "dur_us"),
    # what the device computed, on the stream that computes
    "layer.run": ("layer", "dur_us"),
    "group.run": ("layer", "first_rank", "last_rank", "experts", "is_resident", "dur_us"),
    "copy.wait": ("layer", "entry", "dur_us"),
    "host.wait": ("layer", "dur_us"),
    # what came over the link, on the stream that copies
    "copy.run": ("first", "last", "entries", "slot", "pieces", "bytes", "dur_us"),
    "ring.wait": ("slot", "dur_us"),
    # what the threads did
    "layer.routed": ("layer", "routed", "routed_resident", "entries", "pairs"),
    "layer.cpu": ("layer", "experts", "pairs", "dur_us"),
    "device.wait": ("what", "dur_us"),
    "issue.wait": ("entry", "dur_us"),
    "issuer.turn": ("first", "last", "copied", "skipped", "ended_by", "dur_us"),
    "issuer.wait": ("reason", "dur_us"),
    # what steps wanted of cached experts, and which of them changed places
    "window.experts": ("rows", "routed", "hits", "pcie", "cpu", "dropped"),
    "cache.swap": ("swaps",),
    "cache.land": ("landed", "coming"),
    # how a chunk's stream ended
    "layer.entries": ("layer", "first", "entries", "copied", "skipped"),
    "stream.end": ("copied", "skipped", "bytes", "pieces"),
}
"""Every event's own fields; docs/trace.md says what they mean."""

TEXTS = frozenset({"ev", "model", "device", "what", "ended_by", "reason"})
"""The fields that are texts; all others of EVENTS and of every event are numbers."""

LARGEST = 1 << 53  # of the numbers in a file: more can be no time, count or size


class Trace:
    """Takes events and hands them on; any thread may write.

    Args:
        sink: called with each event, from the thread that wrote it; None: the trace is off, and
            writing to it costs one call.

    Attributes:
        is_on: whether anybody listens; ask before computing what only the trace needs.
        chunk: number of the chunk that is worked on; written by the thread that computes.
    """

    __slots__ = ("_origin_ns", "_sink", "chunk", "is_on")

    def __init__(self, sink: Sink | None) -> None:
        self._sink = sink
        self._origin_ns = time.perf_counter_ns()
        self.is_on = sink is not None
        self.chunk = OUTSIDE

    def now_ns(self) -> int:
        """Nanoseconds since the trace began."""
        return time.perf_counter_ns() - self._origin_ns

    def event(
        self, ev: str, *, t_ns: int | None = None, chunk: int | None = None, **fields: Any
    ) -> None:
        """Write one event.

        Args:
            ev: a name of EVENTS.
            t_ns: when it was; None: now.
            chunk: which one it belongs to; None: the one that is worked on.
            fields: those of EVENTS.
        """
        if self._sink is None:
            return
        self._sink(
            {
                "v": VERSION,
                "t_ns": self.now_ns() if t_ns is None else t_ns,
                "ev": ev,
                "chunk": self.chunk if chunk is None else chunk,
                **fields,
            }
        )

    def since(self, ev: str, start_ns: int, **fields: Any) -> None:
        """Write a span of the host's time, from start_ns (of now_ns) until now."""
        if self._sink is not None:
            dur_us = (self.now_ns() - start_ns) / 1e3
            self.event(ev, t_ns=start_ns, **fields, dur_us=round(dur_us, 1))


NO_TRACE = Trace(None)


class LineWriter:
    """A sink that writes each event as a line; lines of several threads do not mix.

    Args:
        file: takes whole lines.
        name: of the file, for messages.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Write one event.

        Raises:
            StrataError: it cannot be written.
        """
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE)
        try:
            with self._lock:
                self._file.write(line)
        except OSError as error:
            raise _unwritable(self._name, error) from error


@contextlib.contextmanager
def open_trace(target: str, *more: Sink) -> Iterator[Trace]:
    """A trace that goes where the setting says, whole when the block ends.

    Args:
        target: "" nowhere, "1" stderr, else the path of a file, which is replaced.
        more: other sinks that get every event.

    Raises:
        InputError: the file cannot be opened.
        StrataError: it cannot be written.
    """
    with contextlib.ExitStack() as files:
        sinks = list(more)
        if target == STDERR:
            sinks.append(_stderr_writer())
        elif target:
            sinks.append(LineWriter(files.enter_context(_open(Path(target))), target))
        yield Trace(_together(sinks))


def read_trace(path: Path) -> list[Event]:
    """The events of a file that open_trace wrote, in the order of their times.

    A last line that was cut off, as a run leaves it that is killed, is left out with a warning.

    Raises:
        InputError: it cannot be read, or is no trace of a version known here.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(
            f"cannot read {path_text(path)}: {error.strerror}", hint="check the path"
        ) from error
    if lines and _is_cut(rest):
        logger.warning("the last line of %s was cut off: left out", path_text(path))
    else:
        lines.append(rest)
    events = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not events:
        raise InputError(
            f"{path_text(path)} has no events", hint="STRATA_TRACE=FILE strata read ... writes one"
        )
    return sorted(events, key=lambda event: event["t_ns"])


def _is_cut(line: bytes) -> bool:
    """Whether a line without an end is only the beginning of an event."""
    if not line.startswith(b"{"):
        return False
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return True
    return False


def _parse(path: Path, number: int, line: bytes) -> Event:
    where = f"line {number} of {path_text(path)}"
    try:
        event = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON: {error}", hint="a trace has one JSON object a line"
        ) from None
    if not isinstance(event, dict) or event.get("v") != VERSION:
        version = event.get("v") if isinstance(event, dict) else None
        raise InputError(
            f"{where} is no event of trace version {VERSION} (v: {version!r})",
            hint="STRATA_TRACE=FILE strata read ... writes one",
        )
    needed = ("t_ns", "ev", "chunk", *EVENTS.get(str(event.get("ev")), ()))
    if missing := [name for name in needed if name not in event]:
        raise InputError(f"{where} has no {', '.join(missing)}", hint="the file is damaged")
    for name in (*needed, "dur_us"):
        if not _is_possible(name, event.get(name, 0)):
            raise InputError(f"{where} has a wrong {name}", hint="the file is damaged")
    return event


def _is_possible(name: str, value: object) -> bool:
    """Whether a field that is read back can have this value."""
    if name in TEXTS:
        return isinstance(value, str)
    least = 0 if name == "dur_us" else -LARGEST
    return isinstance(value, int | float) and least <= value <= LARGEST


def _together(sinks: list[Sink]) -> Sink | None:
    if len(sinks) < 2:
        return sinks[0] if sinks else None

    def write(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return write


def _stderr_writer() -> Sink:
    lock = threading.Lock()

    def write(event: Event) -> None:
        line = orjson.dumps(event, option=orjson.OPT_APPEND_NEWLINE).decode()
        if sys.stderr is not None:  # None when the caller closed it
            with lock:
                sys.stderr.write(line)

    return write


@contextlib.contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("wb")
    except OSError as error:
        raise InputError(
            f"cannot write the trace to {path_text(path)}: {error.strerror}",
            hint="STRATA_TRACE is 0, 1 (stderr) or the path of a file",
        ) from error
    try:
        yield file
    finally:
        try:
            file.close()
        except OSError as error:
            raise _unwritable(str(path), error) from error


def _unwritable(name: str, error: OSError) -> StrataError:
    return StrataError(
        f"cannot write the trace to {name}: {error.strerror}",
        hint="check the folder and its space",
    )
