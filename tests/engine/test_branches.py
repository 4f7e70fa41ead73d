"""Branches: many suffixes of one prefix in one batch, each as if it had been read alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_cli.engine.engine import Engine
from strata_cli.engine.prefill.branches import plan_batches
from strata_cli.errors import InputError
from tests.engine.readings import CONTEXT, TEXT, Truth, bits, open_engine
from tests.engine.strategies import VOCAB

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


def test_a_suffix_longer_than_a_pass_is_read_in_several(model: Path, truth: Truth) -> None:
    suffixes = [TEXT[:3], TEXT[20:120], TEXT[3:9], TEXT[50:66], TEXT[7:8]]
    with open_engine(model, prefill=16) as engine, engine.sequence() as sequence:
        sequence.prefill(TEXT[:33])
        for suffix, row in zip(suffixes, sequence.score(suffixes), strict=True):
            assert np.array_equal(bits(row), bits(truth(TEXT[:33] + suffix).logits))
        assert sequence.position == 33


def test_sixteen_suffixes_have_as_many_rows(engine: Engine, truth: Truth) -> None:
    suffixes = [TEXT[i : i + 16] for i in range(16)]
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:200])
        rows = sequence.score(suffixes)
        assert len({row.tobytes() for row in rows}) == 16
        for suffix, row in zip(suffixes, rows, strict=True):
            assert np.array_equal(bits(row), bits(truth(TEXT[:200] + suffix).logits))
        assert sequence.score([]) == []


def test_a_branch_from_a_wrong_position_shows(engine: Engine, truth: Truth) -> None:
    """What the other tests compare would not stay equal by chance."""
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:40])
        sequence._state.ids.pop()
        row = sequence.score([TEXT[40:50]])[0]
        assert not np.array_equal(bits(row), bits(truth(TEXT[:50]).logits))


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
