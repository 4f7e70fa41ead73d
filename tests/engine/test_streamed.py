"""Streamed prompts: whatever way the experts take, every bit is that of resident experts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device import host_event
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.device.host_memory import HostBuffer
from strata_cli.engine.device.host_stream import HostStream
from strata_cli.engine.device.transfer import download
from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.experts import waiting
from strata_cli.engine.experts.sizing import SELECTED_RING_SLOTS
from strata_cli.engine.experts.streaming import ChunkStream
from strata_cli.engine.forward import mixture
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.prefill import prompt_stream
from strata_cli.engine.prefill.feed import StreamTables
from strata_cli.engine.prefill.prompt_stream import History
from strata_cli.engine.trace import Event, Trace
from strata_cli.errors import DeviceError, StallError, StateError
from tests.engine.readings import open_engine
from tests.engine.streams import (
    LAUNCHES,
    NUM_EXPERTS,
    NUM_LAYERS,
    STEPS,
    STREAM_MIN,
    TURNS,
    WAYS,
    Talk,
    Way,
    assert_same_talk,
    break_off,
    counting,
    failing,
    issuers,
    store_of,
    streamer_of,
    talk,
)

COPIES = ("copy", "copy_many", "copy_rows")


@pytest.fixture(scope="module", params=["separate", "fused"])
def path(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def resident(path: Path, device_name: str) -> Talk:
    """By an engine with all experts in place."""
    with open_engine(path, device=device_name, prefill=64) as engine:
        assert engine._streamer is None
        return talk(engine)


@pytest.mark.parametrize("way", WAYS)
def test_no_bit_depends_on_the_way_of_the_experts(
    path: Path, device_name: str, resident: Talk, way: str
) -> None:
    with WAYS[way].open(path, device_name) as engine:
        held = store_of(engine).cache.pair_in.copy()
        assert_same_talk(talk(engine), resident)
        assert (store_of(engine).cache.pair_in == held).all()
        assert not issuers()


def test_a_chunk_copies_or_skips_what_is_not_resident(separate: Path, device_name: str) -> None:
    with Way(ring=16).open(separate, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0])
        num_entries = NUM_EXPERTS * NUM_LAYERS - 45 + 16
        assert [c.copied + c.skipped for c in streamer_of(engine).counts][:3] == [num_entries] * 3


def test_what_the_next_layers_router_foretells_is_copied_first(
    separate: Path, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the values that a layer reads, the router of the layer behind it."""
    foretold: dict[int, NDArray[np.int64]] = {}
    expected: dict[int, NDArray[np.float32]] = {}
    foretell, expect = mixture.foretell, ChunkStream.expect
    way = Way(cache=0, is_likely=True, foresees=True)

    def foretelling(model: ModelOnStream, index: int, values: Tensor, room: Tensor) -> Tensor:
        start = foretell(model, index, values, room)
        router = model.weights.layers[index].moe.router
        matrix, read = (
            download(opened._device, model.stream, tensor) for tensor in (router.data, values)
        )
        logits = read @ matrix.view(np.float32).reshape(router.rows, router.cols).T
        chosen = np.argsort(-logits, axis=1)[:, : model.spec.num_experts_per_tok]
        foretold[index] = np.bincount(chosen.reshape(-1), minlength=NUM_EXPERTS)
        return start

    def expecting(stream: ChunkStream, layer: int, scores: Any, num_likely: int) -> None:
        expected[layer] = scores
        expect(stream, layer, scores, num_likely)

    with way.open(separate, device_name) as opened, opened.sequence() as sequence:
        monkeypatch.setattr(mixture, "foretell", foretelling)
        monkeypatch.setattr(ChunkStream, "expect", expecting)
        sequence.prefill(TURNS[0][:STREAM_MIN])
    assert list(foretold) == list(expected) == [1, 2, 3]
    for layer, counts in foretold.items():
        assert (expected[layer].astype(int) == counts).all()


def test_prompts_that_follow_each_other_borrow_once(separate: Path, device_name: str) -> None:
    with Way(ring=16).open(separate, device_name) as engine, engine.sequence() as sequence:
        cache = store_of(engine).cache
        held = cache.pair_in.copy()
        sequence.prefill(TURNS[0][:70])
        first = cache.loan
        assert first is not None
        sequence.prefill(TURNS[0][70:80])
        sequence.prefill(TURNS[1][:70])
        assert store_of(engine).cache.loan is first
        sequence.step(STEPS[0])
        assert store_of(engine).cache.loan is None
        assert (cache.pair_in == held).all()


def test_a_longer_loan_follows_a_shorter_one(
    separate: Path, device_name: str, separate_talk: Talk
) -> None:
    with Way().open(separate, device_name) as engine, engine.sequence() as sequence:
        for length in (20, 100):
            sequence.prefill(TURNS[0][sequence.position : sequence.position + length])
        loan = store_of(engine).cache.loan
        assert loan is not None
        assert loan.num_slots == 25
        logits = sequence.prefill(TURNS[0][120:], logits="all")
        assert np.array_equal(logits, separate_talk.logits[120 : len(TURNS[0])])


def test_kept_experts_are_not_copied_again(separate: Path, device_name: str) -> None:
    way = Way(cache=60, least=10, ring=16, keep=9)
    with way.open(separate, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0])
        first, second, third, _ = (c.copied + c.skipped for c in streamer_of(engine).counts)
        num_entries = NUM_EXPERTS * NUM_LAYERS - 60 + 16 + 9
        assert (first, second, third) == (num_entries, num_entries - 9, num_entries - 9)


def test_what_one_prompt_brought_is_there_for_the_next(
    separate: Path, device_name: str, separate_talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the slots are lent: here 24, of which short prompts have a ring of 16."""
    monkeypatch.setattr(prompt_stream, "SPARE_RING_SLOTS", 16)
    way = Way(cache=60, least=36, is_likely=True, foresees=True)
    copied = []
    with way.open(separate, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0][:STREAM_MIN])
        start = sequence.snapshot()
        for _ in range(4):
            sequence.restore(start)
            with engine.canonical():
                logits = sequence.prefill(TURNS[0][STREAM_MIN : STREAM_MIN + 9])
            assert np.array_equal(logits, separate_talk.logits[STREAM_MIN + 8])
            copied.append(streamer_of(engine).counts[0].copied)
        assert copied[-1] < copied[0]
        assert np.array_equal(
            sequence.step(TURNS[0][STREAM_MIN + 9]), separate_talk.logits[STREAM_MIN + 9]
        )
        assert streamer_of(engine)._kept is None


def test_short_chunks_copy_routed_experts_alone(separate: Path, device_name: str) -> None:
    with Way(cache=0).open(separate, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0][:9])
        (counts,) = streamer_of(engine).counts
        assert counts.skipped == 0
        assert counts.copied < NUM_EXPERTS * NUM_LAYERS
        sequence.prefill(TURNS[0][:8])  # so few are read where they are
        assert not streamer_of(engine).counts


def test_short_chunks_copy_what_is_foreseen_or_routed(separate: Path, device_name: str) -> None:
    way = Way(cache=0, is_likely=True, foresees=True)
    with way.open(separate, device_name) as engine, engine.sequence() as sequence:
        sequence.prefill(TURNS[0][:9])
        streamer = streamer_of(engine)
        (counts,) = streamer.counts
        assert streamer.use is not None
        num_routed = int((streamer.use > 0).sum())
        assert num_routed <= counts.copied
        assert counts.copied + counts.skipped < NUM_EXPERTS * NUM_LAYERS
        assert streamer.ring_slots(9) == SELECTED_RING_SLOTS
        assert streamer.ring_slots(8) == 0


@pytest.mark.parametrize("ring", [8, 16])
def test_routed_experts_are_read_from_the_ring(separate: Path, device_name: str, ring: int) -> None:
    """They could be read where they lie too, with the same bits."""
    with Way(cache=0, ring=ring).open(separate, device_name) as engine:
        with engine.sequence() as sequence:
            sequence.prefill(TURNS[0][:64])
        streamer = streamer_of(engine)
        table, memory, use = streamer._tables._addresses, streamer._own, streamer.use
        assert memory is not None
        assert use is not None
        addresses = download(engine._device, engine._stream, table)
        is_inside = (addresses >= memory.address) & (addresses < memory.address + memory.nbytes)
        expected = (use > 0).sum(axis=1) if ring == 8 else [NUM_EXPERTS] * NUM_LAYERS
        assert is_inside.sum(axis=1).tolist() == list(expected)


def test_a_ring_waits_for_the_reads_of_the_one_before(
    separate: Path, device_name: str, separate_talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt's last layer is held up when the copies of a long one could begin.

    Its experts fit the small ring, so that the copies are done by then.
    """
    may_run, left, start = threading.Event(), NUM_LAYERS, StreamTables.start
    way = Way(cache=0, short=0).open(separate, device_name)
    with way as opened, opened.sequence() as short, opened.sequence() as long:

        def held_up(tables: StreamTables) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                opened._stream.call(lambda: _hold(may_run))
            return start(tables)

        monkeypatch.setattr(StreamTables, "start", held_up)
        short.prefill(TURNS[0][:2], logits="none")
        opened._port.enqueue_logits(opened._forward.head(1, 2))
        threading.Timer(0.2, may_run.set).start()
        long.prefill(TURNS[1][:64], logits="none")
        assert np.array_equal(opened._port.read_logits(1)[0], separate_talk.logits[1])


@pytest.fixture(scope="module", params=[True, False], ids=["thread", "inline"])
def engine(request: pytest.FixtureRequest, separate: Path, device_name: str) -> Iterator[Engine]:
    way = Way(stream={"has_thread": request.param})
    with way.open(separate, device_name) as engine:
        yield engine


@pytest.fixture(scope="module")
def num_launches(engine: Engine) -> int:
    """Of the prompt that is interrupted; what is launched together counts once."""
    for _ in range(2):  # the first one may launch what the second one repeats
        with engine.sequence() as sequence, counting(engine._stream, LAUNCHES) as counted:
            sequence.prefill(TURNS[0])
    talk(engine)
    return len(counted)


@pytest.mark.parametrize("share", [0.0, 0.005, 0.1, 0.3, 0.5, 0.9])
def test_an_interrupted_prompt_gives_back_what_it_borrowed(
    engine: Engine, separate_talk: Talk, num_launches: int, share: float
) -> None:
    after = int(share * num_launches)
    interrupt = failing(engine._stream, LAUNCHES, after, KeyboardInterrupt())
    with engine.sequence() as sequence, interrupt:
        break_off(engine, sequence, KeyboardInterrupt)
    assert_same_talk(talk(engine), separate_talk)


def test_an_interrupt_ends_the_wait_for_the_routing(
    engine: Engine, separate_talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_run = threading.Event()
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        """The first one alone: a device may sleep too, as what was lent is filled again."""
        if threading.current_thread() is not threading.main_thread() or may_run.is_set():
            sleep(seconds)
            return
        may_run.set()
        raise KeyboardInterrupt

    with engine.sequence() as sequence:
        engine._stream.call(lambda: _hold(may_run))
        with monkeypatch.context() as patch:
            patch.setattr("time.sleep", interrupted)
            break_off(engine, sequence, KeyboardInterrupt)
    assert_same_talk(talk(engine), separate_talk)


def test_a_second_interrupt_leaves_what_was_lent_to_the_next_prompt(
    engine: Engine, separate_talk: Talk
) -> None:
    """It comes while what the first one's prompt had borrowed is filled again."""
    cache = store_of(engine).cache
    held = cache.pair_in.copy()
    interrupts = (
        failing(engine._stream, ("launch",), 130, KeyboardInterrupt()),
        failing(cache._uploader, ("upload",), 0, KeyboardInterrupt()),
    )
    with engine.sequence() as sequence:
        with interrupts[0], interrupts[1], pytest.raises(KeyboardInterrupt):
            sequence.prefill(TURNS[0])
        assert not issuers()
        assert cache.loan is None
        assert (cache.pair_in != held).any()
        with pytest.raises(StateError, match="interrupted"):
            sequence.step(STEPS[0])
    assert_same_talk(talk(engine), separate_talk)
    assert (cache.pair_in == held).all()


def test_an_interrupt_ends_the_wait_for_a_copy(
    separate: Path, separate_talk: Talk, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The issuer's thread is held up inside a copy, and the one that waits is interrupted."""
    may_go = threading.Event()
    wait = waiting.Bell.wait
    with Way().open(separate, device_name) as engine, engine.sequence() as sequence:
        copies = store_of(engine).copies
        copy_rows = copies.copy_rows

        def held_up(*rows: Any) -> int:
            if threading.current_thread() is not threading.main_thread():
                _hold(may_go)
            return copy_rows(*rows)

        def interrupted(bell: waiting.Bell, seconds: float) -> None:
            if threading.current_thread() is threading.main_thread():
                may_go.set()
                raise KeyboardInterrupt
            wait(bell, seconds)

        with monkeypatch.context() as patch:
            patch.setattr(copies, "copy_rows", held_up)
            patch.setattr(waiting.Bell, "wait", interrupted)
            break_off(engine, sequence, KeyboardInterrupt)
        assert_same_talk(talk(engine), separate_talk)


@pytest.mark.parametrize("pinned", [None, 9])
def test_an_end_left_to_the_garbage_collector_disturbs_no_other_prompt(
    separate: Path,
    separate_talk: Talk,
    device_name: str,
    pinned: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C came twice, also before the first lines of what ends a chunk and its prompt."""
    await_event = ChunkStream.await_event
    with Way(pinned=pinned).open(separate, device_name) as engine:
        cache = store_of(engine).cache
        prompt = streamer_of(engine).prompt(230, 64)
        chunk = prompt.__enter__().chunk(64)
        left: list[Any] = [chunk, prompt]
        chunk.__enter__()
        assert issuers()

        def collected(stream: ChunkStream, *args: Any) -> None:
            assert len(issuers()) <= 1
            loan = cache.loan
            assert loan is not None or pinned is not None
            while left:
                left.pop(0).gen.close()
            assert cache.loan is loan
            await_event(stream, *args)

        with monkeypatch.context() as patch:
            patch.setattr(ChunkStream, "await_event", collected)
            assert_same_talk(talk(engine), separate_talk)
        assert not left
        assert not issuers()


def test_an_engine_closes_though_a_chunk_was_left_open(separate: Path, device_name: str) -> None:
    with Way().open(separate, device_name) as engine:
        prompt = streamer_of(engine).prompt(230, 64)
        chunk = prompt.__enter__().chunk(64)
        chunk.__enter__()
        assert issuers()
    assert not issuers()


def test_nothing_is_copied_any_more_where_slots_are_filled_again(
    separate: Path, device_name: str
) -> None:
    """For a chunk that was left open: its copies would land in the cache."""
    with Way().open(separate, device_name) as engine:
        prompt = streamer_of(engine).prompt(230, 64)
        chunk = prompt.__enter__().chunk(64)
        chunk.__enter__()
        assert issuers()
        streamer_of(engine).settle()
        assert not issuers()


@pytest.mark.parametrize("pinned", [None, 9])
def test_what_is_kept_goes_with_the_prompt_that_failed_and_no_other(
    separate: Path, device_name: str, pinned: int | None
) -> None:
    """A stall, or what comes when an earlier one is left to the garbage collector."""
    with Way(pinned=pinned).open(separate, device_name) as engine:
        streamer = streamer_of(engine)
        for error in (StallError("planted", hint="none"), KeyboardInterrupt()):
            late, later = prompts = [cast(Any, streamer.prompt(230, 64)) for _ in range(2)]
            for prompt in prompts:
                prompt.__enter__()
            kept = streamer._kept
            assert kept is not None
            with pytest.raises(type(error)):
                late.gen.throw(error)
            assert streamer._kept is kept
            with pytest.raises(type(error)):
                later.gen.throw(error)
            assert streamer_of(engine)._kept is None
            streamer.settle()


def test_what_was_expected_is_expected_again_behind_the_latest_block_alone() -> None:
    history = History(np.ones((2, 3), np.float32))
    uses = [np.full((2, 3), value) for value in range(3)]
    history._last_use = uses[0]
    late: Any = history.unlearning()
    late.__enter__()
    history._last_use = uses[1]
    with history.unlearning():
        history._last_use = uses[2]
        late.gen.close()
        assert history._last_use is uses[2]
    assert history._last_use is uses[1]


def test_an_interrupted_refill_is_made_up_for(engine: Engine, separate_talk: Talk) -> None:
    cache = store_of(engine).cache
    held = cache.pair_in.copy()
    with engine.sequence() as sequence:
        logits = sequence.prefill(TURNS[0], logits="all")
        interrupt = failing(cache._uploader, ("upload",), 0, KeyboardInterrupt())
        with interrupt, pytest.raises(KeyboardInterrupt):
            sequence.step(STEPS[0])
        assert (cache.pair_in != held).any()
        # What is in no slot is read where it lies.
        logits = np.concatenate([logits, sequence.step(STEPS[0])[None]])
        assert np.array_equal(logits, separate_talk.logits[: len(logits)])
    assert_same_talk(talk(engine), separate_talk)
    assert (cache.pair_in == held).all()


@pytest.mark.parametrize("after", [0, 1, 7])
def test_a_failing_copy_is_one_error_and_the_next_prompt_is_right(
    engine: Engine, separate_talk: Talk, after: int
) -> None:
    copies = store_of(engine).copies
    cache = store_of(engine).cache
    take_back = cache.take_back
    broken = failing(
        copies, ("copy", "copy_many", "copy_rows"), after, DeviceError("the link is gone")
    )
    with (
        engine.sequence() as sequence,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as until_mended,
    ):
        until_mended.enter_context(broken)

        def mended(loan: Any) -> None:
            until_mended.close()
            take_back(loan)

        patch.setattr(cache, "take_back", mended)
        break_off(engine, sequence, DeviceError, "the link is gone")
    assert_same_talk(talk(engine), separate_talk)


def test_a_link_that_stays_broken_is_one_error_and_is_noted(
    engine: Engine, separate_talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    copies, cache = store_of(engine).copies, store_of(engine).cache
    held = cache.pair_in.copy()
    with engine.sequence() as sequence:
        with (
            failing(copies, COPIES, 0, DeviceError("the link is gone")),
            pytest.raises(DeviceError, match="the link is gone"),
        ):
            sequence.prefill(TURNS[0])
        assert "could not be filled again: the link is gone" in caplog.text
    assert_same_talk(talk(engine), separate_talk)
    assert (cache.pair_in == held).all()


def test_a_device_that_hangs_ends_the_prompt(
    separate: Path, separate_talk: Talk, device_name: str
) -> None:
    """Nothing may wait for it then; what was lent is filled again by the next prompt."""
    may_run = threading.Event()
    way = Way(stream={"watchdog_s": 0.2})
    with way.open(separate, device_name) as engine, engine.sequence() as sequence:
        held = store_of(engine).cache.pair_in.copy()
        engine._stream.call(lambda: _hold(may_run))
        with pytest.raises(StallError, match="waiting for the routing of layer 0"):
            sequence.prefill(TURNS[0])
        assert not may_run.is_set()
        assert not issuers()
        may_run.set()
        assert_same_talk(talk(engine), separate_talk)
        assert (store_of(engine).cache.pair_in == held).all()


@pytest.mark.parametrize("name", ["compute", "copies"])
@pytest.mark.parametrize("way", [Way(), Way(stream={"has_thread": False}), Way(pinned=0)])
def test_a_dead_thread_of_the_host_device_ends_every_prompt_and_the_engine_closes(
    separate: Path, name: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_event, "LOOK_S", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    with way.open(separate, "host") as engine, engine.sequence() as sequence:
        stream = engine._stream if name == "compute" else store_of(engine).copies
        assert isinstance(stream, HostStream)
        with monkeypatch.context() as patch:
            patch.setattr(stream, "_run", _die)
            for read in (sequence.prefill, partial(_read_again, sequence)):
                with pytest.raises(DeviceError, match=f"'strata-{name}' .* has ended") as raised:
                    read(TURNS[0])
                assert "restart" in str(raised.value)
        assert not issuers()


def _read_again(sequence: Sequence, ids: list[int]) -> None:
    sequence.reset()
    sequence.prefill(ids)


def _die(_operation: object) -> None:
    raise SystemExit


def _hold(event: threading.Event) -> None:
    event.wait(20)


def test_the_ring_is_there_until_nobody_reads_it(
    separate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels know slots by their addresses alone, so nothing else keeps a ring of its own."""
    may_run = threading.Event()
    is_closed: list[bool] = []
    close = HostBuffer.close
    with Way(cache=0).open(separate, "host") as engine:
        own = streamer_of(engine)._own
        assert own is not None

        def noted(buffer: HostBuffer) -> None:
            if buffer is own.buffer:
                is_closed.append(engine._stream.is_closed)  # type: ignore[attr-defined]  # a host's
            close(buffer)

        monkeypatch.setattr(HostBuffer, "close", noted)
        sequence = engine.sequence()
        engine._stream.call(lambda: _hold(may_run))
        with (
            failing(engine._stream, ("launch",), 5, KeyboardInterrupt()),
            pytest.raises(KeyboardInterrupt),
        ):
            sequence.prefill(TURNS[0])
        sequence.close()
        may_run.set()
    assert is_closed[0]


@pytest.mark.parametrize("ring", [0, 8, 16])
def test_a_trace_has_every_copy_and_every_group_of_a_prompt(
    separate: Path, device_name: str, ring: int
) -> None:
    """Those of the last chunk too, which the device is not done with when it is enqueued."""
    events: list[Event] = []
    way = Way(ring=ring)
    with way.open(separate, device_name, Trace(events.append)) as engine, engine.sequence() as talk:
        talk.prefill(TURNS[0])
        seen = list(events)
        counts = streamer_of(engine).counts

    def total(ev: str, name: str) -> int:
        return sum(int(event[name]) for event in seen if event["ev"] == ev)

    assert total("copy.run", "bytes") == sum(count.copied_bytes for count in counts)
    assert total("copy.run", "entries") == sum(count.copied for count in counts)
    assert total("group.run", "experts") == total("layer.routed", "routed")
