"""The adaptive tier's rules: which pairs change places, and how many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.experts.adapting import (
    HIGH_BAR,
    LOW_BAR,
    STATIC,
    AdaptRules,
    Returns,
    plan_swaps,
)


def plan(
    counts: list[list[float]], slots: list[list[int]], most: int = 99
) -> list[tuple[int, int]]:
    slot_of = np.array(slots, np.int32)
    everything = np.ones(slot_of.shape, np.bool_)
    swaps = plan_swaps(np.array(counts, np.float32), slot_of, everything, most)
    return list(zip(swaps.pairs.tolist(), swaps.slots.tolist(), strict=True))


def test_the_most_used_outside_takes_the_slot_of_the_least_used_inside() -> None:
    assert plan([[0.5, 3.0, 0.0, 7.0]], [[0, -1, 1, -1]]) == [(3, 1), (1, 0)]


def test_a_candidate_needs_two_windows() -> None:
    assert plan([[0.0, 2.0]], [[0, -1]]) == [(1, 0)]
    assert plan([[0.0, 1.99]], [[0, -1]]) == []


def test_a_swap_must_gain_one_and_a_half() -> None:
    assert plan([[1.0, 2.5]], [[0, -1]]) == [(1, 0)]
    assert plan([[1.25, 2.5]], [[0, -1]]) == []


def test_layers_keep_their_slots() -> None:
    assert plan([[0.0, 9.0], [0.0, 9.0]], [[0, 1], [-1, -1]]) == []


def test_the_swaps_of_all_layers_that_gain_most_come_first() -> None:
    counts = [[0.0, 3.0, 2.0, 0.0], [1.0, 9.0, 2.0, 0.0]]
    slots = [[0, -1, -1, 1], [2, -1, -1, -1]]
    assert plan(counts, slots) == [(5, 2), (1, 0), (2, 1)]
    assert plan(counts, slots, most=2) == [(5, 2), (1, 0)]
    assert plan(counts, slots, most=0) == []


def test_equal_counts_go_by_id() -> None:
    assert plan([[0.0, 0.0, 4.0, 4.0]], [[1, 0, -1, -1]], most=1) == [(2, 1)]


def test_pairs_that_may_not_come_stay_outside() -> None:
    may_come = np.array([[True, False, True]])
    slot_of = np.array([[0, -1, -1]], np.int32)
    swaps = plan_swaps(np.array([[0, 9, 5]], np.float32), slot_of, may_come, 9)
    assert swaps.pairs.tolist() == [2]


@settings(max_examples=50)
@given(data=st.data())
def test_plans_obey_the_rules(data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    counts = rng.integers(0, 12, shape).astype(np.float32) / np.float32(2)
    slot_of = _some_slots(rng, shape)
    may_come = rng.random(shape) < 0.8
    most, bar = data.draw(st.integers(0, 12)), data.draw(st.sampled_from([HIGH_BAR, LOW_BAR]))
    pairs, slots = plan_swaps(counts, slot_of, may_come, most, bar)
    assert len(set(pairs.tolist())) == len(set(slots.tolist())) == len(pairs) <= most
    gains = []
    for pair, slot in zip(pairs.tolist(), slots.tolist(), strict=True):
        layer, expert = divmod(pair, shape[1])
        ((victim_layer, victim),) = np.argwhere(slot_of == slot)
        assert victim_layer == layer
        assert slot_of[layer, expert] < 0
        assert may_come[layer, expert]
        assert counts[layer, expert] >= bar.windows
        gains.append(counts[layer, expert] - counts[layer, victim])
    assert all(gain >= bar.gain for gain in gains)
    assert gains == sorted(gains, reverse=True)


def some(*values: float) -> NDArray[np.float32]:
    return np.array([values], np.float32)


def test_the_bar_is_high_until_something_was_worthwhile() -> None:
    returns = Returns()
    assert returns.bar(some(5, 5)) == HIGH_BAR
    returns.watch(np.array([0]), np.array([1]), some(2, 0))
    assert returns.bar(some(3, 0)) == LOW_BAR


@pytest.mark.parametrize(
    ("counts", "bar"),
    [
        (some(2, 2, 0, 0), HIGH_BAR),  # none of the two that came was used
        (some(3, 2, 0, 0), LOW_BAR),  # one was
        (some(3, 2, 0, 1), HIGH_BAR),  # but so was one that had to leave
        (some(3, 3, 0, 1), LOW_BAR),
    ],
)
def test_what_came_must_be_used_more_than_what_left(
    counts: NDArray[np.float32], bar: tuple[float, float]
) -> None:
    returns = Returns()
    returns.watch(np.array([0, 1]), np.array([2, 3]), some(2, 2, 0, 0))
    assert returns.bar(counts) == bar


def test_what_rounds_were_worth_is_forgotten() -> None:
    returns, nothing = Returns(), np.empty(0, np.int64)
    returns.watch(np.array([0]), nothing, some(0, 0))
    bars = [returns.bar(some(1, 0))]
    for _ in range(4):
        returns.watch(np.array([1]), nothing, some(0, 0))
        bars.append(returns.bar(some(0, 0)))
    assert bars == [LOW_BAR, LOW_BAR, LOW_BAR, HIGH_BAR, HIGH_BAR]


def test_a_low_bar_brings_what_was_used_once() -> None:
    slot_of, everything = np.array([[0, -1]], np.int32), np.ones((1, 2), np.bool_)
    counts = some(0, 1)
    assert plan_swaps(counts, slot_of, everything, 9, LOW_BAR).pairs.tolist() == [1]
    assert not plan_swaps(counts, slot_of, everything, 9).pairs.size


def _some_slots(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.int32]:
    slot_of = np.full(shape, -1, np.int32)
    inside = np.flatnonzero(rng.random(shape) < 0.5)
    slot_of.reshape(-1)[inside] = rng.permutation(inside.size)
    return slot_of


@pytest.mark.parametrize(
    ("rules", "link_gbps", "swaps"),
    [
        (AdaptRules(), 25.0, 96),
        (AdaptRules(), 50.0, 192),
        (AdaptRules(), 0.5, 8),
        (AdaptRules(), 0.0, 96),
        (AdaptRules(swaps=5), 50.0, 5),
        (AdaptRules(swaps=0), 50.0, 0),
    ],
)
def test_the_link_says_how_many_swaps_a_round_has(
    rules: AdaptRules, link_gbps: float, swaps: int
) -> None:
    assert rules.most_swaps(link_gbps) == swaps


def test_without_rounds_or_swaps_experts_keep_their_places() -> None:
    assert STATIC.is_static
    assert AdaptRules(swaps=0).is_static
    assert not AdaptRules().is_static
