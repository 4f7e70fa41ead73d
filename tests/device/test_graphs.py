"""Capture and replay of a stream's work, on every device."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from strata_cli.engine.device.base import Device, Stream, empty
from strata_cli.engine.device.transfer import download, upload
from strata_cli.errors import DeviceError
from tests.device.gates import held
from tests.device.kernels import affine


def test_captured_work_runs_at_replay_and_only_then(device: Device, stream: Stream) -> None:
    x, y = empty(device, (5,), np.int64), empty(device, (5,), np.int64)
    upload(device, stream, x, np.ones(5, np.int64))
    stream.fill(y, 0)
    with stream.capture() as graph:
        affine(stream, x, 3, 1)
        stream.copy_many([(y.rows(0, 2), x.rows(0, 2)), (y.rows(2, 5), x.rows(2, 5))])
        affine(stream, x, 2, 0)
    assert (download(device, stream, x) == 1).all()
    stream.replay(graph)
    assert (download(device, stream, x) == 8).all()
    stream.replay(graph)
    stream.replay(graph)
    assert (download(device, stream, x) == 302).all()
    assert (download(device, stream, y) == 151).all()


def test_replay_reads_what_the_memory_holds_then(device: Device, stream: Stream) -> None:
    x = empty(device, (1,), np.int64)
    with stream.capture() as graph:
        affine(stream, x, 10, 0)
    for value in (1, 7, -3):
        upload(device, stream, x, np.array([value]))
        stream.replay(graph)
        assert download(device, stream, x) == value * 10


def test_replay_is_in_order_with_other_work(device: Device, stream: Stream) -> None:
    x = empty(device, (1,), np.int64)
    upload(device, stream, x, np.array([1]))
    with stream.capture() as graph:
        affine(stream, x, 3, 0)
    with held(device, stream):
        for term in range(5):
            affine(stream, x, 1, term)
            stream.replay(graph)
    expected = 1
    for term in range(5):
        expected = (expected + term) * 3
    assert download(device, stream, x) == expected


def test_a_graph_runs_on_any_stream(device: Device, stream: Stream) -> None:
    x, other = empty(device, (1,), np.int64), device.stream("other")
    upload(device, stream, x, np.array([5]))
    with stream.capture() as graph:
        affine(stream, x, 2, 2)
    other.replay(graph)
    assert download(device, other, x) == 12


def test_a_fork_waits_and_a_join_is_waited_for(device: Device, stream: Stream) -> None:
    x, y = empty(device, (1,), np.int64), empty(device, (1,), np.int64)
    side = device.stream("side")
    with held(device, stream):
        stream.fill(x, 0)
        affine(stream, x, 1, 2)
        stream.fork(side)
        side.copy(y, x)
        affine(side, y, 10, 1)
        stream.join(side)
        stream.copy(x, y)
    assert download(device, stream, x) == 21


def test_a_capture_holds_what_is_forked_until_it_is_joined(device: Device, stream: Stream) -> None:
    x, y = empty(device, (1,), np.int64), empty(device, (1,), np.int64)
    side = device.stream("side")
    upload(device, stream, x, np.array([1]))
    with stream.capture() as graph:
        affine(stream, x, 3, 0)
        stream.fork(side)
        side.copy(y, x)
        affine(side, y, 10, 0)
        stream.fork(side)  # for more
        affine(side, y, 1, 1)
        stream.join(side)
        affine(stream, y, 1, 1)
    assert download(device, stream, x) == 1
    side.fill(x, 0)  # goes its own way again
    side.synchronize()
    upload(device, stream, x, np.array([2]))
    stream.replay(graph)
    assert download(device, stream, x) == 6
    assert download(device, stream, y) == 62


def test_a_fork_that_is_not_joined_is_over_with_its_capture(device: Device, stream: Stream) -> None:
    x = empty(device, (1,), np.int64)
    side = device.stream("side")

    def fork_and_fail() -> None:
        with stream.capture():
            affine(stream, x, 1, 1)
            stream.fork(side)
            side.fill(x, 1)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fork_and_fail()
    side.fill(x, 0)
    side.synchronize()
    assert download(device, stream, x) == 0


def test_fills_and_calls_are_captured(device: Device, stream: Stream) -> None:
    x, calls = empty(device, (3,), np.uint8), []
    with stream.capture() as graph:
        stream.fill(x, 7)
        stream.call(lambda: calls.append(1))
    stream.synchronize()
    assert not calls
    for _ in range(3):
        stream.replay(graph)
    assert (download(device, stream, x) == 7).all()
    assert len(calls) == 3


def test_a_failure_inside_a_graph_is_sticky(device: Device, stream: Stream) -> None:
    def fail() -> None:
        raise ValueError("planted")

    with stream.capture() as graph:
        stream.call(fail)
    stream.replay(graph)
    with pytest.raises(DeviceError, match="planted"):
        stream.synchronize()


def test_only_work_can_be_captured(device: Device, stream: Stream) -> None:
    with stream.capture() as graph:
        pass
    event = device.event()
    uses: list[Callable[[], object]] = [
        stream.synchronize,
        lambda: stream.record(event),
        lambda: stream.wait(event),
        lambda: stream.replay(graph),
        lambda: stream.capture().__enter__(),
    ]
    for use in uses:
        with stream.capture(), pytest.raises(DeviceError, match="captur"):
            use()
    stream.synchronize()


def test_an_error_inside_the_block_leaves_the_stream_usable(device: Device, stream: Stream) -> None:
    x = empty(device, (1,), np.int64)
    upload(device, stream, x, np.array([1]))

    def capture_and_fail() -> None:
        with stream.capture():
            affine(stream, x, 100, 0)
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        capture_and_fail()
    affine(stream, x, 1, 1)
    assert download(device, stream, x) == 2


def test_an_empty_graph_replays(device: Device, stream: Stream) -> None:
    with stream.capture() as graph:
        pass
    stream.replay(graph)
    stream.synchronize()


def test_a_closed_graph_is_refused(device: Device, stream: Stream) -> None:
    with stream.capture() as graph:
        stream.call(lambda: None)
    graph.close()
    graph.close()
    with pytest.raises(DeviceError, match="closed"):
        stream.replay(graph)


def test_everything_else_goes_on_while_a_stream_captures(device: Device, stream: Stream) -> None:
    x, other = empty(device, (4,), np.int64), device.stream("copy")
    with stream.capture() as graph:
        affine(stream, x, 0, 1)
        y = empty(device, (4,), np.int64)
        other.fill(y, 0)
        other.synchronize()
        assert (download(device, other, y) == 0).all()
    stream.replay(graph)
    assert (download(device, stream, x) == 1).all()


@pytest.mark.parametrize("line", range(40))
def test_an_interrupt_at_any_line_leaves_the_stream_usable(
    device: Device, stream: Stream, line: int
) -> None:
    """A line of the stream's own modules, or the way into a function there."""
    seen = 0

    def trace(frame: FrameType, event: str, _arg: object) -> object:
        nonlocal seen
        if not frame.f_code.co_filename.endswith("_stream.py"):
            return None
        is_finalizer = "__del__" in (
            frame.f_code.co_name,
            frame.f_back and frame.f_back.f_code.co_name,
        )
        if event in ("call", "line") and not is_finalizer:  # Python drops what is raised there
            if seen == line:
                sys.settrace(None)
                raise KeyboardInterrupt
            seen += 1
        return trace

    def capture() -> None:
        with stream.capture():
            stream.call(lambda: None)

    x, traced = empty(device, (1,), np.int64), sys.gettrace()
    upload(device, stream, x, np.array([1]))
    sys.settrace(trace)  # type: ignore[arg-type]  # typeshed wants a trace function from itself
    with contextlib.suppress(KeyboardInterrupt):
        capture()
    sys.settrace(traced)
    affine(stream, x, 1, 1)
    assert download(device, stream, x) == 2
    with stream.capture() as graph:
        affine(stream, x, 1, 1)
    stream.replay(graph)
    assert download(device, stream, x) == 3
