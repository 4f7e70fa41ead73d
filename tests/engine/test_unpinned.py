"""Experts that are not in page-locked memory: prompts and steps bring them from the file."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.decode.step import Decoder
from strata_cli.engine.device.host_memory import host_memory
from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.experts import arena as arena_module
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.blobs import BlobReader
from strata_cli.engine.experts.streaming import SMALL_RING_SLOTS
from strata_cli.engine.forward.caching import CacheShape, CacheWishes, plan_cache
from strata_cli.errors import Cancelled, DeviceError, OutOfMemory
from tests.engine.streams import (
    NUM_EXPERTS,
    NUM_LAYERS,
    STEPS,
    TURNS,
    Talk,
    WatchedCancellation,
    Way,
    assert_same_talk,
    break_off,
    failing,
    store_of,
    streamer_of,
    talk,
)

HALF = NUM_EXPERTS // 2


@pytest.fixture(scope="module", params=[True, False], ids=["thread", "inline"])
def engine(request: pytest.FixtureRequest, separate: Path, device_name: str) -> Iterator[Engine]:
    with Way(pinned=HALF, stream={"has_thread": request.param}).open(
        separate, device_name
    ) as engine:
        yield engine


def test_a_step_copies_routed_experts_alone_that_are_not_pinned(
    separate: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    bring = BlobReader.read

    def noted(reader: BlobReader, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        read.append((layer, expert))
        bring(reader, layer, expert, out)

    with Way(cache=0, pinned=HALF).open(separate, device_name) as engine:
        with engine.sequence() as sequence:
            sequence.prefill(TURNS[0][:64])
            streamer_of(engine)._kept = None  # what the prompt's ring still holds
            monkeypatch.setattr(BlobReader, "read", noted)
            sequence.step(STEPS[0])
        (counts,) = streamer_of(engine).counts
        use = streamer_of(engine).use
    assert use is not None
    assert use.sum() == NUM_LAYERS * 3
    routed = {(int(layer), int(expert)) for layer, expert in np.argwhere(use)}
    wanted = {pair for pair in routed if pair[1] >= HALF}
    assert 0 < len(wanted) < len(routed)
    assert sorted(read) == sorted(wanted)
    assert counts.copied == len(wanted)


def test_a_recorded_step_serves_where_all_that_is_not_pinned_is_cached(
    separate: Path, device_name: str, separate_talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    step = Decoder.step

    def noted(decoder: Decoder, states: Any, ids: Any, **how: Any) -> NDArray[np.float32]:
        steps.extend(ids)
        return step(decoder, states, ids, **how)

    monkeypatch.setattr(Decoder, "step", noted)
    for cache, expected in ((NUM_EXPERTS * NUM_LAYERS, 2 * len(STEPS)), (0, 0)):
        steps.clear()
        with Way(cache=cache, least=0, pinned=0).open(separate, device_name) as engine:
            assert_same_talk(talk(engine), separate_talk)
        assert len(steps) == expected


def test_experts_that_are_in_the_cache_alone_stay_there(
    separate: Path, device_name: str, separate_talk: Talk
) -> None:
    """The pinned ones change places meanwhile, as steps use them."""
    restless = AdaptRules(every=1, swaps=50, decay=1.0)
    pairs = np.arange(NUM_LAYERS * NUM_EXPERTS).reshape(NUM_LAYERS, NUM_EXPERTS)
    unpinned, pinned = pairs[:, HALF:].reshape(-1), pairs[:, :HALF].T.reshape(-1)
    way = Way(cache=unpinned.size + 2 * NUM_LAYERS, least=0, pinned=HALF, adapt=restless)
    with way.open(separate, device_name) as engine:
        scores = np.ones((NUM_LAYERS, NUM_EXPERTS), np.float32)
        streamer_of(engine).hold(np.concatenate([unpinned, pinned]), scores)
        assert_same_talk(talk(engine), separate_talk)
        cache = store_of(engine).cache
        with engine.sequence() as sequence:
            _generate(sequence, STEPS * 9)
        assert engine._residency is not None
        assert engine._residency.counts.swaps > 0
        cache.mend()
        assert cache.is_resident.reshape(-1)[unpinned].all()
        assert store_of(engine).is_all_in_place


@pytest.mark.parametrize("after", [0, 5, 30])
def test_a_file_that_cannot_be_read_ends_the_prompt(
    engine: Engine, separate_talk: Talk, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    stager = store_of(engine)._stager
    assert stager is not None
    broken = failing(stager._source, ("read",), after, DeviceError("the disk is gone"))
    refusal = pytest.raises(DeviceError, match="the disk is gone")
    with engine.sequence() as sequence, broken, refusal:
        sequence.prefill(TURNS[0])
    assert_same_talk(talk(engine), separate_talk)


def test_a_file_that_cannot_be_read_ends_the_step(engine: Engine, separate_talk: Talk) -> None:
    stager = store_of(engine)._stager
    assert stager is not None
    with engine.sequence() as sequence:
        sequence.prefill(TURNS[0])
        snapshot = sequence.snapshot()
        streamer_of(engine).settle()
        broken = failing(stager._source, ("read",), 1, DeviceError("the disk is gone"))
        with broken, pytest.raises(DeviceError, match="the disk is gone"):
            _generate(sequence, STEPS * 9)
        assert not sequence.is_consistent
        sequence.restore(snapshot)
        assert np.array_equal(sequence.step(STEPS[0]), separate_talk.logits[len(TURNS[0])])


def test_a_stager_whose_threads_die_ends_the_prompt_and_the_next_one_is_right(
    engine: Engine, separate_talk: Talk
) -> None:
    stager = store_of(engine)._stager
    assert stager is not None
    for after in (0, 3):
        with (
            engine.sequence() as sequence,
            failing(stager, ("_stage",), after, SystemError("killed")),
            pytest.raises(DeviceError, match="SystemError: killed"),
        ):
            sequence.prefill(TURNS[0])
        assert_same_talk(talk(engine), separate_talk)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Cancelled])
def test_the_wait_for_the_file_ends(
    engine: Engine, separate_talk: Talk, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stager's threads are busy with the disk when the end is asked for."""
    stager = store_of(engine)._stager
    assert stager is not None
    cancellation, is_held, may_go = WatchedCancellation(), threading.Event(), threading.Event()
    bring = stager._source.read

    def held_up(layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        is_held.set()
        may_go.wait(20)
        bring(layer, expert, out)

    def end() -> None:
        is_held.wait(20)
        cancellation.is_awaited.wait(20)
        if error is Cancelled:
            cancellation.cancel()
        else:
            _thread.interrupt_main()
        may_go.set()

    thread = threading.Thread(target=end)
    with monkeypatch.context() as patch, engine.sequence() as sequence:
        patch.setattr(stager._source, "read", held_up)
        thread.start()
        break_off(engine, sequence, error, cancellation=cancellation)
    thread.join()
    assert_same_talk(talk(engine), separate_talk)


def test_what_does_not_fit_page_locked_memory_need_not_be_there(
    separate: Path, device_name: str, separate_talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = host_memory()._replace(free_bytes=50_000)
    monkeypatch.setattr(arena_module, "host_memory", lambda: little)
    with pytest.raises(OutOfMemory, match="do not fit page-locked host memory") as caught:
        Way().open(separate, device_name)
    assert "--arena-pin-gib or --mmap-experts" in caught.value.hint
    with Way(pinned=1).open(separate, device_name) as engine:
        assert_same_talk(talk(engine), separate_talk)


@pytest.mark.parametrize("pinned_bytes", [None, 0, 999, 1000])
@pytest.mark.parametrize("num_slots", [None, 0, 40, 60])
def test_a_plan_has_a_ring_for_steps_where_not_all_is_pinned(
    pinned_bytes: int | None, num_slots: int | None
) -> None:
    shape = CacheShape(slot_bytes=1024, num_pairs=60, arena_bytes=1000)
    wishes = CacheWishes(num_slots=num_slots, least_slots=8, pinned_bytes=pinned_bytes)
    plan = plan_cache(shape, wishes, 50 * 1024, chunk_tokens=64)
    is_all = pinned_bytes in (None, 1000)
    assert plan.pinned_bytes == (1000 if pinned_bytes is None else pinned_bytes)
    if num_slots == 60:
        assert plan.ring_slots == 0
    elif num_slots == 0:
        assert plan.ring_slots >= SMALL_RING_SLOTS
    else:
        assert plan.ring_slots == (0 if is_all else SMALL_RING_SLOTS)
    if num_slots is None:
        assert 20 < plan.num_slots < 50
        assert plan.nbytes <= 50 * 1024


def _generate(sequence: Sequence, tokens: tuple[int, ...]) -> None:
    for token in tokens:
        sequence.step(token)


@pytest.mark.parametrize("more", [{"tail_skip": 1}, {"link_share": 0.5}, {}])
def test_misses_are_shared_out_only_where_all_experts_are_pinned(
    separate: Path, device_name: str, more: dict[str, Any]
) -> None:
    with Way(pinned=HALF, **more).open(separate, device_name) as engine:
        assert engine._residency is not None
        assert not engine._residency.deviates
