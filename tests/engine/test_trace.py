from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import orjson
import pytest

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import empty
from strata_cli.engine.device.timing import NO_SPANS, Spans
from strata_cli.engine.trace import (
    EVENTS,
    NO_TRACE,
    OUTSIDE,
    Event,
    LineWriter,
    Trace,
    open_trace,
    read_trace,
)
from strata_cli.errors import InputError, StrataError

CLOCK_NS = 20_000_000  # by how much a busy machine may put a device's clock off


def written(path: Path) -> list[Event]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_an_event_is_one_flat_line_with_version_time_name_chunk_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with open_trace(str(path)) as trace:
        assert trace.is_on
        trace.event("prompt.begin", position=0, tokens=7)
        trace.chunk = 3
        trace.event("prompt.end", t_ns=5, tokens=7, dur_us=1.5)
    first, second = written(path)
    assert list(first) == ["v", "t_ns", "ev", "chunk", "position", "tokens"]
    assert first["t_ns"] >= 0
    assert first["chunk"] == OUTSIDE
    assert second == {
        "v": 1, "t_ns": 5, "ev": "prompt.end", "chunk": 3, "tokens": 7, "dur_us": 1.5
    }  # fmt: skip


def test_a_span_of_host_time_begins_where_it_began() -> None:
    events: list[Event] = []
    trace = Trace(events.append)
    start_ns = trace.now_ns()
    trace.since("issuer.wait", start_ns, reason="ring_full")
    assert events[0]["t_ns"] == start_ns
    assert 0 <= events[0]["dur_us"] < 1e6


def test_a_trace_that_is_off_says_so_and_writes_nothing() -> None:
    with open_trace("") as trace:
        assert not trace.is_on
        trace.event("prompt.begin", position=0, tokens=7)
    assert not NO_TRACE.is_on
    assert NO_SPANS.mark(None) is None  # type: ignore[arg-type]  # no stream is asked for anything
    NO_SPANS.span("layer.run", None, None, layer=0)
    NO_SPANS.finish()


def test_stderr_is_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    with open_trace("1") as trace:
        trace.event("prompt.begin", position=0, tokens=7)
    out = capsys.readouterr()
    assert orjson.loads(out.err)["tokens"] == 7
    assert out.out == ""


def test_a_closed_stderr_loses_the_trace_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_trace("1") as trace:
        monkeypatch.setattr(sys, "stderr", None)
        trace.event("prompt.begin", position=0, tokens=7)


def test_every_sink_gets_every_event(tmp_path: Path) -> None:
    events: list[Event] = []
    with open_trace(str(tmp_path / "t"), events.append) as trace:
        trace.event("prompt.begin", position=0, tokens=7)
    assert events == written(tmp_path / "t")


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with open_trace(str(path)) as trace:

        def write() -> None:
            for number in range(300):
                trace.event("issue.wait", entry=number, dur_us=0.0)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entries = [event["entry"] for event in written(path)]
    assert sorted(entries) == sorted(4 * list(range(300)))


def test_a_trace_is_read_back_in_the_order_of_its_times(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with open_trace(str(path)) as trace:
        trace.event("prompt.end", t_ns=9, tokens=1, dur_us=2.0)
        trace.event("prompt.begin", t_ns=7, position=0, tokens=1)
    assert [event["ev"] for event in read_trace(path)] == ["prompt.begin", "prompt.end"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no events"),
        ("{", "line 1 of .* is not JSON"),
        ("[]", "is no event of trace version 1"),
        ('{"v":2,"t_ns":0,"ev":"prompt.end","chunk":0}', "trace version 1 .v: 2"),
        ('{"v":1,"t_ns":0,"ev":"prompt.end","chunk":0}', "has no tokens, dur_us"),
        ('{"v":1,"ev":"prompt.end"}', "has no t_ns, chunk, tokens, dur_us"),
        ('{"v":1,"t_ns":null,"ev":"new","chunk":0}', "line 1 of .* has a wrong t_ns"),
        ('{"v":1,"t_ns":0,"ev":[],"chunk":0}', "has a wrong ev"),
        ('{"v":1,"t_ns":0,"ev":"new","chunk":{}}', "has a wrong chunk"),
        ('{"v":1,"t_ns":0,"ev":"new","chunk":0,"dur_us":"1"}', "has a wrong dur_us"),
        ('{"v":1,"t_ns":0,"ev":"host.wait","chunk":0,"layer":0,"dur_us":-1}', "wrong dur_us"),
        ('{"v":1,"t_ns":0,"ev":"ring.wait","chunk":0,"slot":1e300,"dur_us":1}', "wrong slot"),
        ('{"v":1,"t_ns":0,"ev":"issuer.wait","chunk":0,"reason":1,"dur_us":1}', "wrong reason"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(InputError, match=problem):
        read_trace(path)


def test_events_of_later_releases_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text('{"v":1,"t_ns":0,"ev":"new.thing","chunk":0,"x":1}\n')
    assert read_trace(path)[0]["x"] == 1


def test_files_that_cannot_be_used_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write the trace"), open_trace(str(tmp_path)):
        pass
    with pytest.raises(InputError, match="cannot read"):
        read_trace(tmp_path / "missing")
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(StrataError, match="No space"):
        LineWriter(full, "full")({"v": 1})


def test_field_names_are_unique_and_do_not_hide_those_of_every_event() -> None:
    for ev, names in EVENTS.items():
        assert len(set(names)) == len(names), ev
        assert not {"v", "t_ns", "ev", "chunk"} & set(names), ev


def test_spans_are_written_when_the_device_is_past_them_with_the_chunk_they_began_in() -> None:
    events: list[Event] = []
    trace = Trace(events.append)
    with open_device("host") as device:
        stream, gate = device.stream("compute"), threading.Event()

        def hold() -> None:
            gate.wait()

        spans = Spans(device, trace)
        before_ns = trace.now_ns()
        start = spans.mark(stream)
        stream.call(hold)
        trace.chunk = 2
        spans.span("layer.run", start, spans.mark(stream), layer=5)
        trace.chunk = 3
        spans.flush()
        assert events == []
        gate.set()
        spans.finish()
        assert [(event["ev"], event["layer"], event["chunk"]) for event in events] == [
            ("layer.run", 5, 2)
        ]
        assert before_ns - CLOCK_NS <= events[0]["t_ns"] <= trace.now_ns() + CLOCK_NS
        assert 0 < events[0]["dur_us"] * 1e3 <= trace.now_ns() - before_ns
        spans.close()
        spans.close()


def test_marks_are_used_again_once_their_spans_are_written() -> None:
    events: list[Event] = []
    with open_device("host") as device:
        stream, made = device.stream("compute"), []
        spans = Spans(device, Trace(events.append))
        memory = empty(device, (4096,), np.uint8)
        for _ in range(5):
            marks = [spans.mark(stream)]
            for layer in range(3):
                stream.fill(memory, layer)
                marks.append(spans.mark(stream))
                spans.span("layer.run", marks[-2], marks[-1], layer=layer)
            made += marks
            spans.finish()
        spans.close()
    assert [event["layer"] for event in events] == 5 * [0, 1, 2]
    times = [event["t_ns"] for event in events]
    assert times == sorted(times)
    assert len({id(mark) for mark in made}) <= 5


def test_every_event_and_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "trace.md").read_text("utf-8")
    for ev, names in EVENTS.items():
        row = ", ".join(f"`{name}`" for name in names)
        assert f"| `{ev}` | {row} |" in text
