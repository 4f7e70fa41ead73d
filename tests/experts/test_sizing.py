"""Slots of caches and rings: what fits, and what the rules ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.experts.sizing import (
    RingNeeds,
    RingRules,
    cache_bytes,
    ring_slots,
    slots_that_fit,
)

Q2_0_BLOB, IQ3_S_BLOB = 1_382_400, 2_329_600
GIB = 1 << 30


@given(
    budget=st.integers(0, 10**12),
    slot=st.integers(1, 40_000).map(lambda n: 256 * n),
    pairs=st.integers(1, 30_000),
)
def test_as_many_slots_as_fit_and_no_more(budget: int, slot: int, pairs: int) -> None:
    slots = slots_that_fit(budget, slot, pairs)
    assert 0 <= slots <= pairs
    assert slots == 0 or cache_bytes(slots, slot, pairs) <= budget
    assert slots == pairs or cache_bytes(slots + 1, slot, pairs) > budget - 1024


def test_a_full_model_in_24_gib() -> None:
    assert slots_that_fit(24 * GIB, Q2_0_BLOB, 24_576) == 18_641
    assert slots_that_fit(80 * GIB, Q2_0_BLOB, 24_576) == 24_576
    assert slots_that_fit(0, Q2_0_BLOB, 24_576) == 0


USUAL = RingNeeds(
    chunk_tokens=2_048,
    slot_bytes=Q2_0_BLOB,
    pinned_share=1.0,
    num_entries=20_000,
    room_bytes=8 * GIB,
)


@pytest.mark.parametrize(
    ("rules", "needs", "slots"),
    [
        (RingRules(), {}, 512),
        (RingRules(), {"chunk_tokens": 511}, 8),
        (RingRules(), {"chunk_tokens": 511, "selects": True}, 64),
        (RingRules(), {"chunk_tokens": 511, "selects": True, "slot_bytes": 40_000_000}, 16),
        (RingRules(slots=100), {"chunk_tokens": 65, "selects": True}, 100),
        (RingRules(slots=8), {"chunk_tokens": 65, "selects": True}, 8),
        (RingRules(), {"chunk_tokens": 65, "selects": True, "room_bytes": 0}, 8),
        (RingRules(), {"chunk_tokens": 512}, 384),
        (RingRules(), {"chunk_tokens": 767, "slot_bytes": IQ3_S_BLOB}, 227),
        (RingRules(), {"chunk_tokens": 768, "slot_bytes": IQ3_S_BLOB}, 455),
        (RingRules(stream_min=0), {"chunk_tokens": 1}, 384),
        (RingRules(stream_min=2_048), {"chunk_tokens": 2_047}, 8),
        (RingRules(slots=8), {}, 8),
        (RingRules(slots=9), {}, 16),
        (RingRules(slots=100), {}, 100),
        (RingRules(slots=10_000), {}, 512),
        (RingRules(), {"slot_bytes": IQ3_S_BLOB}, 455),
        (RingRules(), {"pinned_share": 0.9}, 512),
        (RingRules(), {"pinned_share": 0.89}, 96),
        (RingRules(), {"pinned_share": 0.5, "slot_bytes": IQ3_S_BLOB}, 56),
        (RingRules(), {"slot_bytes": IQ3_S_BLOB, "chunk_tokens": 3_071}, 455),
        (RingRules(), {"slot_bytes": IQ3_S_BLOB, "chunk_tokens": 3_072}, 512),
        (RingRules(), {"slot_bytes": 3 * IQ3_S_BLOB, "chunk_tokens": 8_192}, 303),
        (RingRules(), {"chunk_tokens": 8_192, "room_bytes": 100 * Q2_0_BLOB}, 100),
        (RingRules(), {"chunk_tokens": 8_192, "pinned_share": 0.5}, 96),
        (RingRules(budget_bytes=0), {"chunk_tokens": 8_192}, 384),
        (RingRules(budget_bytes=0), {"slot_bytes": IQ3_S_BLOB}, 384),
        (RingRules(budget_bytes=0), {"slot_bytes": IQ3_S_BLOB, "pinned_share": 0.1}, 96),
        (RingRules(), {"slot_bytes": 4_096}, 512),
        (RingRules(), {"slot_bytes": 400_000_000, "room_bytes": 100 * GIB}, 16),
        (RingRules(), {"num_entries": 40}, 40),
        (RingRules(), {"num_entries": 3}, 16),
        (RingRules(), {"room_bytes": 100 * Q2_0_BLOB}, 100),
        (RingRules(), {"room_bytes": 16 * Q2_0_BLOB - 1}, 8),
        (RingRules(slots=100), {"room_bytes": 0}, 8),
    ],
)
def test_the_ring_follows_the_rules(rules: RingRules, needs: dict[str, float], slots: int) -> None:
    assert ring_slots(rules, replace(USUAL, **needs)) == slots  # type: ignore[arg-type]  # by name


@given(
    rules=st.builds(
        RingRules,
        stream_min=st.integers(0, 4096),
        slots=st.integers(0, 2000),
        budget_bytes=st.integers(0, GIB),
    ),
    needs=st.builds(
        RingNeeds,
        chunk_tokens=st.integers(1, 9000),
        slot_bytes=st.integers(1, 10**7),
        pinned_share=st.floats(0, 1),
        num_entries=st.integers(0, 30_000),
        room_bytes=st.integers(0, GIB),
        selects=st.booleans(),
    ),
)
def test_a_ring_is_small_or_of_a_useful_size_that_fits(rules: RingRules, needs: RingNeeds) -> None:
    slots = ring_slots(rules, needs)
    assert slots == 8 or 16 <= slots <= 512
    assert slots == 8 or slots * needs.slot_bytes <= needs.room_bytes
