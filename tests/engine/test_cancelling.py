"""A read that another thread ends: where it stops, and that nobody notices afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine.engine import Engine
from strata_cli.engine.experts.streaming import ChunkStream
from strata_cli.engine.reading import ReadRequest, read
from strata_cli.engine.session import Session
from strata_cli.errors import Cancelled, DeviceError, StateError
from tests.engine.readings import TEXT, Truth, bits, open_engine
from tests.engine.streams import (
    TURNS,
    Talk,
    WatchedCancellation,
    Way,
    assert_same_talk,
    break_off,
    store_of,
    talk,
)

WAIT_S = 20.0


@pytest.fixture
def cancellation() -> WatchedCancellation:
    return WatchedCancellation()


def test_nothing_is_read_when_the_end_was_asked_for(
    engine: Engine, truth: Truth, cancellation: WatchedCancellation
) -> None:
    cancellation.cancel()
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:9])
        for use in (sequence.prefill, lambda ids, **how: sequence.score([ids], **how)):
            with pytest.raises(Cancelled, match="the read was cancelled"):
                use(TEXT[9:20], cancellation=cancellation)
        assert sequence.state_hash() == truth(TEXT[:9]).state


def test_whole_chunks_stay_read(
    model: Path, device_name: str, cancellation: WatchedCancellation
) -> None:
    def progress(done: int, _total: int) -> None:
        if done == 64:
            _in_another_thread(cancellation.cancel).join()

    opened = open_engine(model, device=device_name, prefill=32)
    with opened as engine, engine.sequence() as sequence:
        with pytest.raises(Cancelled):
            sequence.prefill(TEXT, progress=progress, cancellation=cancellation)
        assert sequence.ids == tuple(TEXT[:64])
        assert sequence.state_hash() == Truth(engine)(TEXT[:64]).state


def test_an_answer_ends_before_its_next_token(
    engine: Engine, cancellation: WatchedCancellation
) -> None:
    told: list[int] = []

    def on_token(token: int) -> None:
        told.append(token)
        if len(told) == 3:
            cancellation.cancel()

    request = ReadRequest(ids=TEXT[:9], max_tokens=20)
    with engine.sequence() as sequence:
        with pytest.raises(Cancelled):
            read(engine, sequence, request, on_token=on_token, cancellation=cancellation)
        assert sequence.position == 9 + 2
        assert len(told) == 3


def test_a_cancellation_that_comes_too_late_changes_nothing(
    engine: Engine, truth: Truth, cancellation: WatchedCancellation
) -> None:
    with engine.sequence() as sequence:
        logits = sequence.prefill(TEXT[:20], cancellation=cancellation)
        cancellation.cancel()
        assert np.array_equal(logits, truth(TEXT[:20]).logits)


@pytest.fixture(scope="module", params=[True, False], ids=["thread", "inline"])
def streamed(request: pytest.FixtureRequest, separate: Path, device_name: str) -> Iterator[Engine]:
    way = Way(ring=16, stream={"has_thread": request.param, "depth": 1})
    with way.open(separate, device_name) as engine:
        yield engine


@pytest.mark.parametrize("held", ["compute", "copies"])
def test_every_wait_of_a_streamed_prompt_ends(
    streamed: Engine, separate_talk: Talk, cancellation: WatchedCancellation, held: str
) -> None:
    """The device does not get to what the prompt waits for: the routing, or room for copies."""
    stream = streamed._stream if held == "compute" else store_of(streamed).copies
    with streamed.sequence() as sequence:
        with _cancelled_while_busy(stream, cancellation):
            break_off(streamed, sequence, Cancelled, cancellation=cancellation)
        sequence.reset()
        assert np.array_equal(sequence.prefill(TURNS[0]), separate_talk.logits[len(TURNS[0]) - 1])
    assert_same_talk(talk(streamed), separate_talk)


@pytest.mark.parametrize("way", [Way(ring=16), Way(chunk=24, stream_min=1000, pinned=10)])
def test_a_prompt_can_be_cancelled_at_any_point(
    separate: Path, separate_talk: Talk, device_name: str, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of every thing that a streamed chunk does, one after the other."""
    calls, cancel_at = 0, 0
    cancellation = WatchedCancellation()

    def counted(name: str) -> Any:
        method = getattr(ChunkStream, name)

        def call(*args: Any) -> Any:
            nonlocal calls
            if calls == cancel_at:
                cancellation.cancel()
            calls += 1
            return method(*args)

        return call

    with way.open(separate, device_name) as engine:
        cache = store_of(engine).cache
        with monkeypatch.context() as patch, engine.sequence() as sequence:
            for name in ("await_event", "publish", "groups", "finish"):
                patch.setattr(ChunkStream, name, counted(name))
            for cancel_at in range(0, 40, 3):
                calls, cancellation = 0, WatchedCancellation()
                with pytest.raises(Cancelled):
                    sequence.prefill(TURNS[0], cancellation=cancellation)
                assert calls >= cancel_at
                assert cache.loan is None
                assert (cache.pair_in == cache.held).all()
                sequence.reset()
        assert_same_talk(talk(engine), separate_talk)


def test_short_chunks_end_too(separate: Path, separate_talk: Talk, device_name: str) -> None:
    """Those that copy what is routed, through a small ring."""
    cancellation = WatchedCancellation()
    with (
        Way(cache=0, chunk=24).open(separate, device_name) as engine,
        engine.sequence() as sequence,
    ):
        with _cancelled_while_busy(store_of(engine).copies, cancellation):
            break_off(engine, sequence, Cancelled, cancellation=cancellation)
        assert_same_talk(talk(engine), separate_talk)


def test_suffixes_leave_their_prefix_whole(
    streamed: Engine, separate_talk: Talk, cancellation: WatchedCancellation
) -> None:
    prefix, rest = TURNS[0][:70], TURNS[0][70:]
    with streamed.sequence() as sequence:
        sequence.prefill(prefix)
        state = sequence.state_hash()
        for suffix in (rest[:60], rest):  # in a pass of its own, and in chunks
            own = WatchedCancellation()
            copies = store_of(streamed).copies
            with _cancelled_while_busy(copies, own), pytest.raises(Cancelled):
                sequence.score([suffix], cancellation=own)
            assert sequence.state_hash() == state
        (row,) = sequence.score([rest], cancellation=cancellation)
        assert np.array_equal(row, separate_talk.logits[len(TURNS[0]) - 1])


def test_a_session_goes_on_from_what_is_whole(
    streamed: Engine, separate_talk: Talk, cancellation: WatchedCancellation
) -> None:
    prompt = TURNS[0]
    with Session(streamed) as session:
        session.read(prompt[:70])
        with _cancelled_while_busy(streamed._stream, cancellation), pytest.raises(Cancelled):
            session.read(prompt, cancellation=cancellation)
        logits, reused = session.read(prompt)
        assert reused == 70
        assert np.array_equal(bits(logits), bits(separate_talk.logits[len(prompt) - 1]))


@pytest.mark.parametrize("error", [ValueError("other"), DeviceError("the link is gone")])
def test_another_error_is_told_as_it_is(
    cancellation: WatchedCancellation, error: Exception
) -> None:
    cancellation.cancel()
    with pytest.raises(type(error)), cancellation.stopping(lambda: None):
        raise error


def test_a_stop_that_nobody_asked_for_is_told_as_it_is(cancellation: WatchedCancellation) -> None:
    with pytest.raises(StateError, match="early"), cancellation.stopping(lambda: None):
        raise StateError("early")


def test_a_block_that_begins_late_is_stopped_at_once(cancellation: WatchedCancellation) -> None:
    told: list[str] = []
    cancellation.cancel()
    with cancellation.stopping(lambda: told.append("stop")):
        assert told == ["stop"]
    cancellation.cancel()
    assert told == ["stop"]


@contextmanager
def _cancelled_while_busy(stream: Any, cancellation: WatchedCancellation) -> Iterator[None]:
    """The stream does not go on before the cancellation, which waits until a read awaits it."""
    is_held, may_run = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        may_run.wait(WAIT_S)

    def cancel() -> None:
        is_held.wait(WAIT_S)
        cancellation.is_awaited.wait(WAIT_S)
        cancellation.cancel()
        may_run.set()

    thread = _in_another_thread(cancel)
    stream.call(hold)
    yield
    thread.join()


def _in_another_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread
