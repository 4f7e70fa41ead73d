"""What the driver gave is given back, wherever Ctrl-C comes."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from strata_cli.engine.device import (
    cuda,
    cuda_driver,
    cuda_event,
    cuda_memory,
    cuda_pinned,
    cuda_stream,
    holdings,
    shelter,
)
from strata_cli.engine.device.base import empty
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.cuda_stream import CudaStream
from strata_cli.engine.device.holdings import Holdings
from strata_cli.engine.device.shelter import Shelter
from tests.device import fake_driver
from tests.device.fake_driver import FakeDriver, fake_gpu
from tests.device.interrupting import interrupted_at

ROOM = (cuda, cuda_driver, cuda_event, cuda_memory, cuda_pinned, cuda_stream, holdings, shelter)
FILES = {str(module.__file__) for module in (*ROOM, fake_driver)}
PAIRS = {
    "cuEventCreate": "cuEventDestroy",
    "cuGraphInstantiate": "cuGraphExecDestroy",
    "cuStreamEndCapture": "cuGraphDestroy",
}


class Given:
    """A holding that counts how often it is given back."""

    def __init__(self) -> None:
        self.times = 0

    def free(self) -> None:
        self.times += 1


class Owner:
    """Something that can be dropped."""


@pytest.fixture
def sheltered() -> Iterator[Shelter]:
    made = Shelter("strata-test")
    yield made
    made.close()


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver, tmp_path: Path) -> Iterator[CudaDevice]:
    options = CudaOptions(vram_bytes=1 << 20, cache_folder=tmp_path)
    with CudaDevice(fake_gpu(driver), options) as opened:
        yield opened


def close_memory(device: CudaDevice, _stream: CudaStream) -> None:
    with device.allocate(100), device.allocate_pinned(5_000):
        pass


def drop_memory(device: CudaDevice, _stream: CudaStream) -> None:
    kept = [device.allocate(100), device.allocate_pinned(5_000), device.event()]
    kept.clear()
    device.memory()


def close_graph(device: CudaDevice, stream: CudaStream) -> None:
    with empty(device, (4,)).buffer, stream.capture() as graph:
        pass
    graph.close()


def drop_graph(_device: CudaDevice, stream: CudaStream) -> None:
    with stream.capture():
        pass


def lost(device: CudaDevice, driver: FakeDriver) -> list[str]:
    """What nobody gave back, behind what an interrupt did not wait for."""
    device._context.shelter.run(list)
    device.memory()
    names = driver.names()
    found = [taken for taken, given in PAIRS.items() if names.count(taken) != names.count(given)]
    bytes_of = {
        "device memory": driver.allocated,
        "locked pages": driver.registered,
        "budget": device._budget.used_bytes,
    }
    return found + [name for name, left in bytes_of.items() if left]


@pytest.mark.parametrize("work", [close_memory, drop_memory, close_graph, drop_graph])
def test_an_interrupt_anywhere_loses_nothing(
    device: CudaDevice, driver: FakeDriver, work: Callable[[CudaDevice, CudaStream], None]
) -> None:
    """Without the shelter, pages stayed registered, and could not be registered again."""
    stream = device.stream("compute")
    for place in itertools.count():
        is_interrupted = True
        with suppress(KeyboardInterrupt), interrupted_at(place, FILES):
            work(device, stream)
            is_interrupted = False
        if lost(device, driver):
            gc.collect()
        assert not lost(device, driver), place
        if not is_interrupted:
            break
    assert place > 0
    work(device, stream)


def test_a_dropped_owner_gives_back_at_the_next_reap(sheltered: Shelter) -> None:
    held, given, owner = Holdings(sheltered), Given(), Owner()
    held.claim(owner, given)
    held.reap()
    assert given.times == 0
    del owner
    assert given.times == 0
    held.reap()
    held.reap()
    assert given.times == 1
    assert not held._claims


def test_what_was_given_back_is_forgotten(sheltered: Shelter) -> None:
    held, given, owner = Holdings(sheltered), Given(), Owner()
    key = held.claim(owner, given)
    held.give(key)
    held.give(key)
    del owner
    held.reap()
    assert given.times == 1
    assert not held._dropped
    assert not held._claims


def test_work_of_the_main_thread_is_done_by_another(sheltered: Shelter) -> None:
    seen: list[str] = []
    sheltered.run(lambda: seen.append(threading.current_thread().name))
    assert seen == ["strata-test"]


def test_another_thread_does_its_work_itself(sheltered: Shelter) -> None:
    seen: list[bool] = []
    thread = threading.Thread(
        target=lambda: sheltered.run(lambda: seen.append(threading.current_thread() is thread))
    )
    thread.start()
    thread.join()
    assert seen == [True]


def test_a_failure_reaches_who_asked(sheltered: Shelter) -> None:
    def fail() -> None:
        raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        sheltered.run(fail)
    sheltered.run(list)


def test_behind_its_end_work_is_done_by_who_asks(sheltered: Shelter) -> None:
    seen: list[str] = []
    sheltered.close()
    sheltered.run(lambda: seen.append(threading.current_thread().name))
    assert seen == [threading.main_thread().name]


def test_nobody_waits_behind_the_end(sheltered: Shelter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks while the thread ends may be behind its last look."""
    was_closed: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(sheltered._thread, "join", lambda: was_closed.append(sheltered._is_closed))
        sheltered.close()
    assert was_closed == [True]
