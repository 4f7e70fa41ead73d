"""One arithmetic: a token's bits depend on its prefix alone, however the tokens are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.state import StateHash
from strata_cli.engine.kernels.hash import FNV_OFFSET, fnv1a64
from tests.engine.passes import read_together
from tests.engine.readings import TEXT, Reading, assert_same, bits, cut, open_engine, read_in_parts
from tests.engine.strategies import EOS

COMPONENTS = ("gdn", "ple", "tail", "pooled", "kv", "ple_prev")


@pytest.mark.parametrize("chunk", [1, 3, 16, 33, 64, 192, 1024])
def test_the_chunk_does_not_change_a_bit(
    model: Path, device_name: str, whole: Reading, chunk: int
) -> None:
    with open_engine(model, device=device_name, prefill=chunk) as engine:
        assert engine.chunk_tokens == chunk
        assert_same(read_in_parts(engine, [TEXT]), whole)


def test_one_token_at_a_time_does_not_change_a_bit(engine: Engine, whole: Reading) -> None:
    with engine.sequence() as sequence:
        logits = np.stack([sequence.step(token) for token in TEXT])
        assert_same(Reading(logits, sequence.state_hash()), whole)


@settings(max_examples=6)
@given(sizes=st.lists(st.sampled_from([64, 129, 31, 5, 4, 2, 1]), min_size=2, max_size=6))
def test_any_cuts_do_not_change_a_bit(engine: Engine, whole: Reading, sizes: list[int]) -> None:
    assert_same(read_in_parts(engine, cut(TEXT, sizes)), whole)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_number_of_threads_does_not_change_a_bit(
    model: Path, device_name: str, whole: Reading, threads: int
) -> None:
    with open_engine(model, device=device_name, threads=threads) as engine:
        assert_same(read_in_parts(engine, [TEXT]), whole)


def test_the_size_of_the_context_does_not_change_a_bit(
    model: Path, device_name: str, whole: Reading
) -> None:
    """The last context ends exactly with the text, inside an index block."""
    assert len(TEXT[:-1]) % 4
    with open_engine(model, device=device_name, context=len(TEXT) - 1) as engine:
        reading = read_in_parts(engine, [TEXT[:-1]])
        assert np.array_equal(bits(reading.logits), bits(whole.logits[:-1]))


def test_prefill_returns_the_rows_asked_for(engine: Engine, whole: Reading) -> None:
    with engine.sequence() as sequence:
        assert np.array_equal(sequence.prefill(TEXT), whole.logits[-1])
    with engine.sequence() as sequence:
        assert sequence.prefill(TEXT, logits="none").shape == (0,)
        assert sequence.state_hash() == whole.state
        assert sequence.ids == tuple(TEXT)
        assert sequence.position == len(TEXT)


def test_progress_counts_the_tokens_chunk_by_chunk(model: Path) -> None:
    calls: list[tuple[int, int]] = []
    opened = open_engine(model, device="host", prefill=100)
    with opened as engine, engine.sequence() as sequence:
        sequence.prefill(TEXT, progress=lambda *call: calls.append(call))
    assert calls == [(100, 260), (200, 260), (260, 260)]


def test_sequences_in_one_batch_are_as_each_alone(engine: Engine) -> None:
    """One goes on, one begins with a single token, one begins with many."""
    texts = [TEXT[:90], TEXT[9:10], TEXT[100:177]]
    alone = [read_in_parts(engine, [ids]) for ids in texts]
    with engine.sequence() as one, engine.sequence() as two, engine.sequence() as three:
        one.prefill(texts[0][:37], logits="none")
        parts = [(one, texts[0][37:]), (two, texts[1]), (three, texts[2])]
        together = read_together(engine, parts)
        for (sequence, ids), logits, expected in zip(parts, together, alone, strict=True):
            assert np.array_equal(bits(logits), bits(expected.logits[-len(ids) :]))
            assert sequence.state_hash() == expected.state


def test_steps_of_sequences_in_one_batch_are_as_each_alone(engine: Engine) -> None:
    texts = [TEXT[:40], TEXT[50:61]]
    alone = [read_in_parts(engine, [ids]) for ids in texts]
    with engine.sequence() as one, engine.sequence() as two:
        one.prefill(texts[0][:30], logits="none")
        two.prefill(texts[1][:1], logits="none")
        for step in range(10):
            rows = read_together(
                engine, [(two, [texts[1][1 + step]]), (one, [texts[0][30 + step]])]
            )
            assert np.array_equal(rows[0][0], alone[1].logits[1 + step])
            assert np.array_equal(rows[1][0], alone[0].logits[30 + step])
        assert (one.state_hash(), two.state_hash()) == (alone[0].state, alone[1].state)


def test_a_token_that_differs_shows_in_every_component(engine: Engine) -> None:
    """Position 101: inside an incomplete index block, with complete ones before it."""
    ids = TEXT[:102]
    states = [read_in_parts(engine, [[*ids[:at], 7, *ids[at + 1 :]]]).state for at in (99, 101)]
    base = read_in_parts(engine, [ids]).state
    assert base.position == 102
    # The last two tokens are what n-grams look back on; the last block is the tail alone.
    assert differing(base, states[0]) == {"gdn", "ple", "tail", "pooled", "kv"}
    assert differing(base, states[1]) == {"gdn", "ple", "tail", "kv", "ple_prev"}


def test_pooled_keys_count_by_complete_blocks_and_the_tail_is_the_rest(engine: Engine) -> None:
    """Blocks of four: nothing hashed leaves the hash where it starts."""
    with engine.sequence() as sequence:
        states = []
        for token in TEXT[:8]:
            sequence.step(token)
            states.append(sequence.state_hash())
    assert [state.tail == FNV_OFFSET for state in states] == [False, False, False, True] * 2
    pooled = [state.pooled for state in states]
    assert pooled[:3] == [FNV_OFFSET] * 3
    assert pooled[3:7] == [pooled[3]] * 4
    assert len({FNV_OFFSET, pooled[3], pooled[7]}) == 3


def test_the_state_of_no_tokens_is_that_of_a_new_sequence(engine: Engine) -> None:
    with engine.sequence() as new, engine.sequence() as used:
        used.prefill(TEXT)
        used.reset()
        assert used.state_hash() == new.state_hash()
        assert (used.position, used.ids) == (0, ())
        assert new.state_hash().ple_prev == fnv1a64(np.array([EOS, EOS], dtype=np.int32))


def differing(a: StateHash, b: StateHash) -> set[str]:
    return {name for name in COMPONENTS if getattr(a, name) != getattr(b, name)}
