"""Streams and events: order, waits, failures and interrupts, on every device."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from types import FrameType

import numpy as np
import pytest

from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.device.transfer import download, upload
from strata_cli.errors import DeviceError, ShapeError
from tests.device.gates import PATIENCE_S, Gate, finish, finish_stream, held, standing_at
from tests.device.kernels import ADD, AFFINE, SCALED_ADD, add, affine, one_thread_each


def ones(device: Device, stream: Stream, size: int = 1) -> Tensor:
    x = empty(device, (size,), np.int64)
    upload(device, stream, x, np.ones(size, np.int64))
    return x


def test_work_runs_in_the_order_it_was_enqueued(device: Device, stream: Stream) -> None:
    x = ones(device, stream)
    expected = np.ones(1, np.int64)
    for term in range(100):
        affine(stream, x, 3, term)
        expected = expected * 3 + term
    assert download(device, stream, x) == expected


def test_enqueueing_does_not_wait_for_the_work(device: Device, stream: Stream) -> None:
    x = ones(device, stream)
    done = device.event()
    with held(device, stream) as gate:
        affine(stream, x, 2, 0)
        stream.record(done)
        assert not done.query()
        gate.set()
        finish(done)
    assert done.query()
    assert download(device, stream, x) == 2


def test_streams_do_not_wait_for_each_other(device: Device, stream: Stream) -> None:
    x = ones(device, stream)
    other = device.stream("copy")
    gate_is_open = device.event()
    with held(device, other):
        other.record(gate_is_open)
        affine(stream, x, 2, 5)
        finish_stream(device, stream)
        assert not gate_is_open.query()
    assert download(device, stream, x) == 7


def test_a_stream_waits_for_the_event_of_another(device: Device, stream: Stream) -> None:
    x = ones(device, stream)
    other, written, used = device.stream("copy"), device.event(), device.event()
    with held(device, stream) as gate:
        affine(stream, x, 10, 0)
        stream.record(written)
        other.wait(written)
        affine(other, x, 1, 5)
        other.record(used)
        assert not used.query()
        gate.set()
        finish(used)
    assert download(device, other, x) == 15


def test_a_wait_is_for_the_latest_record_at_the_time_of_the_call(
    device: Device, stream: Stream
) -> None:
    """The wait runs after the second record was made, and before that is reached."""
    first, other = device.stream("first"), device.stream("other")
    opened, event, gate = device.event(), device.event(), Gate(device, 1)
    stream.record(event)
    with held(device, first):
        first.record(opened)
        other.wait(opened)
        other.wait(event)
        stream.wait(opened)
        gate.stop(0, stream)
        stream.record(event)
    finish_stream(device, other)
    assert not event.query()
    gate.set()
    finish(event)


def test_an_event_may_be_recorded_again(device: Device, stream: Stream) -> None:
    x, event = ones(device, stream), device.event()
    for _ in range(50):
        affine(stream, x, 1, 1)
        stream.record(event)
        event.synchronize()
    assert download(device, stream, x) == 51


def test_an_event_never_recorded_counts_as_done(device: Device, stream: Stream) -> None:
    event = device.event()
    assert event.query()
    event.synchronize()
    stream.wait(event)
    stream.synchronize()


def test_elapsed_time_is_that_between_two_records(device: Device, stream: Stream) -> None:
    start, end = device.event(timing=True), device.event(timing=True)
    stream.record(start)
    stream.call(standing_at(threading.Event(), seconds=0.02))
    stream.record(end)
    end.synchronize()
    assert 19 < end.elapsed_ms(start) < 5_000
    assert end.elapsed_ms(start) == -start.elapsed_ms(end)


def test_elapsed_time_needs_timing_and_completion(device: Device, stream: Stream) -> None:
    start, end, untimed = device.event(timing=True), device.event(timing=True), device.event()
    stream.record(start)
    stream.record(untimed)
    stream.synchronize()
    with pytest.raises(DeviceError, match="timing"):
        untimed.elapsed_ms(start)
    with pytest.raises(DeviceError):
        end.elapsed_ms(start)
    with held(device, stream):
        stream.record(end)
        with pytest.raises(DeviceError):
            end.elapsed_ms(start)


def fail() -> None:
    raise ValueError("planted")


def test_a_failure_is_raised_at_synchronize_with_its_cause(device: Device, stream: Stream) -> None:
    stream.call(fail)
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"compute.*planted") as caught:
            stream.synchronize()
        assert isinstance(caught.value.__cause__, ValueError)


def test_work_behind_a_failure_is_dropped(device: Device, stream: Stream) -> None:
    ran = []
    with held(device, stream):
        stream.call(fail)
        stream.call(lambda: ran.append(1))
    with pytest.raises(DeviceError):
        stream.synchronize()
    assert not ran


def test_an_event_behind_a_failure_raises(device: Device, stream: Stream) -> None:
    event = device.event()
    stream.call(fail)
    stream.record(event)
    with pytest.raises(DeviceError, match="planted"):
        event.synchronize()
    with pytest.raises(DeviceError, match="planted"):
        event.query()


def test_a_failure_reaches_streams_that_waited_for_it(device: Device, stream: Stream) -> None:
    other, event, ran = device.stream("copy"), device.event(), []
    with held(device, stream):
        stream.call(fail)
        stream.record(event)
        other.wait(event)
        other.call(lambda: ran.append(1))
    with pytest.raises(DeviceError, match="planted"):
        other.synchronize()
    assert not ran


def test_a_failure_leaves_other_streams_usable(device: Device, stream: Stream) -> None:
    stream.call(fail)
    with pytest.raises(DeviceError):
        stream.synchronize()
    other = device.stream("copy")
    x = ones(device, other)
    affine(other, x, 4, 0)
    assert download(device, other, x) == 4


class Interrupted(BaseException):
    pass


def test_a_signal_interrupts_synchronize(device: Device, stream: Stream) -> None:
    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted

    event = device.event()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with held(device, stream):
            stream.record(event)
            for wait in (stream.synchronize, event.synchronize, device.synchronize):
                signal.setitimer(signal.ITIMER_REAL, 0.02)
                with pytest.raises(Interrupted):
                    wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    stream.synchronize()
    assert event.query()


def test_waiting_sleeps(device: Device, stream: Stream) -> None:
    stream.call(standing_at(threading.Event(), seconds=0.3))
    used = time.process_time()
    stream.synchronize()
    assert time.process_time() - used < 0.1


def test_device_synchronize_waits_for_every_stream(device: Device, stream: Stream) -> None:
    done: list[str] = []
    for name in ("a", "b", "c"):
        device.stream(name).call(partial(done.append, name))
    device.synchronize()
    assert sorted(done) == ["a", "b", "c"]


def test_kernels_match_their_reference_at_odd_sizes(device: Device, stream: Stream) -> None:
    rng = np.random.default_rng(7)
    for size in (1, 2, 3, 127, 128, 129, 1_000, 4_097):
        x, y = rng.standard_normal((2, size), dtype=np.float32)
        x_dev, y_dev, out = (empty(device, (size,)) for _ in range(3))
        upload(device, stream, x_dev, x)
        upload(device, stream, y_dev, y)
        add(stream, x_dev, y_dev, out)
        np.testing.assert_array_equal(download(device, stream, out), x + y)


def test_float_arguments_are_float32(device: Device, stream: Stream) -> None:
    x = np.linspace(-3, 3, 1_001, dtype=np.float32)
    x_dev, out = empty(device, x.shape), empty(device, x.shape)
    upload(device, stream, x_dev, x)
    stream.launch(SCALED_ADD, one_thread_each(x.size), 0.1, x_dev, x_dev, out, x.size)
    expected = SCALED_ADD.reference(0.1, x, x)
    np.testing.assert_array_equal(download(device, stream, out), expected)


def test_threads_with_streams_of_their_own_keep_the_order_of_events(device: Device) -> None:
    """A ring of threads: each waits for the one before it, so the result has one possible value."""
    num_threads, rounds = 6, 40
    streams = [device.stream(f"s{index}") for index in range(num_threads)]
    turns = [threading.Semaphore(0) for _ in range(num_threads)]
    events = [device.event() for _ in range(num_threads)]
    x = ones(device, streams[0], size=3)
    errors: list[BaseException] = []

    def enqueue(index: int) -> None:
        try:
            for turn in range(rounds):
                assert turns[index].acquire(timeout=PATIENCE_S)
                streams[index].wait(events[index - 1])
                affine(streams[index], x, 3, turn * num_threads + index)
                streams[index].record(events[index])
                turns[(index + 1) % num_threads].release()
        except BaseException as error:  # noqa: BLE001  reported by the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=enqueue, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not errors
    device.synchronize()

    expected = np.ones(3, np.int64)
    for term in range(rounds * num_threads):
        expected = expected * 3 + term
    np.testing.assert_array_equal(download(device, streams[0], x), expected)


def test_fill_outside_a_byte_is_refused(device: Device, stream: Stream) -> None:
    with pytest.raises(ShapeError, match="256"):
        stream.fill(empty(device, (4,)), 256)


def test_kernels_can_be_prepared_ahead(device: Device, stream: Stream) -> None:
    device.prepare([ADD, SCALED_ADD, AFFINE])
    device.prepare([AFFINE])
    x = ones(device, stream)
    affine(stream, x, 5, 1)
    assert download(device, stream, x) == 6
