"""What only the host device promises: locked pages, split launches, sleeping threads."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine import device as device_room
from strata_cli.engine.device import host_event, host_memory, open_device
from strata_cli.engine.device.base import Kernel, Launch, empty
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.host_event import HostEvent
from strata_cli.engine.device.host_stream import HostStream
from strata_cli.engine.device.host_workers import WorkerPool
from strata_cli.errors import ConfigError, DeviceError, OutOfMemory
from tests.device.gates import PATIENCE_S, standing_at


@pytest.fixture
def host() -> Iterator[HostDevice]:
    with HostDevice(4) as device:
        yield device


def locked_kib() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmLck:\s+(\d+) kB", status)
    assert found
    return int(found[1])


def test_pinned_memory_is_page_locked(host: HostDevice) -> None:
    before = locked_kib()
    buffer = host.allocate_pinned(1 << 20)
    assert locked_kib() - before >= 1024
    buffer.close()
    assert locked_kib() == before


def test_memory_that_cannot_be_locked_is_said_once(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refusing = SimpleNamespace(mlock=lambda *_: -1)
    monkeypatch.setattr(host_memory, "_libc", refusing)
    monkeypatch.setattr(host_memory._Warned, "unlocked", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            data = host.allocate_pinned(4_096).host_bytes
            assert data is not None
            data[:] = 1
    assert len(caplog.records) == 1
    for part in ("RLIMIT_MEMLOCK", "4096 bytes", "ulimit -l"):
        assert part in caplog.text


@given(items=st.integers(1, 300), chunks=st.integers(1, 40), threads=st.integers(1, 5))
def test_every_item_is_computed_once(items: int, chunks: int, threads: int) -> None:
    counts = np.zeros(items, np.int64)

    def body(begin: int, end: int, /, *args: object) -> None:
        counts[begin:end] += 1

    pool = WorkerPool(threads)
    try:
        pool.run(body, items, min(chunks, items), ())
    finally:
        pool.close()
    assert (counts == 1).all()


def test_chunks_run_on_several_threads_at_once(host: HostDevice) -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE_S)

    def body(begin: int, end: int, /, *args: object) -> None:
        if begin == 0 or end == 2:
            meeting.wait()

    stream = host.stream("compute")
    stream.launch(Kernel("meet", body, body), Launch(items=2))
    stream.synchronize()


def test_small_launches_stay_on_the_thread_of_the_stream(host: HostDevice) -> None:
    seen: list[tuple[int, int, str]] = []

    def body(begin: int, end: int, /, *args: object) -> None:
        seen.append((begin, end, threading.current_thread().name))

    stream = host.stream("compute")
    stream.launch(Kernel("small", body, body), Launch(items=100, grain=51))
    stream.synchronize()
    assert seen == [(0, 100, "strata-compute")]


def test_a_failed_chunk_fails_the_launch(host: HostDevice) -> None:
    def body(begin: int, end: int, /, *args: object) -> None:
        if begin <= 60 < end:
            raise FloatingPointError("item 60")

    stream = host.stream("compute")
    stream.launch(Kernel("broken", body, body), Launch(items=100))
    with pytest.raises(DeviceError, match=r"compute.*broken.*item 60") as caught:
        stream.synchronize()
    assert isinstance(caught.value.__cause__, FloatingPointError)


def test_a_failure_inside_a_graph_names_the_kernel(host: HostDevice) -> None:
    def body(begin: int, end: int, /, *args: object) -> None:
        raise ValueError("planted")

    stream = host.stream("compute")
    with stream.capture() as graph:
        stream.call(lambda: None)
        stream.launch(Kernel("culprit", body, body), Launch(items=1))
    stream.replay(graph)
    with pytest.raises(DeviceError, match="culprit"):
        stream.synchronize()


def test_an_event_before_a_failure_is_good(host: HostDevice) -> None:
    def fail() -> None:
        raise ValueError("planted")

    stream, event = host.stream("compute"), host.event()
    stream.record(event)
    stream.call(fail)
    with pytest.raises(DeviceError, match="planted"):
        stream.synchronize()
    event.synchronize()
    assert event.query()


def test_closing_drops_what_has_not_begun(host: HostDevice) -> None:
    stream, other, event = host.stream("compute"), host.stream("copy"), host.event()
    gate, ran = threading.Event(), []
    stream.call(standing_at(gate))
    stream.call(lambda: ran.append(1))
    stream.record(event)
    other.wait(event)
    stream.stop()
    gate.set()
    stream.close()
    assert not ran
    with pytest.raises(DeviceError, match="closed before"):
        event.synchronize()
    with pytest.raises(DeviceError, match="closed before"):
        other.synchronize()


def test_a_stream_whose_thread_dies_is_an_error_for_all_who_wait(
    host: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_event, "LOOK_S", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    stream, other, event, before = host.stream("a"), host.stream("b"), host.event(), host.event()
    gate = threading.Event()
    stream.record(before)
    stream.call(standing_at(gate))
    stream.call(die)
    stream.record(event)
    other.wait(event)
    monkeypatch.setattr(stream, "_run", lambda operation: operation.run())
    waiters = [threading.Thread(target=waiting(wait)) for wait in (event, stream, other)]
    for waiter in waiters:
        waiter.start()
    gate.set()
    for waiter in waiters:
        waiter.join(PATIENCE_S)
        assert not waiter.is_alive()
    assert before.query()
    for ask in (event.query, event.synchronize, stream.synchronize, host.synchronize):
        with pytest.raises(DeviceError, match="'strata-a' of the host device has ended") as raised:
            ask()
        assert raised.value.hint.startswith("restart")
    with pytest.raises(DeviceError, match="stream 'b' failed in wait"):
        other.synchronize()


def die() -> None:
    raise SystemExit


def waiting(on: HostEvent | HostStream) -> Callable[[], None]:
    def wait() -> None:
        with pytest.raises(DeviceError, match="'strata-a' of the host device has ended"):
            on.synchronize()

    return wait


def test_closing_ends_every_thread() -> None:
    before = set(threading.enumerate())
    device = HostDevice(3)
    for name in ("a", "b"):
        device.stream(name)
    assert len(set(threading.enumerate()) - before) == 4
    device.close()
    assert set(threading.enumerate()) <= before


def test_an_idle_device_uses_no_processor_time(host: HostDevice) -> None:
    gate = threading.Event()
    stream, other, event = host.stream("compute"), host.stream("copy"), host.event()
    stream.call(standing_at(gate))
    stream.record(event)
    other.wait(event)
    used = time.process_time()
    threading.Event().wait(0.2)
    assert time.process_time() - used < 0.05
    gate.set()
    host.synchronize()


def test_a_kernel_sees_scalars_and_shaped_arrays(host: HostDevice) -> None:
    seen: list[object] = []

    def body(begin: int, end: int, /, *args: object) -> None:
        seen.extend(args)

    x = empty(host, (2, 3), np.float32)
    stream = host.stream("compute")
    stream.launch(Kernel("look", body, body), Launch(items=1), x, 5, 0.5)
    stream.synchronize()
    array, *scalars = seen
    assert isinstance(array, np.ndarray)
    assert array.shape == (2, 3)
    assert array.dtype == np.float32
    assert array.flags.c_contiguous
    assert array.ctypes.data == x.address
    assert scalars == [5, 0.5]


@pytest.mark.parametrize("name", ["", "gpu", "cuda", "cuda:", "cuda:x", "HOST", "cuda:0 "])
def test_unknown_device_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(name))):
        open_device(name)


def test_threads_that_the_system_refuses_are_counted_and_those_before_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(DeviceError, match="cannot start 9 threads: the system allowed 3") as caught:
        WorkerPool(9)
    assert "--threads 3" in caught.value.hint
    assert not any(thread.is_alive() for thread in started)


def test_negative_thread_counts_are_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        open_device("host", threads=-1)


@pytest.mark.parametrize(
    ("rule", "addresses", "reason"),
    [
        ("2", resource.RLIM_INFINITY, r"vm.overcommit_memory is 2, and .* GiB of .* promised"),
        ("0", 3 << 30, "ulimit -v allows this process 3.00 GiB"),
        ("1", resource.RLIM_INFINITY, "available: Cannot allocate memory"),
    ],
)
def test_memory_that_is_there_and_is_refused_names_the_limit(
    rule: str, addresses: int, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    (tmp_path / "rule").write_text(rule + "\n")
    monkeypatch.setattr(host_memory, "OVERCOMMIT", tmp_path / "rule")
    monkeypatch.setattr(mmap, "mmap", refuse)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (addresses, addresses))
    with pytest.raises(OutOfMemory, match=r"are refused although .* are available: ") as caught:
        host_memory.anonymous_bytes(1 << 20)
    assert re.search(reason, caught.value.message)
    assert "vm.overcommit_ratio" in caught.value.hint


@pytest.mark.parametrize("gpus", [0, 1])
def test_auto_falls_back_to_the_host_and_says_so_where_a_gpu_lies_idle(
    gpus: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for number in range(gpus):
        (tmp_path / f"{number:04}").mkdir()
    monkeypatch.setattr(device_room, "KERNELS_GPUS", tmp_path)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with caplog.at_level(logging.INFO), open_device("auto", threads=1) as device:
        assert device.name == "host"
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if gpus else logging.INFO)
    assert "cuda-python" in record.message
    assert "strata-cli[cuda]" in record.message
