"""Copy orders, and how much they save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from strata_cli.engine.experts.depth import LEAST_AUTO_DEPTH, MOST_DEPTH, AutoDepth, FixedDepth
from strata_cli.engine.experts.order import (
    LIKELY_TOKENS,
    by_score,
    count_likely,
    expected_use,
    oracle,
)
from strata_cli.errors import ConfigError, ShapeError
from tests.experts.cases import plain_case
from tests.experts.simulator import simulate

SCORES = np.array([[0.1, 0.4, 0.4, 0.0, 0.3, 0.2], [0, 0, 0, 0, 0, 1.0]], np.float32)


def test_the_likeliest_come_first_and_equals_by_id() -> None:
    assert by_score(SCORES).tolist() == [[1, 2, 4, 5, 0, 3], [5, 0, 1, 2, 3, 4]]


def test_classes_keep_neighbours_together() -> None:
    assert by_score(SCORES, finest=2).tolist() == [[1, 2, 4, 0, 3, 5], [0, 1, 5, 2, 3, 4]]
    assert by_score(SCORES, finest=1).tolist() == [list(range(6))] * 2
    assert by_score(SCORES, finest=99).tolist() == by_score(SCORES).tolist()


@pytest.mark.parametrize(("scores", "finest"), [(SCORES[0], 0), (SCORES, -1)])
def test_what_cannot_be_ordered_is_refused(
    scores: np.typing.NDArray[np.float32], finest: int
) -> None:
    with pytest.raises(ShapeError):
        by_score(scores, finest=finest)


def test_likely_are_the_streamed_experts_that_many_tokens_are_expected_of() -> None:
    is_streamed = np.array([[True, False, True, True, True, True], [True] * 6])
    assert count_likely(SCORES, is_streamed, 0) == [0, 0]
    for pairs, expected in ((1, [0, 1]), (4, [1, 1]), (6, [2, 1]), (8, [3, 1]), (16, [4, 1])):
        assert count_likely(SCORES, is_streamed, int(pairs * LIKELY_TOKENS)) == expected


def test_the_last_chunk_and_the_profile_both_count() -> None:
    profile = np.array([[1, 1, 2, 0]], np.float32)
    assert expected_use(None, profile).tolist() == [[0.25, 0.25, 0.5, 0.0]]
    counts = np.array([[0, 8, 0, 8]])
    assert expected_use(counts, profile).tolist() == [[0.25, 0.75, 0.5, 0.5]]
    assert expected_use(counts * 0, profile * 0).tolist() == [[0, 0, 0, 0]]


def test_a_better_order_copies_less() -> None:
    """Averaged over seeds: by id, by a good guess, by the oracle."""
    copied = np.zeros(3, np.int64)
    for seed in range(12):
        case = plain_case(3, 40, resident=0.0, routed=0.3, ring_slots=60, depth=4, seed=seed)
        case = replace(case, weights=(9, 3, 3, 1))
        noise = np.random.default_rng(seed).random(case.routed.shape)
        guess = by_score((case.routed + noise).astype(np.float32))
        orders = (None, guess, oracle(case.routed.astype(np.int64)))
        copied += [simulate(replace(case, order=order)).num_copied for order in orders]
        needed = int(case.routed.sum())
        assert needed <= copied[2]
    assert copied[0] > copied[1] >= copied[2]


@pytest.mark.parametrize("depth", [0, -1, MOST_DEPTH + 1])
def test_a_fixed_depth_out_of_range_is_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"got {depth}"):
        FixedDepth(depth)


def test_an_automatic_depth_grows_when_the_link_ran_dry_and_shrinks_when_it_never_does() -> None:
    rule = AutoDepth(4)
    rule.polled(0, was_full=False)
    assert rule.depth == 4
    for expected in (8, 16, 32, 64, 128, 256, 256):
        rule.polled(0, was_full=True)
        assert rule.depth == expected
    for _ in range(100_000):
        rule.polled(rule.depth - 1, was_full=True)
    assert rule.depth == LEAST_AUTO_DEPTH
