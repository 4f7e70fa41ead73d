"""Several sequences in one pass: each reads as if it were alone."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.decode import step
from strata_cli.engine.device import open_device
from strata_cli.engine.engine import Engine, Part, Sequence
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.forward.outline import Outline, Sizes
from strata_cli.engine.forward.placing import Placement
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.errors import InputError, ShapeError, StateError
from tests.engine.passes import interrupt
from tests.engine.readings import TEXT, Truth, bits, open_engine
from tests.engine.streams import Way

OTHER = TEXT[::-1]


@dataclass
class Reader:
    """A sequence, what it has read, and what it will read one piece at a time."""

    sequence: Sequence
    ids: list[int] = field(default_factory=list)

    def part(self, ids: list[int], *, wants_logits: bool = True) -> Part:
        self.ids += ids
        return Part(self.sequence, ids, wants_logits)

    def check(self, truth: Truth, row: NDArray[np.float32] | None) -> None:
        assert row is not None
        assert np.array_equal(bits(row), bits(truth(self.ids).logits))
        assert self.sequence.state_hash() == truth(self.ids).state


def readers(engine: Engine, stack: ExitStack, count: int) -> list[Reader]:
    return [Reader(stack.enter_context(engine.sequence())) for _ in range(count)]


def test_steps_together_are_steps_alone(engine: Engine, truth: Truth) -> None:
    """Every row has the bits of its own sequence, whoever comes and goes beside it."""
    with ExitStack() as stack:
        all_four = readers(engine, stack, 4)
        for index, reader in enumerate(all_four):
            reader.sequence.prefill(TEXT[index : index + 5 * index + 3])
            reader.ids = TEXT[index : index + 5 * index + 3]
        for chosen in ((0, 1, 2, 3), (0, 1, 2, 3), (3, 1), (1, 3), (2,), (0, 2, 3)):
            now = [all_four[index] for index in chosen]
            rows = engine.read_together(reader.part([OTHER[len(reader.ids)]]) for reader in now)
            for reader, row in zip(now, rows, strict=True):
                reader.check(truth, row)


@settings(max_examples=5)
@given(
    passes=st.lists(
        st.lists(st.sampled_from([0, 0, 1, 1, 2, 7, 19, 40]), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_pieces_of_prompts_beside_steps_change_no_bit(
    engine: Engine, truth: Truth, passes: list[list[int]]
) -> None:
    with ExitStack() as stack:
        three = readers(engine, stack, 3)
        texts = [TEXT, OTHER, TEXT[50:] + TEXT]
        for sizes in passes:
            now, parts = [], []
            for reader, text, size in zip(three, texts, sizes, strict=True):
                if size:
                    now.append(reader)
                    parts.append(reader.part(text[len(reader.ids) :][:size]))
            for reader, row in zip(now, engine.read_together(parts), strict=True):
                reader.check(truth, row)


def test_logits_of_some_parts_alone(engine: Engine, truth: Truth) -> None:
    with ExitStack() as stack:
        three = readers(engine, stack, 3)
        taken: list[NDArray[np.float32]] = []
        first, second, third = three
        rows = engine.read_together(
            [
                first.part(TEXT[:9], wants_logits=False),
                second.part(OTHER[:4])._replace(take_rows=taken.append),
                third.part(TEXT[:1]),
            ]
        )
        assert rows[0] is None
        second.check(truth, rows[1])
        third.check(truth, rows[2])
        first.check(truth, engine.read_together([first.part([7])])[0])
        every = np.concatenate(taken)
        for index in range(4):
            assert np.array_equal(bits(every[index]), bits(truth(OTHER[: index + 1]).logits))


def test_bad_parts_change_nothing(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        good, bad = readers(engine, stack, 2)
        good.ids = TEXT[:5]
        good.sequence.prefill(TEXT[:5])
        for ids in ([], [10**9]):
            with pytest.raises(InputError):
                engine.read_together([Part(good.sequence, [1]), Part(bad.sequence, ids)])
        with pytest.raises(ShapeError, match="do not fit a pass"):
            engine.read_together(
                [Part(good.sequence, [1]), Part(bad.sequence, [1] * engine.chunk_tokens)]
            )
        with interrupt(monkeypatch, engine, "launch", 3):
            bad.sequence.prefill([1, 2])
        for ids in ([1], [1, 2]):
            with pytest.raises(StateError):
                engine.read_together([Part(good.sequence, [1]), Part(bad.sequence, ids)])
        good.check(truth, engine.read_together([good.part([7])])[0])


@pytest.mark.parametrize("ids", [[5], [5, 6]], ids=["steps", "prompts"])
def test_a_sequence_cannot_be_there_twice(engine: Engine, truth: Truth, ids: list[int]) -> None:
    with ExitStack() as stack:
        one, other = readers(engine, stack, 2)
        twice = [Part(one.sequence, ids), Part(other.sequence, [1]), Part(one.sequence, ids)]
        with pytest.raises(StateError, match="parts 1 and 3 are of one sequence"):
            engine.read_together(twice)
        one.check(truth, engine.read_together([one.part(TEXT[:3])])[0])


def test_a_sequence_of_another_engine_is_refused(
    engine: Engine, model: Path, device_name: str
) -> None:
    with open_engine(model, device=device_name) as other, other.sequence() as theirs:
        with pytest.raises(StateError, match="another engine"):
            engine.read_together([Part(theirs, [1])])
        with pytest.raises(StateError, match="another engine"):
            engine.score_together([(theirs, [[1]])])
        assert theirs.position == 0


def test_recorded_passes_are_forgotten_in_time(
    engine: Engine, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "MOST_GRAPHS", 2)
    with ExitStack() as stack:
        three = readers(engine, stack, 3)
        for _ in range(2):
            for reader in three:
                reader.check(truth, engine.read_together([reader.part([3])])[0])
                assert len(engine._decoder._recorded) <= 2
    assert not engine._decoder._recorded


def test_more_sequences_than_a_pass_has_rows(model: Path, device_name: str, truth: Truth) -> None:
    with open_engine(model, device=device_name, prefill=2) as small, ExitStack() as stack:
        five = readers(small, stack, 5)
        rows = small.read_together(reader.part([TEXT[index]]) for index, reader in enumerate(five))
        for reader, row in zip(five, rows, strict=True):
            reader.check(truth, row)


def test_a_row_of_another_sequence_would_be_seen(engine: Engine, truth: Truth) -> None:
    """The comparison of these tests catches rows that changed places."""
    with ExitStack() as stack:
        two = readers(engine, stack, 2)
        rows = engine.read_together([two[0].part(TEXT[:5]), two[1].part(OTHER[:5])])
        with pytest.raises(AssertionError):
            two[0].check(truth, rows[1])


def test_streamed_experts_come_to_all_rows_of_a_pass(separate: Path, device_name: str) -> None:
    """Passes of both kinds, steps in between, while the cache lends slots and adapts."""
    way = Way(ring=16, adapt=AdaptRules(every=1, swaps=4, decay=1.0))
    with (
        open_engine(separate, device=device_name) as resident,
        way.open(separate, device_name) as streamed,
        ExitStack() as stack,
    ):
        truth, three = Truth(resident), readers(streamed, stack, 3)
        for sizes in ((30, 20, 14), (1, 1, 1), (1, 40, 1), (1, 1, 1), (1, 1, 1), (20, 1, 1)):
            parts = [reader.part(TEXT[:size]) for reader, size in zip(three, sizes, strict=True)]
            for reader, row in zip(three, streamed.read_together(parts), strict=True):
                reader.check(truth, row)
        counts = streamed.residency_counts
        assert counts is not None
        assert (counts.windows, counts.swaps > 0) == (3, True)


def test_memory_is_planned_for_all_sequences(model: Path) -> None:
    with open_device("host") as device, load_model_file(model) as file:
        stream = device.stream("outline")
        one, three = (
            Outline(file, device, stream, Sizes(300, 64, count), Placement()).needs
            for count in (1, 3)
        )
        assert three.device - one.device == 2 * one.state
        stream.close()
