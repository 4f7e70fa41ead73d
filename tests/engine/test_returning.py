"""Running state that is put back beside the pass that needs it: nothing overtakes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Event, Tensor
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.host_stream import HostStream
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward import state
from strata_cli.engine.sequence import Part, Sequence
from tests.engine.passes import interrupt, read_together
from tests.engine.readings import TEXT, Truth, bits, open_engine

LATE_S = 0.005  # each group of copies comes so late that nobody who does not wait finds it
START = 20


def dawdle() -> None:
    threading.Event().wait(LATE_S)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """On a host that copies beside its kernels, and slowly."""
    make_stream = HostDevice.stream

    def with_late_copies(device: HostDevice, name: str) -> HostStream:
        stream = make_stream(device, name)
        if name == "returning":
            copy_many = stream.copy_many

            def copy_late(pairs: list[tuple[Tensor, Tensor]]) -> None:
                stream.call(dawdle)
                copy_many(pairs)

            stream.copy_many = copy_late  # type: ignore[assignment, method-assign]  # a test's
        return stream

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostDevice, "has_async_copy", property(lambda _: True))
        patch.setattr(HostDevice, "stream", with_late_copies)
        patch.setattr(state, "GROUP_LAYERS", (1,))
        with open_engine(model, device="host") as engine:
            yield engine


@pytest.fixture(scope="module")
def truth(engine: Engine) -> Truth:
    return Truth(engine)


def step(_engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    return sequence.step(TEXT[START])


def prefill(_engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    return sequence.prefill(TEXT[START : START + 9])


def branch(_engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    return sequence.score([TEXT[START : START + 9]])[0]


def branches(_engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    return sequence.score([TEXT[START : START + n] for n in (3, 9)])[1]


def together(engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    with engine.sequence() as other:
        parts = [(other, TEXT[:5]), (sequence, TEXT[START : START + 9])]
        return read_together(engine, parts)[1][8:].reshape(-1)


def served(engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    """Two sequences whose states arrive, in one pass."""
    with engine.sequence() as other:
        other.prefill(TEXT[:7])
        snapshot = other.snapshot()
        other.restore(snapshot)
        parts = [Part(other, TEXT[7:12]), Part(sequence, TEXT[START : START + 9])]
        row = engine.read_together(parts)[1]
    assert row is not None
    return row


def again(engine: Engine, sequence: Sequence) -> NDArray[np.float32]:
    """A copy of what is still arriving, put back over what went on."""
    snapshot = sequence.snapshot(waits=False)
    sequence.prefill(TEXT[:3])
    sequence.restore(snapshot)
    return prefill(engine, sequence)


@pytest.mark.parametrize(
    ("read", "tokens"),
    [(step, 1), (prefill, 9), (branch, 9), (branches, 9), (together, 9), (served, 9), (again, 9)],
)
def test_what_follows_finds_all_of_the_state(
    engine: Engine,
    truth: Truth,
    read: Callable[[Engine, Sequence], NDArray[np.float32]],
    tokens: int,
) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:START])
        snapshot = sequence.snapshot()
        sequence.prefill(TEXT[::-1][:30])
        for _ in range(2):
            sequence.restore(snapshot)
            logits = read(engine, sequence)
            assert np.array_equal(bits(logits), bits(truth(TEXT[: START + tokens]).logits))


def test_copies_in_memory_of_their_own_replace_what_is_still_arriving(
    engine: Engine, truth: Truth
) -> None:
    with engine.sequence() as sequence:
        state = sequence._state
        sequence.prefill(TEXT[:START])
        leased = state.snapshot()
        own = replace(leased, running=tuple(part.copy() for part in leased.running), lease=None)
        sequence.prefill(TEXT[START : START + 9])
        late = state.snapshot()
        state.restore(late)
        state.restore(own)
        logits = prefill(engine, sequence)
        assert np.array_equal(bits(logits), bits(truth(TEXT[: START + 9]).logits))


def test_a_fingerprint_is_that_of_the_whole_state(engine: Engine, truth: Truth) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:START])
        snapshot = sequence.snapshot()
        sequence.prefill(TEXT[::-1][:30])
        sequence.restore(snapshot)
        assert sequence.state_hash() == truth(TEXT[:START]).state


def test_a_sequence_may_close_while_its_state_arrives(engine: Engine) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:START])
        sequence.restore(sequence.snapshot())


@pytest.mark.parametrize("mend", ["reset", "restore"])
@pytest.mark.parametrize(
    ("name", "after"), [("wait", 0), ("copy_many", 0), ("record", 0), ("record", 1)]
)
def test_an_interrupted_return_leaves_a_sequence_that_can_be_mended(
    engine: Engine,
    truth: Truth,
    monkeypatch: pytest.MonkeyPatch,
    mend: str,
    name: str,
    after: int,
) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:START])
        snapshot = sequence.snapshot()
        sequence.prefill(TEXT[::-1][:30])
        sequence.restore(snapshot)
        sequence.prefill(TEXT[:2])  # makes the stream
        sequence.restore(snapshot)
        side, left = sequence._state._room._side, after
        operation = getattr(side, name)

        def cut(*args: list[tuple[Tensor, Tensor]] | Event) -> None:
            nonlocal left
            operation(*args)
            if not left:
                raise KeyboardInterrupt
            left -= 1

        with monkeypatch.context() as patch:
            patch.setattr(side, name, cut)
            with pytest.raises(KeyboardInterrupt):
                sequence.prefill(TEXT[:4])
        assert not sequence.is_consistent
        if mend == "reset":
            sequence.reset()
        else:
            sequence.restore(snapshot)
        rest = TEXT[sequence.position : 40]
        assert np.array_equal(bits(sequence.prefill(rest)), bits(truth(TEXT[:40]).logits))
        assert sequence.state_hash() == truth(TEXT[:40]).state


@pytest.mark.parametrize("after", [0, 30, 60, 90])
def test_a_pass_that_is_cut_off_leaves_nothing_that_arrives_later(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Before, between and behind the layers whose states it waits for."""
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:START])
        snapshot = sequence.snapshot()
        sequence.prefill(TEXT[::-1][:30])
        sequence.restore(snapshot)
        with interrupt(monkeypatch, engine, "launch", after):
            sequence.prefill(TEXT[START : START + 9])
        sequence.reset()
        assert np.array_equal(bits(sequence.prefill(TEXT[:7])), bits(truth(TEXT[:7]).logits))
        assert sequence.state_hash() == truth(TEXT[:7]).state


def test_a_sequence_may_close_behind_its_engine(model: Path) -> None:
    """Though copies of its state were under way."""
    with open_engine(model, device="host") as engine:
        sequence = engine.sequence()
        sequence.prefill(TEXT[:START])
        sequence.restore(sequence.snapshot(waits=False))
    sequence.close()
