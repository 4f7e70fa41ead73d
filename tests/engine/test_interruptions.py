"""Ctrl-C in the middle of a pass: the sequence says so, and can be mended."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from strata_cli.engine.engine import Engine, Sequence
from strata_cli.errors import StateError
from tests.engine.passes import interrupt
from tests.engine.readings import TEXT, Reading, Truth, bits
from tests.engine.strategies import VOCAB

FIRST_LAUNCHES = [0, 1, 2, 5, 11, 23, 47, 63]


def read(sequence: Sequence, ids: list[int]) -> None:
    sequence.prefill(ids)


def step(sequence: Sequence, ids: list[int]) -> None:
    sequence.step(ids[0])


@pytest.mark.parametrize("go_on", [read, step])
@pytest.mark.parametrize("after", FIRST_LAUNCHES)
def test_an_interrupted_sequence_refuses_to_go_on_until_mended(
    engine: Engine,
    whole: Reading,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    go_on: Callable[[Sequence, list[int]], None],
) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:50])
        snapshot = sequence.snapshot()
        with interrupt(monkeypatch, engine, "launch", after):
            go_on(sequence, TEXT[50:90])
        assert sequence.position == 50
        refused: list[Callable[[], object]] = [
            lambda: sequence.prefill([1]),
            lambda: sequence.step(1),
            sequence.snapshot,
            sequence.state_hash,
        ]
        for use in refused:
            with pytest.raises(StateError, match="after position 50 was interrupted") as caught:
                use()
            assert caught.value.hint
        sequence.restore(snapshot)
        logits = sequence.prefill(TEXT[50:], logits="all")
        assert np.array_equal(bits(logits), bits(whole.logits[50:]))
        assert sequence.state_hash() == whole.state


@pytest.mark.parametrize("go_on", [read, step])
def test_a_reset_mends_a_sequence(
    engine: Engine,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
    go_on: Callable[[Sequence, list[int]], None],
) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:9])
        with interrupt(monkeypatch, engine, "launch", 30):
            go_on(sequence, TEXT[9:50])
        sequence.reset()
        assert np.array_equal(sequence.prefill(TEXT[:20]), truth(TEXT[:20]).logits)
        assert sequence.state_hash() == truth(TEXT[:20]).state


def test_an_interrupted_replay_is_an_interrupted_pass(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:20])
        sequence.step(TEXT[20])  # recorded now
        snapshot = sequence.snapshot()
        with interrupt(monkeypatch, engine, "replay", 0):
            sequence.step(TEXT[21])
        with pytest.raises(StateError, match="interrupted"):
            sequence.step(TEXT[21])
        sequence.restore(snapshot)
        assert np.array_equal(sequence.step(TEXT[21]), truth(TEXT[:22]).logits)


def test_chunks_before_the_interruption_stay_read(engine: Engine, truth: Truth) -> None:
    """Between chunks nothing is half done."""

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with engine.sequence() as sequence:
        with pytest.raises(KeyboardInterrupt):
            sequence.prefill(TEXT[:30], progress=stop)
        assert sequence.ids == tuple(TEXT[:30])
        assert sequence.state_hash() == truth(TEXT[:30]).state


def test_keys_that_an_interrupted_pass_overwrote_do_not_count(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rewind, a pass of other tokens begins and is cut off behind its first keys."""
    with engine.sequence() as sequence:
        start = sequence.snapshot()
        sequence.prefill(TEXT[:40])
        late = sequence.snapshot()
        sequence.restore(start)
        with interrupt(monkeypatch, engine, "launch", 63):
            sequence.prefill([(token + 1) % VOCAB for token in TEXT[:10]])
        with pytest.raises(StateError, match="position 40 is no longer a prefix"):
            sequence.restore(late)
        sequence.restore(start)


@pytest.mark.parametrize(
    ("mend", "operation", "after"),
    [
        *(("restore", "copy_many", 0), ("restore", "record", 0)),
        *(("reset", "fill", after) for after in (0, 1, 3)),
    ],
)
def test_mending_that_is_interrupted_can_be_done_again(
    engine: Engine,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
    mend: str,
    operation: str,
    after: int,
) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:10])
        snapshot = sequence.snapshot()
        sequence.prefill(TEXT[10:20])

        def do() -> None:
            sequence.restore(snapshot) if mend == "restore" else sequence.reset()

        with interrupt(monkeypatch, engine, operation, after):
            do()
        with pytest.raises(StateError, match="interrupted"):
            sequence.state_hash()
        do()
        assert sequence.state_hash() == truth(list(sequence.ids)).state


def test_other_sequences_do_not_notice(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.sequence() as steady, engine.sequence() as broken:
        steady.prefill(TEXT[:25])
        with interrupt(monkeypatch, engine, "launch", 60):
            broken.prefill(TEXT[::-1])
        assert np.array_equal(steady.prefill(TEXT[25:50]), truth(TEXT[:50]).logits)
        assert steady.state_hash() == truth(TEXT[:50]).state


def test_what_is_left_of_an_interrupted_pass_keeps_its_own_tokens(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is far behind when the next pass comes, and the first one's inputs are unread.

    With the positions of the next pass it would overwrite keys that a snapshot counts on.
    """
    stream = engine._stream
    may_run = threading.Event()
    synchronize = stream.synchronize

    def held_up() -> None:
        may_run.wait(60)

    def synchronize_at_last() -> None:
        may_run.set()
        synchronize()

    with engine.sequence() as broken, engine.sequence() as other:
        broken.prefill(TEXT[:30])
        broken.step(TEXT[30])
        snapshot = broken.snapshot()
        stream.call(held_up)
        with interrupt(monkeypatch, engine, "record", 0):
            broken.step(TEXT[31])
        with monkeypatch.context() as patch:
            patch.setattr(stream, "synchronize", synchronize_at_last)
            other.prefill(TEXT[50:60])
        broken.restore(snapshot)
        assert broken.state_hash() == truth(TEXT[:31]).state
