"""The stager: order, reuse of buffers, lists that end early, threads that fail."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Event
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.experts import stager as stager_module
from strata_cli.engine.experts.stager import Stager
from strata_cli.errors import DeviceError, StallError, StateError
from tests.device.interrupting import interrupted_at
from tests.engine.streams import failing

SLOT_BYTES = 64
PATIENCE_S = 10.0


class Source:
    """Blobs whose bytes say whose they are; may be held up, and may fail."""

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.fails_at: tuple[int, int] | None = None
        self.is_open = threading.Event()
        self.is_open.set()

    def blob_bytes(self, layer: int) -> int:
        return SLOT_BYTES - layer

    def read(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        self.reads.append((layer, expert))
        assert self.is_open.wait(PATIENCE_S)
        if (layer, expert) == self.fails_at:
            raise DeviceError(f"cannot read expert {expert} of layer {layer}")
        assert out.size == self.blob_bytes(layer)
        out[:] = (17 * layer + expert) % 256


@dataclass
class Jobs:
    """A list that may grow; every third copy needs no staging."""

    layers: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    jobs: list[int] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def num_jobs(self) -> int:
        return sum(job >= 0 for job in self.jobs)

    def grow(self, layer: int, num_experts: int) -> None:
        for expert in range(num_experts):
            self.layers.append(layer)
            self.experts.append(expert)
            self.jobs.append(-1 if self.count % 3 == 0 else self.num_jobs)

    def of_job(self, job: int) -> tuple[int, int]:
        k = self.jobs.index(job)
        return self.layers[k], self.experts[k]


def jobs_of(*num_experts: int) -> Jobs:
    jobs = Jobs()
    for layer, count in enumerate(num_experts):
        jobs.grow(layer, count)
    return jobs


class GateEvent:
    """An event that is reached when the test says so."""

    def __init__(self, *, is_reached: bool = True) -> None:
        self.is_reached = is_reached
        self.error: DeviceError | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_reached

    def synchronize(self) -> None:
        wait_for(self.query)

    def elapsed_ms(self, start: Event) -> float:
        raise AssertionError(start)

    def close(self) -> None:
        pass


def wait_for(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, "this never became true"
        time.sleep(1e-4)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def host() -> Iterator[Device]:
    with HostDevice(1) as opened:
        yield opened


def check_blob(stager: Stager, jobs: Jobs, job: int) -> None:
    wait_for(lambda: stager.is_ready(job))
    layer, expert = jobs.of_job(job)
    blob = stager.blob(job)
    assert blob.shape == (SLOT_BYTES - layer,)
    assert (blob.numpy() == (17 * layer + expert) % 256).all()


def take_all(stager: Stager, jobs: Jobs) -> None:
    with stager.staging(jobs):
        for job in range(jobs.num_jobs):
            check_blob(stager, jobs, job)
            stager.sent(job, GateEvent())


@pytest.mark.parametrize(("num_buffers", "num_threads"), [(1, 1), (2, 3), (16, 4)])
def test_blobs_come_in_order_through_few_buffers(
    host: Device, source: Source, num_buffers: int, num_threads: int
) -> None:
    jobs = jobs_of(7, 1, 12)
    with Stager(host, source, SLOT_BYTES, num_buffers, num_threads) as stager:
        for _ in range(3):
            take_all(stager, jobs)
    assert len(source.reads) == 3 * jobs.num_jobs


@settings(max_examples=40)
@given(
    layers=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    num_buffers=st.integers(1, 6),
    num_threads=st.integers(1, 4),
    batch=st.integers(1, 6),
)
def test_every_job_of_any_list_is_staged_once(
    layers: list[int], num_buffers: int, num_threads: int, batch: int
) -> None:
    jobs, source = jobs_of(*layers), Source()
    stager = Stager(HostDevice(1), source, SLOT_BYTES, num_buffers, num_threads)
    with stager, stager.staging(jobs):
        for first in range(0, jobs.num_jobs, min(batch, num_buffers)):
            together = range(first, min(first + min(batch, num_buffers), jobs.num_jobs))
            for job in together:
                check_blob(stager, jobs, job)
            for job in together:
                stager.sent(job, GateEvent())
    expected = [jobs.of_job(job) for job in range(jobs.num_jobs)]
    assert sorted(source.reads) == sorted(expected)


def test_a_buffer_is_not_written_before_its_last_copy_is_done(host: Device, source: Source) -> None:
    jobs, events = jobs_of(12), [GateEvent(is_reached=False) for _ in range(2)]
    with Stager(host, source, SLOT_BYTES, 2, 3) as stager, stager.staging(jobs):
        for job, event in enumerate(events):
            check_blob(stager, jobs, job)
            stager.sent(job, event)
        time.sleep(0.01)
        assert not stager.is_ready(2)
        assert len(source.reads) == 2
        events[0].is_reached = True
        check_blob(stager, jobs, 2)
        time.sleep(0.01)
        assert not stager.is_ready(3)
        events[1].is_reached = True
        check_blob(stager, jobs, 3)


def test_no_more_is_read_than_there_are_buffers_for(host: Device, source: Source) -> None:
    with Stager(host, source, SLOT_BYTES, 3, 4) as stager, stager.staging(jobs_of(20)):
        wait_for(lambda: stager.is_ready(2))
        time.sleep(0.01)
        assert len(source.reads) == 3


def test_a_list_may_grow(host: Device, source: Source) -> None:
    jobs = jobs_of(4)
    with Stager(host, source, SLOT_BYTES, 4, 2) as stager, stager.staging(jobs):
        done = 0
        for layer in range(1, 4):
            while done < jobs.num_jobs:
                check_blob(stager, jobs, done)
                stager.sent(done, GateEvent())
                done += 1
            assert not stager.is_ready(done)
            jobs.grow(layer, 5)
        check_blob(stager, jobs, done)


def test_a_late_thread_of_an_ended_list_cannot_touch_the_next(host: Device, source: Source) -> None:
    first, second = jobs_of(9), jobs_of(0, 0, 9)
    source.is_open.clear()
    with Stager(host, source, SLOT_BYTES, 4, 2) as stager:
        stager.begin(first)
        wait_for(lambda: len(source.reads) == 2)
        ender = threading.Thread(target=stager.end)
        ender.start()
        time.sleep(0.01)
        assert ender.is_alive(), "a thread still reads into a buffer"
        source.is_open.set()
        ender.join(PATIENCE_S)
        assert len(source.reads) == 2, "an ended list gave out another job"
        take_all(stager, second)


def test_an_end_that_was_interrupted_is_made_up_for(
    host: Device, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next list begins behind the reads and the copies of the last one all the same."""
    first, event = jobs_of(9), GateEvent(is_reached=False)
    with Stager(host, source, SLOT_BYTES, 1, 1) as stager:
        stager.begin(first)
        check_blob(stager, first, 0)
        stager.sent(0, event)
        with monkeypatch.context() as patch:
            patch.setattr(stager, "_settle", lambda: None)
            stager.end()
        beginner = threading.Thread(target=stager.begin, args=[jobs_of(0, 0, 9)])
        beginner.start()
        time.sleep(0.01)
        assert beginner.is_alive()
        event.is_reached = True
        beginner.join(PATIENCE_S)
        check_blob(stager, jobs_of(0, 0, 9), 0)


@pytest.mark.parametrize("interrupts", [{"_list_jobs": 0}, {"end": 1}, {"_list_jobs": 0, "end": 1}])
def test_however_a_list_was_interrupted_the_next_one_begins(
    host: Device, source: Source, interrupts: dict[str, int]
) -> None:
    """While it begins, while it ends, or at both."""
    with Stager(host, source, SLOT_BYTES, 2, 2) as stager:
        with ExitStack() as interrupted:
            for name, after in interrupts.items():
                interrupted.enter_context(failing(stager, (name,), after, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt), stager.staging(jobs_of(9)):
                pass
        take_all(stager, jobs_of(0, 0, 9))


def test_a_list_that_ends_late_does_not_end_the_next_one(host: Device, source: Source) -> None:
    """Its end was interrupted twice, and left to the garbage collector."""
    with Stager(host, source, SLOT_BYTES, 2, 2) as stager:
        late: Any = stager.staging(jobs_of(9))
        late.__enter__()
        second = jobs_of(0, 0, 9)
        with stager.staging(second):
            late.gen.close()
            check_blob(stager, second, 0)


def test_ctrl_c_leaves_no_lock_taken(host: Device, source: Source) -> None:
    files = (threading.__file__, stager_module.__file__)
    jobs = jobs_of(9)
    with Stager(host, source, SLOT_BYTES, 1, 2) as stager:
        for place in itertools.count():
            try:
                with stager.staging(jobs):
                    check_blob(stager, jobs, 0)
                    with interrupted_at(place, files):
                        stager.sent(0, GateEvent())
                        stager.end()
            except KeyboardInterrupt:
                take_all(stager, jobs)
            else:
                break
    assert place > 0


def test_ending_waits_for_the_copies_and_not_for_those_that_wait_for_them(
    host: Device, source: Source
) -> None:
    event = GateEvent(is_reached=False)
    jobs = jobs_of(9)
    with Stager(host, source, SLOT_BYTES, 1, 1) as stager:
        stager.begin(jobs)
        check_blob(stager, jobs, 0)
        stager.sent(0, event)
        wait_for(lambda: bool(stager._reading))
        ender = threading.Thread(target=stager.end)
        ender.start()
        wait_for(lambda: not stager._reading)
        assert ender.is_alive()
        event.is_reached = True
        ender.join(PATIENCE_S)
        assert not ender.is_alive()
        assert len(source.reads) == 1


def test_what_reading_failed_with_is_raised_to_whoever_asks(host: Device, source: Source) -> None:
    jobs = jobs_of(9)
    source.fails_at = jobs.of_job(2)
    with Stager(host, source, SLOT_BYTES, 4, 2) as stager:
        with pytest.raises(DeviceError, match="cannot read expert"):
            take_all(stager, jobs)
        source.fails_at = None
        with stager.staging(jobs):
            check_blob(stager, jobs, 2)


def test_a_copy_that_failed_fails_the_jobs_behind_it(host: Device, source: Source) -> None:
    jobs, event = jobs_of(9), GateEvent()
    event.error = DeviceError("the copy failed")
    with Stager(host, source, SLOT_BYTES, 1, 1) as stager, stager.staging(jobs):
        check_blob(stager, jobs, 0)
        stager.sent(0, event)
        with pytest.raises(DeviceError, match="the copy failed"):
            wait_for(lambda: stager.is_ready(1))
        with pytest.raises(DeviceError, match="the copy failed"):
            stager.blob(1)


@pytest.mark.parametrize("error", [SystemExit(3), MemoryError()])
@pytest.mark.parametrize("says_so", [True, False])
def test_a_thread_that_dies_fails_its_list_and_is_replaced(
    host: Device,
    source: Source,
    error: BaseException,
    says_so: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(*_args: object) -> None:
        raise error

    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    with Stager(host, source, SLOT_BYTES, 4, 2) as stager:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(stager, "_stage", die)
                if not says_so:
                    patch.setattr(stager_module, "_as_told", die)
                with (
                    pytest.raises(DeviceError, match="the file"),
                    stager.staging(jobs_of(9)),
                ):
                    wait_for(lambda: stager.is_ready(0))
            take_all(stager, jobs_of(9))
            assert len({thread.name for thread in stager._threads}) == 2


def test_a_dead_thread_that_cannot_be_replaced_is_an_error(
    host: Device, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Stager(host, source, SLOT_BYTES, 4, 2) as stager:
        with monkeypatch.context() as patch:
            patch.setattr(stager, "_stage", lambda _claim: 1 / 0)
            with pytest.raises(DeviceError, match="ZeroDivisionError"), stager.staging(jobs_of(9)):
                wait_for(lambda: stager.is_ready(0))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", _refuse)
            with pytest.raises(DeviceError, match="can't start new thread"):
                stager.begin(jobs_of(9))
        take_all(stager, jobs_of(9))


def _refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_read_that_hangs_is_an_error_until_it_ends(
    host: Device, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager_module, "SETTLE_S", 0.0)
    jobs = jobs_of(9)
    with Stager(host, source, SLOT_BYTES, 4, 1) as stager:
        source.is_open.clear()

        def ask_for_the_end() -> None:
            wait_for(lambda: bool(source.reads))
            raise StateError("the end is asked for")

        with pytest.raises(StateError, match="asked for"), stager.staging(jobs):
            ask_for_the_end()
        with pytest.raises(StallError, match="1 reads of experts"):
            stager.begin(jobs)
        source.is_open.set()
        wait_for(lambda: not stager._reading)
        take_all(stager, jobs)


def test_one_list_at_a_time(host: Device, source: Source) -> None:
    stager = Stager(host, source, SLOT_BYTES)
    with stager.staging(jobs_of(3)), pytest.raises(StateError, match="another list"):
        stager.begin(jobs_of(3))
    stager.close()
    stager.close()
    with pytest.raises(StateError, match="closed"):
        stager.begin(jobs_of(3))


def test_a_blob_that_is_not_there_is_refused(host: Device, source: Source) -> None:
    stager = Stager(host, source, SLOT_BYTES, 2, 1)
    with stager, stager.staging(jobs_of(9)), pytest.raises(StateError, match="job 5"):
        stager.blob(5)


def test_closing_ends_the_threads_whatever_they_wait_for(host: Device, source: Source) -> None:
    before = threading.active_count()
    jobs = jobs_of(9)
    stager = Stager(host, source, SLOT_BYTES, 1, 3)
    stager.begin(jobs)
    check_blob(stager, jobs, 0)
    stager.sent(0, GateEvent())
    stager.close()
    assert threading.active_count() == before
