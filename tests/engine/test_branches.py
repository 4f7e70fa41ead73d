"""Branches: many suffixes of one prefix in one batch, each as if it had been read alone."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_cli.engine.cancelling import Cancellation
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.prefill.branches import plan_batches
from strata_cli.errors import InputError, StateError
from tests.engine.readings import CONTEXT, TEXT, Truth, bits, open_engine
from tests.engine.strategies import VOCAB
from tests.engine.streams import WAYS, streamer_of
from tests.model.tiny_model import write_tiny_model

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@settings(max_examples=15)
@given(position=st.sampled_from([0, 1, 2, 5, 40, 63, 130]), lengths=LENGTHS)
def test_each_suffix_is_as_if_read_alone(
    engine: Engine, truth: Truth, position: int, lengths: list[int]
) -> None:
    prefix = TEXT[:position]
    suffixes = [TEXT[7 * i + n : 7 * i + 2 * n] for i, n in enumerate(lengths)]
    with engine.sequence() as sequence:
        if prefix:
            sequence.prefill(prefix)
        before = sequence.state_hash()
        rows = sequence.score(suffixes)
        assert sequence.state_hash() == before
        for suffix, row in zip(suffixes, rows, strict=True):
            assert np.array_equal(bits(row), bits(truth(prefix + suffix).logits))
        logits = sequence.prefill(TEXT[position : position + 9])
        assert np.array_equal(bits(logits), bits(truth(TEXT[: position + 9]).logits))


def test_a_suffix_longer_than_a_pass_is_read_in_several(
    model: Path, device_name: str, truth: Truth
) -> None:
    suffixes = [TEXT[:3], TEXT[20:120], TEXT[3:9], TEXT[50:66], TEXT[7:8]]
    opened = open_engine(model, device=device_name, prefill=16)
    with opened as engine, engine.sequence() as sequence:
        sequence.prefill(TEXT[:33])
        for suffix, row in zip(suffixes, sequence.score(suffixes), strict=True):
            assert np.array_equal(bits(row), bits(truth(TEXT[:33] + suffix).logits))
        assert sequence.position == 33


def test_all_rows_of_suffixes_are_told(model: Path, device_name: str, truth: Truth) -> None:
    suffixes = [TEXT[:3], TEXT[20:45], TEXT[3:9], TEXT[7:8]]
    opened = open_engine(model, device=device_name, prefill=16)
    with opened as engine, engine.sequence() as sequence:
        sequence.prefill(TEXT[:33])
        for suffix, rows in zip(suffixes, sequence.score(suffixes, logits="all"), strict=True):
            assert rows.shape[0] == len(suffix)
            for stop, row in enumerate(rows, 1):
                expected = truth(TEXT[:33] + suffix[:stop]).logits
                assert np.array_equal(bits(row), bits(expected))


def test_branches_of_several_sequences_share_passes(
    model: Path, device_name: str, truth: Truth
) -> None:
    groups = [(TEXT[:33], [TEXT[:3], TEXT[20:45]]), (TEXT[9:20], []), (TEXT[5:70], [TEXT[3:9]])]
    opened = open_engine(model, device=device_name, prefill=16)
    with opened as engine, ExitStack() as stack:
        sequences = [stack.enter_context(engine.sequence()) for _ in groups]
        for sequence, (prefix, _) in zip(sequences, groups, strict=True):
            sequence.prefill(prefix, logits="none")
        suffixes = [suffixes for _, suffixes in groups]
        for _ in range(2):
            rows = engine.score_together(zip(sequences, suffixes, strict=True))
            for (prefix, of_group), found in zip(groups, rows, strict=True):
                expected = [truth(prefix + suffix).logits for suffix in of_group]
                assert list(map(bits_of, found)) == list(map(bits_of, expected))
        assert [sequence.position for sequence in sequences] == [33, 11, 65]


def bits_of(row: Any) -> bytes:
    return bytes(bits(row).tobytes())


def test_sixteen_suffixes_have_as_many_rows(engine: Engine, truth: Truth) -> None:
    suffixes = [TEXT[i : i + 16] for i in range(16)]
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:200])
        rows = sequence.score(suffixes)
        assert len({row.tobytes() for row in rows}) == 16
        for suffix, row in zip(suffixes, rows, strict=True):
            assert np.array_equal(bits(row), bits(truth(TEXT[:200] + suffix).logits))
        assert sequence.score([]) == []


@pytest.mark.parametrize(
    "dims",
    [
        {"gdn_conv": 1, "ple_conv": 1},
        {"recurrent": (False, False), "layers": 2, "ple_layer": None},
        {"recurrent": (True, True), "layers": 2, "ple_layer": 0},
        {"ratio": None, "recurrent": (True, False), "layers": 2, "ple_layer": None},
    ],
    ids=["no memory of the convolutions", "attention alone", "recurrent alone", "dense"],
)
def test_models_of_other_parts(tmp_path: Path, device_name: str, dims: dict[str, Any]) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", **dims)
    suffixes = [TEXT[40:43], TEXT[50:51], TEXT[60:69]]
    opened = open_engine(path, device=device_name, context=64)
    with opened as engine, engine.sequence() as sequence:
        sequence.prefill(TEXT[:21])
        rows = sequence.score(suffixes)
        own = Truth(engine)
        for suffix, row in zip(suffixes, rows, strict=True):
            assert np.array_equal(bits(row), bits(own(TEXT[:21] + suffix).logits))


@pytest.mark.parametrize("way", ["routed", "no cache, ring of its own"])
def test_experts_may_be_streamed(separate: Path, device_name: str, way: str) -> None:
    suffixes = [TEXT[i : i + 10] for i in range(20)]
    with (
        open_engine(separate, device=device_name, prefill=64) as engine,
        engine.sequence() as sequence,
    ):
        sequence.prefill(TEXT[:70])
        resident = sequence.score(suffixes)
    with (
        WAYS[way].open(separate, device_name) as engine,
        engine.sequence() as sequence,
        engine.sequence() as other,
    ):
        sequence.prefill(TEXT[:70])
        for row, expected in zip(sequence.score(suffixes), resident, strict=True):
            assert np.array_equal(bits(row), bits(expected))
        other.prefill(TEXT[:70])
        groups = [(other, suffixes[1:]), (sequence, suffixes[:1])]
        rest, first = engine.score_together(groups)
        for row, expected in zip([*first, *rest], resident, strict=True):
            assert np.array_equal(bits(row), bits(expected))
        assert streamer_of(engine).counts


def test_branches_are_not_in_the_residual_dump(model: Path, tmp_path: Path) -> None:
    dumps = [tmp_path / "a", tmp_path / "b"]
    for dump, suffixes in zip(dumps, ([], [TEXT[:70], TEXT[5:9]]), strict=True):
        options = EngineOptions(model=model, device="host", prefill_dump_r=dump)
        with Engine.open(options) as engine, engine.sequence() as sequence:
            sequence.prefill(TEXT[:70])
            sequence.score(suffixes)
    assert dumps[0].read_bytes() == dumps[1].read_bytes()


def test_a_branch_from_a_wrong_position_shows(engine: Engine, truth: Truth) -> None:
    """What the other tests compare would not stay equal by chance."""
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:40])
        sequence._state.ids.pop()
        row = sequence.score([TEXT[40:50]])[0]
        assert not np.array_equal(bits(row), bits(truth(TEXT[:50]).logits))


class InterruptingCheck(Cancellation):
    """Ctrl-C as a read looks whether it is to end, behind so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._looks = looks

    def check(self) -> None:
        if not self._looks:
            raise KeyboardInterrupt
        self._looks -= 1


@pytest.mark.parametrize("passes", [1, 2])
def test_nothing_goes_on_behind_a_part_of_a_long_suffix(
    model: Path, device_name: str, truth: Truth, passes: int
) -> None:
    """A suffix of several passes moves its sequence until the last one is over."""
    prefix, suffix = TEXT[:20], TEXT[20:70]
    opened = open_engine(model, device=device_name, prefill=16)
    with opened as engine, engine.sequence() as sequence:
        sequence.prefill(prefix)
        snapshot = sequence.snapshot()
        with pytest.raises(KeyboardInterrupt):
            sequence.score([suffix], cancellation=InterruptingCheck(1 + passes))
        with pytest.raises(StateError, match="interrupted"):
            sequence.score([TEXT[:3]])
        sequence.restore(snapshot)
        (row,) = sequence.score([suffix])
        assert np.array_equal(bits(row), bits(truth(prefix + suffix).logits))
        assert sequence.position == len(prefix)


def test_snapshots_behind_the_position_are_used_up(engine: Engine) -> None:
    with engine.sequence() as sequence:
        start = sequence.snapshot()
        sequence.prefill(TEXT[:20])
        late = sequence.snapshot()
        sequence.restore(start)
        sequence.score([TEXT[:2]])
        assert not sequence.can_restore(late)


@pytest.mark.parametrize(
    ("suffixes", "match"),
    [
        ([[1], []], "suffix 2 has no tokens"),
        ([[1], [2], [VOCAB]], f"suffix 3: token id {VOCAB} "),
        ([[1] * CONTEXT], f"suffix 1: {CONTEXT + 5} tokens do not fit the context of {CONTEXT}"),
    ],
)
def test_a_wrong_suffix_is_named(engine: Engine, suffixes: list[list[int]], match: str) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:5])
        with pytest.raises(InputError, match=match):
            sequence.score(suffixes)
        assert sequence.position == 5


@given(lengths=st.lists(st.integers(1, 40), max_size=30), most=st.integers(1, 60))
def test_batches_keep_the_order_and_the_room(lengths: list[int], most: int) -> None:
    batches = list(plan_batches(lengths, most))
    assert [index for batch in batches for index in batch] == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[index] for index in batch) <= most
