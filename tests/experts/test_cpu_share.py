"""Which experts the host's processor takes, and when it takes any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_cli.engine.experts.cpu_share import (
    FIRST_SHARE,
    LEAST_SHARE,
    MOST_EXPERT_TOKENS,
    MOST_PAIRS,
    MOST_SHARE,
    PROBE_LAYERS,
    LayerTimes,
    ShareGate,
    choose_shared,
)


def run(gate: ShareGate, layers: int, *, link_us: float, cpu_us: float) -> list[float]:
    """The shares of so many layers of 100 experts, on a machine of these costs per expert."""
    shares = []
    for _ in range(layers):
        share = gate.next_share()
        shared = round(share * 100)
        link, cpu = (100 - shared) * link_us, shared * cpu_us
        times = LayerTimes(
            streamed=100 - shared,
            shared=shared,
            all_us=max(link, cpu) + 10,
            link_us=link + 5,
            cpu_us=cpu,
        )
        gate.add(times)
        shares.append(share)
    return shares


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_fixed_share_is_every_layers(share: float) -> None:
    gate = ShareGate(share)
    assert run(gate, 5, link_us=1, cpu_us=100) == [share] * 5
    assert gate.is_open == (share > 0)
    assert not gate.measures


def test_the_gate_opens_where_it_pays_and_balances_both_sides() -> None:
    gate = ShareGate(None)
    shares = run(gate, 200, link_us=50, cpu_us=50)
    assert shares[:3] == [0.0, FIRST_SHARE, 0.0]
    assert gate.is_open
    assert gate.share == pytest.approx(0.5, abs=0.02)
    late = shares[20:]
    assert late.count(0.0) == len([n for n in range(21, 201) if n % PROBE_LAYERS == 0])


def test_the_gate_closes_where_it_does_not_pay_and_asks_again_now_and_then() -> None:
    gate = ShareGate(None)
    shares = run(gate, 200, link_us=1, cpu_us=100)
    assert not gate.is_open
    late = shares[20:]
    assert late.count(0.0) == len(late) - len([n for n in range(21, 201) if n % PROBE_LAYERS == 0])
    run(gate, 4 * PROBE_LAYERS, link_us=100, cpu_us=1)
    assert gate.is_open


def test_shares_stay_within_bounds() -> None:
    gate = ShareGate(None)
    run(gate, 300, link_us=1000, cpu_us=1)
    assert gate.share == MOST_SHARE
    gate = ShareGate(None)
    run(gate, 12, link_us=1, cpu_us=1000)
    assert gate.share == LEAST_SHARE


def test_a_layer_without_experts_teaches_nothing() -> None:
    gate = ShareGate(None)
    before = vars(gate).copy()
    gate.add(LayerTimes(streamed=0, shared=0, all_us=9, link_us=9, cpu_us=0))
    assert vars(gate) == before


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_those_of_fewest_tokens_are_chosen(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 200))
    counts = np.array(data.draw(st.lists(st.integers(0, 30), min_size=size, max_size=size)))
    may_be = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    share = data.draw(st.floats(0, 1))
    num_streamed = int((counts > 0).sum())
    chosen = choose_shared(counts, may_be, num_streamed, share)
    assert len(chosen) <= round(share * num_streamed)
    assert (np.diff(chosen) > 0).all()
    assert may_be[chosen].all()
    assert ((counts[chosen] > 0) & (counts[chosen] <= MOST_EXPERT_TOKENS)).all()
    assert counts[chosen].sum() <= MOST_PAIRS
    left = np.setdiff1d(np.flatnonzero(may_be & (counts > 0)), chosen)
    if chosen.size and left.size:
        assert counts[left].min() >= counts[chosen].max()


def test_no_more_pairs_are_chosen_than_there_is_room_for() -> None:
    counts = np.full(200, MOST_EXPERT_TOKENS)
    chosen = choose_shared(counts, np.ones(200, np.bool_), 200, 1.0)
    assert len(chosen) == MOST_PAIRS // MOST_EXPERT_TOKENS
