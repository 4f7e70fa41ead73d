"""Experts of short chunks that the host's processor computes: where, how many, and when none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine.engine import Engine
from strata_cli.engine.experts.cpu_share import ShareGate
from strata_cli.engine.experts.host_pool import HostPool, HostTask
from strata_cli.engine.experts.streaming import ChunkStream
from strata_cli.engine.prefill.sharing import HostShare
from strata_cli.engine.trace import Event, Trace
from strata_cli.errors import Cancelled, DeviceError
from tests.engine.readings import bits, open_engine
from tests.engine.streams import (
    NUM_EXPERTS,
    NUM_LAYERS,
    TURNS,
    Talk,
    WatchedCancellation,
    Way,
    assert_same_talk,
    break_off,
    failing,
    streamer_of,
    talk,
)

SHORT: dict[str, Any] = {"chunk": 40, "stream_min": 1000}
WAYS = {
    "half": Way(**SHORT, cpu=0.5),
    "half, inline": Way(**SHORT, cpu=0.5, stream={"has_thread": False}),
    "all": Way(**SHORT, cpu=1.0, cache=0),
    "long and short chunks": Way(chunk=50, stream_min=40, cpu=0.5),
    "as it pays": Way(**SHORT, cpu=None),
    "half pinned": Way(**SHORT, cpu=0.8, pinned=NUM_EXPERTS // 2, is_likely=True),
    "small ring for all": Way(chunk=64, ring=8, cpu=0.3),
}


@pytest.fixture(scope="module")
def truth(separate: Path) -> Talk:
    with open_engine(separate, device="host") as engine:
        return talk(engine)


@pytest.fixture(scope="module")
def engine(separate: Path) -> Iterator[Engine]:
    with WAYS["half"].open(separate, "host") as engine:
        yield engine


def share_of(engine: Engine) -> HostShare:
    share = streamer_of(engine)._share
    assert share is not None
    return share


@pytest.mark.parametrize("way", WAYS)
def test_the_host_computes_the_same_bits_itself(separate: Path, truth: Talk, way: str) -> None:
    with WAYS[way].open(separate, "host") as engine:
        assert_same_talk(talk(engine), truth)
        assert not engine._deviates


def test_the_parts_of_fused_blobs_of_uneven_width_are_found(fused: Path) -> None:
    with open_engine(fused, device="host") as plain, plain.sequence() as sequence:
        expected = sequence.prefill(TURNS[0][:40])
    with WAYS["all"].open(fused, "host") as engine, engine.sequence() as sequence:
        assert np.array_equal(bits(sequence.prefill(TURNS[0][:40])), bits(expected))


def test_the_processor_takes_its_share_and_the_link_the_rest(separate: Path, truth: Talk) -> None:
    events: list[Event] = []
    with WAYS["half"].open(separate, "host", Trace(events.append)) as engine:
        with engine.sequence() as sequence:
            logits = sequence.prefill(TURNS[0], logits="all")
        counts = streamer_of(engine).counts
    assert np.array_equal(bits(logits), bits(truth.logits[: len(logits)]))
    shared = [event for event in events if event["ev"] == "layer.cpu"]
    routed = [event for event in events if event["ev"] == "layer.routed"]
    assert len(routed) == NUM_LAYERS * len(counts)
    computed = sum(event["experts"] for event in shared)
    streamed = sum(event["routed"] - event["routed_resident"] for event in routed)
    assert computed + sum(c.copied for c in counts) == streamed
    assert 0.4 < computed / streamed < 0.6
    assert all(event["pairs"] >= event["experts"] for event in shared)
    assert all(event["dur_us"] > 0 for event in shared)


def test_no_group_of_the_link_has_experts_of_the_processor(
    separate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, groups = ChunkStream.publish, ChunkStream.groups
    elsewhere: set[int] = set()
    seen: set[int] = set()

    def published(stream: ChunkStream, layer: int, start: Any, ranks: Any = None) -> None:
        elsewhere.clear()
        elsewhere.update([] if ranks is None else ranks.tolist())
        publish(stream, layer, start, ranks)

    def grouped(stream: ChunkStream, layer: int) -> Iterator[range]:
        for group in groups(stream, layer):
            seen.update(elsewhere)
            assert not elsewhere & set(group)
            yield group

    monkeypatch.setattr(ChunkStream, "publish", published)
    monkeypatch.setattr(ChunkStream, "groups", grouped)
    with WAYS["half"].open(separate, "host") as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0][:120])
    assert seen


def test_canonical_reads_are_not_shared_and_teach_nothing(separate: Path, truth: Talk) -> None:
    events: list[Event] = []
    with WAYS["as it pays"].open(separate, "host", Trace(events.append)) as engine:
        gate = share_of(engine).gate
        before = vars(gate).copy()
        with engine.canonical(), engine.sequence() as sequence:
            sequence.prefill(TURNS[0])
        assert vars(gate) == before
        assert not any(event["ev"] == "layer.cpu" for event in events)
        with engine.sequence() as sequence:
            sequence.prefill(TURNS[0])
        assert any(event["ev"] == "layer.cpu" for event in events)


def test_a_gate_learns_from_what_layers_took(
    separate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[tuple[int, int]] = []
    add = ShareGate.add

    def noted(gate: ShareGate, times: object) -> None:
        added.append((times.streamed, times.shared))  # type: ignore[attr-defined]
        assert times.all_us >= times.link_us > 0  # type: ignore[attr-defined]
        add(gate, times)  # type: ignore[arg-type]

    monkeypatch.setattr(ShareGate, "add", noted)
    with WAYS["as it pays"].open(separate, "host") as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0])
        num_chunks = len(streamer_of(engine).counts)
        gate = share_of(engine).gate
    assert len(added) == (NUM_LAYERS - 1) * num_chunks
    assert len(gate._ratios) == 3
    assert any(shared for _, shared in added)
    assert any(not shared for _, shared in added)


def test_a_gpu_that_shares_deviates_and_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels round otherwise than the host's: a read that was shared is not exact."""
    with engine.sequence() as sequence:
        monkeypatch.setattr(type(engine._device), "has_own_memory", True)
        sequence.prefill(TURNS[0])
        seen = [sequence.is_exact]
        sequence.reset()
        with engine.canonical():
            sequence.prefill(TURNS[0])
        assert [*seen, sequence.is_exact] == [False, True]


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled])
def test_the_wait_for_the_processor_ends(
    engine: Engine, truth: Talk, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held up inside a layer; the next prompt waits for what it has begun."""
    cancellation = WatchedCancellation()
    pool = share_of(engine)._pool
    is_held, may_go = threading.Event(), threading.Event()
    start, is_first = HostPool.start, True

    def held_up(self: HostPool, task: HostTask) -> None:
        nonlocal is_first
        if is_first:
            self._stream.call(lambda: _hold(is_held, may_go))
        is_first = False
        start(self, task)

    def end() -> None:
        is_held.wait(20)
        if error is Cancelled:
            cancellation.cancel()
        threading.Timer(0.1, may_go.set).start()

    def interrupted(_self: object, event: object, _what: str) -> None:
        if event is pool.done:
            raise KeyboardInterrupt
        event.synchronize()  # type: ignore[attr-defined]

    streamer_of(engine).settle()
    thread = threading.Thread(target=end)
    thread.start()
    with monkeypatch.context() as patch, engine.sequence() as sequence:
        patch.setattr(HostPool, "start", held_up)
        if error is KeyboardInterrupt:
            patch.setattr(
                "strata_cli.engine.experts.streaming.ChunkStream.await_event", interrupted
            )
        break_off(engine, sequence, error, cancellation=cancellation)
    thread.join()
    assert_same_talk(talk(engine), truth)


def test_a_processor_that_fails_ends_the_prompt(separate: Path, truth: Talk) -> None:
    with WAYS["half"].open(separate, "host") as engine, engine.sequence() as sequence:
        pool = share_of(engine)._pool
        broken = failing(pool, ("start",), 2, DeviceError("the processor is gone"))
        with broken:
            break_off(engine, sequence, DeviceError, "the processor is gone")
        assert_same_talk(talk(engine), truth)


def test_no_threads_are_left(separate: Path) -> None:
    before = set(threading.enumerate())
    with WAYS["half"].open(separate, "host") as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0][:30])
    assert set(threading.enumerate()) <= before


def _hold(is_held: threading.Event, may_go: threading.Event) -> None:
    is_held.set()
    may_go.wait(20)
