"""Snapshots: a restored sequence goes on as if nothing had happened, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.forward.state import Snapshot
from strata_cli.errors import StateError
from tests.engine.readings import TEXT, Reading, Truth, bits
from tests.engine.strategies import EOS, VOCAB

TOKENS = st.lists(st.sampled_from([3, EOS]), min_size=1, max_size=9)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), TOKENS),
        st.tuples(st.just("step"), TOKENS),
        st.tuples(st.just("snapshot"), st.none()),
        st.tuples(st.just("restore"), st.integers(0, 9)),
        st.tuples(st.just("restore"), st.integers(0, 9)),
        st.tuples(st.just("reset"), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=30)
@given(operations=OPERATIONS)
def test_a_restored_sequence_goes_on_as_if_nothing_had_happened(
    engine: Engine, truth: Truth, operations: list[tuple[str, Any]]
) -> None:
    """Of two tokens only, so that branches often repeat what was read before."""
    with engine.sequence() as sequence:
        live: list[int] = []  # tokens whose K/V rows are there
        snapshots: list[Snapshot] = [sequence.snapshot()]
        for name, value in operations:
            ids = list(sequence.ids)
            if name in ("read", "step"):
                logits = read_as(sequence, name, value)
                live = ids + value
                assert np.array_equal(bits(logits), bits(truth(live).logits))
            elif name == "snapshot":
                snapshots.append(sequence.snapshot())
                assert snapshots[-1].position == sequence.position
            elif name == "reset":
                sequence.reset()
                live = []
            else:
                wanted = snapshots[value % len(snapshots)]
                if live[: wanted.position] == list(wanted.ids):
                    sequence.restore(wanted)
                    assert sequence.ids == wanted.ids
                else:
                    with pytest.raises(StateError, match=f"at position {wanted.position} "):
                        sequence.restore(wanted)
                    assert sequence.ids == tuple(ids)
            assert sequence.state_hash() == truth(list(sequence.ids)).state


def read_as(sequence: Sequence, name: str, ids: list[int]) -> NDArray[np.float32]:
    if name == "read":
        return sequence.prefill(ids)
    return [sequence.step(token) for token in ids][-1]


@pytest.mark.parametrize("position", [0, 1, 40, 41, 130, 259])
def test_a_snapshot_resumes_at_any_position(engine: Engine, whole: Reading, position: int) -> None:
    with engine.sequence() as sequence:
        if position:
            sequence.prefill(TEXT[:position])
        snapshot = sequence.snapshot()
        for other in (TEXT[position:], TEXT[::-1][:50]):  # the same again, then another branch
            sequence.prefill(other)
            sequence.restore(snapshot)
        logits = sequence.prefill(TEXT[position:], logits="all")
        assert np.array_equal(bits(logits), bits(whole.logits[position:]))
        assert sequence.state_hash() == whole.state


def test_a_snapshot_whose_keys_were_overwritten_is_refused(engine: Engine) -> None:
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:10])
        early = sequence.snapshot()
        sequence.prefill(TEXT[10:20])
        late = sequence.snapshot()
        sequence.restore(early)
        sequence.restore(late)  # nothing was read in between
        sequence.restore(early)
        sequence.step((TEXT[10] + 1) % VOCAB)
        with pytest.raises(StateError, match="position 20 is no longer a prefix"):
            sequence.restore(late)
        assert sequence.position == 11
        sequence.restore(early)
        assert sequence.position == 10
