"""A trace as the JSON that Perfetto and chrome://tracing open.

Source: Trace Event Format: complete events ("X") and instants ("i"), times in microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strata_cli.engine.trace import Event

PROCESS = 1


class _Track(NamedTuple):
    number: int
    name: str


COMPUTE = _Track(1, "compute stream")
COPIES = _Track(2, "copy stream")
ISSUER = _Track(3, "issuer")
THREAD = _Track(4, "compute thread")
TRACKS = (COMPUTE, COPIES, ISSUER, THREAD)

TRACK_OF: Mapping[str, _Track] = {
    "layer.run": COMPUTE,
    "group.run": COMPUTE,
    "copy.wait": COMPUTE,
    "host.wait": COMPUTE,
    "copy.run": COPIES,
    "ring.wait": COPIES,
    "issuer.turn": ISSUER,
    "issuer.wait": ISSUER,
}

ROUNDING_US = 0.2  # of a span's length, and of where its neighbours begin
GAP_US = 0.002  # readers cut times to whole nanoseconds

_EVERY_EVENT = ("v", "t_ns", "ev", "dur_us")


def as_perfetto(events: Sequence[Event]) -> dict[str, Any]:
    """The object to write as a file, from a trace's events."""
    named: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "thread_name",
            "pid": PROCESS,
            "tid": track.number,
            "args": {"name": track.name},
        }
        for track in TRACKS
    ]
    # What has no length of its own is told where it happened: chunks by their end, which has one.
    shown = [
        _shown(event) for event in events if event["ev"] not in ("chunk.begin", "prompt.begin")
    ]
    for track in TRACKS:
        _nest([item for item in shown if item["ph"] == "X" and item["tid"] == track.number])
    return {"traceEvents": named + shown, "displayTimeUnit": "ms"}


def _nest(spans: list[dict[str, Any]]) -> None:
    """Cut what rounding made too long: Perfetto drops a span that overlaps another one's end."""
    around: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        start = span["ts"]
        while around and _stop(around[-1]) <= start + ROUNDING_US:
            _cut(around.pop(), start)
        if around:
            _cut(span, _stop(around[-1]))
        around.append(span)


def _stop(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])


def _cut(span: dict[str, Any], stop: float) -> None:
    if _stop(span) > stop - GAP_US:
        span["dur"] = round(max(stop - GAP_US - span["ts"], 0.0), 3)


def _shown(event: Event) -> dict[str, Any]:
    track = TRACK_OF.get(event["ev"], THREAD)
    shown: dict[str, Any] = {
        "name": _name(event),
        "cat": event["ev"],
        "pid": PROCESS,
        "tid": track.number,
        "ts": event["t_ns"] / 1e3,
        "args": {key: value for key, value in event.items() if key not in _EVERY_EVENT},
    }
    if "dur_us" in event:
        return shown | {"ph": "X", "dur": event["dur_us"]}
    return shown | {"ph": "i", "s": "t"}


def _name(event: Event) -> str:
    match event["ev"]:
        case "layer.run":
            return f"layer {event['layer']}"
        case "group.run":
            return (
                f"{event['experts']} {'resident' if event['is_resident'] else 'streamed'} experts"
            )
        case "copy.run":
            return f"{event['entries']} entries from {event['first']}"
        case "issuer.wait":
            return f"wait: {event['reason']}"
        case "chunk.end":
            return f"chunk {event['chunk']}"
        case "prompt.end":
            return "prompt"
        case ev:
            return str(ev)
