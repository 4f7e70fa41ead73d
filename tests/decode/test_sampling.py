"""Sampling against its definition written plainly, and its promises: order, ties, seeds, limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.decode.sampling import (
    Sampler,
    candidates,
    choose,
    draw,
    largest,
    penalize,
)
from strata_cli.errors import ConfigError, ShapeError, StrataError

Floats = NDArray[np.float32]

# Few different values, so that ties are common.
LOGITS = st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=1, max_size=40).map(
    lambda values: np.array(values, dtype=np.float32)
)
SAMPLERS = st.builds(
    Sampler,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_k=st.integers(-1, 12),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.83, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.2, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


def row(*values: float) -> Floats:
    return np.array(values, dtype=np.float32)


def plainly(logits: Floats, sampler: Sampler) -> dict[int, float]:
    """Temperature, top-k, top-p, min-p, one token at a time."""
    ranked = sorted(range(logits.size), key=lambda i: (-logits[i], i))
    if sampler.top_k > 0:
        ranked = ranked[: sampler.top_k]
    best = float(logits[ranked[0]])
    weights = [math.exp((float(logits[i]) - best) / sampler.temperature) for i in ranked]
    kept: dict[int, float] = {}
    before = 0.0
    for token_id, weight in zip(ranked, weights, strict=True):
        reached = bool(kept) and sampler.top_p < 1 and before >= sampler.top_p * sum(weights)
        if reached or weight < sampler.min_p:
            break
        kept[token_id] = weight
        before += weight
    return {token_id: weight / before for token_id, weight in kept.items()}


@given(logits=LOGITS, sampler=SAMPLERS)
def test_candidates_follow_the_definition(logits: Floats, sampler: Sampler) -> None:
    expected = plainly(logits, sampler)
    found = candidates(logits, sampler)
    if not sampler.is_greedy:
        assert found.ids.tolist() == list(expected)
        np.testing.assert_allclose(found.probs, list(expected.values()), rtol=1e-12)
    assert int(found.ids[0]) == next(iter(expected))


@given(logits=LOGITS, sampler=SAMPLERS, step=st.integers(0, 2**40))
def test_a_choice_is_a_candidate_and_repeats(logits: Floats, sampler: Sampler, step: int) -> None:
    chosen = choose(logits, sampler, step=step)
    assert chosen in candidates(logits, sampler).ids
    np.random.seed(step % 2**32)  # the global state must not matter
    assert choose(logits, sampler, step=step) == chosen


@given(logits=LOGITS)
def test_greedy_takes_the_first_of_the_highest(logits: Floats) -> None:
    best = min(i for i in range(logits.size) if logits[i] == logits.max())
    assert choose(logits, Sampler(), step=0) == best
    assert choose(logits, Sampler(temperature=1, top_k=1), step=3) == best
    assert choose(logits, Sampler(temperature=1, top_p=0), step=3) == best
    assert candidates(logits, Sampler()).ids.tolist() == [best]


@given(
    values=st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1e-40, 0.5, 3.0]), min_size=1),
    count=st.integers(1, 30),
)
def test_largest_ranks_by_value_then_index(values: list[float], count: int) -> None:
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert largest(row(*values), count).tolist() == expected


def test_draws_are_the_stated_numbers() -> None:
    # A seed that somebody wrote down must mean the same reply in every release.
    draws = [draw(0, 0), draw(0, 1), draw(1, 0), draw(2**64 - 1, 2**40)]
    assert draws == [
        0.011546754286331562,
        0.5023796042735054,
        0.3035680343067586,
        0.20353554039193045,
    ]


def test_draws_are_spread_evenly_over_steps_and_seeds() -> None:
    by_step = np.array([draw(7, step) for step in range(4000)])
    by_seed = np.array([draw(seed, 0) for seed in range(4000)])
    for numbers in (by_step, by_seed):
        counts, _ = np.histogram(numbers, bins=10, range=(0, 1))
        assert counts.sum() == 4000
        assert abs(counts - 400).max() < 80  # 4 standard deviations
    assert abs(np.corrcoef(by_step[:-1], by_step[1:])[0, 1]) < 0.06


def test_choices_follow_the_probabilities() -> None:
    logits, sampler = row(*np.log([0.5, 0.3, 0.15, 0.05])), Sampler(temperature=1, seed=11)
    chosen = [choose(logits, sampler, step=step) for step in range(4000)]
    shares = np.bincount(chosen, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_temperature_comes_before_top_p() -> None:
    logits = row(*np.log([0.6, 0.3, 0.1]))
    cold = candidates(logits, Sampler(temperature=0.25, top_p=0.9))
    assert cold.ids.tolist() == [0]  # 0.6**4 is 94 % of the tempered mass


def test_top_p_adds_up_within_top_k() -> None:
    logits = row(*np.log([0.4, 0.2, 0.2, 0.2]))
    sampler = Sampler(temperature=1, top_k=2, top_p=0.6)  # 0.4 is two thirds of what top-k left
    assert candidates(logits, sampler).ids.tolist() == [0]


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e-9, 1e300])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    found = candidates(row(1, 3, 2, -3e38), Sampler(temperature=temperature))
    assert found.ids[0] == 1
    assert found.probs.sum() == pytest.approx(1)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = row(-np.inf, 0, -np.inf, 0)
    found = candidates(logits, Sampler(temperature=100))
    assert found.ids.tolist() == [1, 3]


@given(logits=LOGITS, sampler=SAMPLERS, data=st.data())
def test_only_allowed_tokens_come(logits: Floats, sampler: Sampler, data: st.DataObject) -> None:
    allowed = data.draw(st.lists(st.integers(0, logits.size - 1), min_size=1))
    before = logits.copy()
    assert choose(logits, sampler, step=1, allowed=allowed) in allowed
    assert choose(logits, Sampler(), step=1, allowed=allowed) in allowed
    assert (logits == before).all()


def test_repetition_moves_seen_tokens_towards_less() -> None:
    sampler = Sampler(repetition_penalty=2)
    penalized = penalize(row(4, -4, 4, -4), sampler, [0, 1, 1])
    assert penalized.tolist() == [2, -8, 4, -4]


def test_frequency_counts_and_presence_does_not() -> None:
    sampler = Sampler(frequency_penalty=0.5, presence_penalty=0.25)
    penalized = penalize(row(1, 1, 1), sampler, [0, 1, 1])
    assert penalized.tolist() == [0.25, -0.25, 1]


@pytest.mark.parametrize(
    ("last_n", "expected"), [(0, [1, 1, 1]), (1, [1, 1, 0]), (2, [1, 0, 0]), (-1, [0, 0, 0])]
)
def test_penalties_look_back_as_far_as_told(last_n: int, expected: list[float]) -> None:
    sampler = Sampler(presence_penalty=1, penalty_last_n=last_n)
    assert penalize(row(1, 1, 1), sampler, [0, 1, 2]).tolist() == expected


def test_penalties_apply_to_greedy_choices_and_leave_the_logits_alone() -> None:
    logits = row(2, 1)
    assert choose(logits, Sampler(presence_penalty=1.5), step=0, history=[0]) == 1
    assert choose(logits, Sampler(presence_penalty=1.5), step=0) == 0
    assert logits.tolist() == [2, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_an_error(bad: float) -> None:
    for sampler in (Sampler(), Sampler(temperature=1)):
        with pytest.raises(StrataError, match="their maximum is"):
            choose(row(0, bad, 1), sampler, step=0)


def test_nothing_to_choose_from_is_an_error() -> None:
    with pytest.raises(StrataError, match="no token can come next"):
        choose(row(-np.inf, 0), Sampler(), step=0, allowed=[0])
    with pytest.raises(StrataError, match="no token can come next"):
        choose(row(0, 0), Sampler(), step=0, allowed=[])
    with pytest.raises(StrataError, match="no token can come next"):
        choose(row(-np.inf), Sampler(), step=0)


def test_shapes_and_ids_are_checked() -> None:
    with pytest.raises(ShapeError, match=r"got shape \[1, 2\]"):
        choose(np.zeros((1, 2), dtype=np.float32), Sampler(), step=0)
    with pytest.raises(ShapeError, match=r"got shape \[0\]"):
        choose(row(), Sampler(), step=0)
    with pytest.raises(ShapeError, match="allowed has token ids from 0 to 2"):
        choose(row(0, 0), Sampler(), step=0, allowed=[0, 2])
    with pytest.raises(ShapeError, match="history has token ids from -1"):
        choose(row(0, 0), Sampler(presence_penalty=1), step=0, history=[-1])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", 2),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("frequency_penalty", math.inf),
        ("presence_penalty", -101),
        ("penalty_last_n", -2),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be .*, got {value}") as caught:
        Sampler(**{name: value})
    assert caught.value.hint
