"""Index blocks: pooling and selection against plain numpy, ties, and independence of the cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.indexer import (
    POOL_INDEX_BLOCKS,
    SELECT_BLOCKS,
    pool_index_blocks,
    select_blocks,
)
from strata_cli.engine.kernels.rope import rope_table
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
EPS = 1e-6


def run_pool(lab: Lab, raw_keys: Floats, calls: list[Ints], ratio: int, weight: Floats) -> Floats:
    """Pool after each call's tokens; rows of blocks that are never completed stay zero."""
    context, dim = raw_keys.shape
    table = lab.put(rope_table(context, dim // 2 * 2, 1e4))
    pooled = lab.put(np.zeros((context // ratio, dim), np.float32))
    keys, norm = lab.put(raw_keys), lab.put(weight)
    for positions in calls:
        pool_index_blocks(lab.stream, keys, lab.put(positions), ratio, norm, table, EPS, pooled)
    return lab.get(pooled)


@given(
    context=st.integers(1, 60),
    ratio=st.integers(1, 9),
    dim=st.integers(1, 70),
    cut=st.floats(0, 1),
    seed=st.integers(0, 999),
)
@settings(max_examples=25)
def test_a_block_is_pooled_when_its_last_token_arrives(
    lab: Lab, context: int, ratio: int, dim: int, cut: float, seed: int
) -> None:
    raw_keys, weight = normal(seed, context, dim), normal(seed + 1, dim)
    positions = np.arange(context, dtype=np.int32)
    whole = run_pool(lab, raw_keys, [positions], ratio, weight)
    table = rope_table(context, dim // 2 * 2, 1e4)
    empty = np.zeros((context // ratio, dim), np.float32)
    reference = POOL_INDEX_BLOCKS.reference
    assert_close(whole, reference(raw_keys, positions, ratio, weight, table, EPS, empty))
    calls = np.split(positions, [int(cut * context)])
    np.testing.assert_array_equal(run_pool(lab, raw_keys, calls, ratio, weight), whole)


def run_select(
    lab: Lab,
    queries: Floats,
    pooled: Floats,
    positions: Ints,
    ratio: int,
    budget: int,
    score_rows: int = 4,
) -> tuple[Ints, Ints]:
    selected = lab.empty((len(queries), budget), np.int32)
    num_selected = lab.empty((len(queries),), np.int32)
    q, keys, places = map(lab.put, (queries, pooled, positions))
    scores = lab.empty((score_rows, len(pooled)))
    select_blocks(lab.stream, q, keys, places, ratio, scores, selected, num_selected)
    return lab.get(selected), lab.get(num_selected)


def whole_numbers(seed: int, *shape: int) -> Floats:
    """Small whole numbers: their dot products are exact, so equal scores are equal everywhere."""
    return np.random.default_rng(seed).integers(-1, 2, shape).astype(np.float32)


@given(
    num_tokens=st.integers(1, 6),
    num_heads=st.integers(1, 4),
    dim=st.integers(1, 40),
    ratio=st.integers(1, 6),
    budget=st.integers(1, 40),
    num_blocks=st.integers(1, 90),
    seed=st.integers(0, 999),
)
@settings(max_examples=60)
def test_the_best_blocks_are_selected_and_ties_go_to_the_lower_one(
    lab: Lab,
    num_tokens: int,
    num_heads: int,
    dim: int,
    ratio: int,
    budget: int,
    num_blocks: int,
    seed: int,
) -> None:
    queries = whole_numbers(seed, num_tokens, num_heads, dim)
    pooled = whole_numbers(seed + 1, num_blocks, dim)
    context = num_blocks * ratio
    positions = np.random.default_rng(seed).integers(0, context, num_tokens).astype(np.int32)
    case = (queries, pooled, positions, ratio, budget)
    selected, num_selected = run_select(lab, *case)
    expected, expected_count = SELECT_BLOCKS.reference(*case)
    np.testing.assert_array_equal(selected, expected)
    np.testing.assert_array_equal(num_selected, expected_count)


def test_scores_of_zero_keep_the_lowest_blocks(lab: Lab) -> None:
    queries, pooled = np.ones((1, 2, 16), np.float32), -np.ones((9, 16), np.float32)
    pooled[[4, 7]] = 1.0
    selected, num_selected = run_select(lab, queries, pooled, np.array([26], np.int32), 3, 4)
    np.testing.assert_array_equal(selected, [[0, 1, 4, 7]])
    assert num_selected[0] == 4


def test_many_blocks_are_ranked_exactly(lab: Lab) -> None:
    queries, pooled = normal(1, 2, 4, 32), normal(2, 20_000, 32)
    case = (queries, pooled, np.array([79_999, 61_237], np.int32), 4, 512)
    selected, _ = run_select(lab, *case)
    expected, _ = SELECT_BLOCKS.reference(*case)
    np.testing.assert_array_equal(selected, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_a_gpu_pools_and_selects_as_the_host_does(
    host_lab: Lab, gpu_lab: Lab, num_tokens: int
) -> None:
    raw_keys, weight = normal(1, 4000, 128), normal(2, 128)
    queries = normal(3, num_tokens, 4, 128)
    positions = np.arange(4000 - num_tokens, 4000, dtype=np.int32)
    every = np.arange(4000, dtype=np.int32)
    pooled, selected = [], []
    for lab in (host_lab, gpu_lab):
        pooled.append(run_pool(lab, raw_keys, [every], 4, weight))
        selected.append(run_select(lab, queries, pooled[0], positions, 4, 512, 33)[0])
    np.testing.assert_array_equal(pooled[1], pooled[0])
    np.testing.assert_array_equal(selected[1], selected[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "dim"), [(37, 4, 128), (16, 3, 81), (20, 1, 5)]
)
def test_a_gpu_scores_many_tokens_as_it_scores_one(
    gpu_lab: Lab, num_tokens: int, num_heads: int, dim: int
) -> None:
    """Values so close that another order of sums would choose other blocks."""
    queries = 1.0 + normal(1, num_tokens, num_heads, dim, scale=1e-4)
    pooled = 1.0 + normal(2, 300, dim, scale=1e-6)
    positions = np.arange(1_199 - num_tokens, 1_199, dtype=np.int32)
    case = (queries, pooled, positions, 4, 100)
    whole, _ = run_select(gpu_lab, *case, score_rows=num_tokens)
    one_by_one, _ = run_select(gpu_lab, *case, score_rows=3)
    np.testing.assert_array_equal(whole, one_by_one)


def test_selection_does_not_depend_on_cuts_neighbours_or_alignment(host_lab: Lab) -> None:
    case = normal(1, 6, 2, 24), normal(2, 70, 24), np.arange(205, 211, dtype=np.int32)
    whole, _ = run_select(host_lab, *case, 3, 11)
    for lab in (host_lab.cut([0.2, 0.7]), host_lab.skewed(4)):
        np.testing.assert_array_equal(run_select(lab, *case, 3, 11)[0], whole)
    alone, _ = run_select(host_lab, case[0][5:], case[1], case[2][5:], 3, 11)
    np.testing.assert_array_equal(alone, whole[5:])


def test_wrong_arguments_are_refused_by_name(lab: Lab) -> None:
    queries, pooled = lab.empty((2, 1, 8)), lab.empty((3, 8))
    positions, count = lab.empty((2,), np.int32), lab.empty((2,), np.int32)
    selected, scores = lab.empty((2, 4), np.int32), lab.empty((2, 3))
    with pytest.raises(ShapeError, match="select_blocks ratio: expected at least 1, got 0"):
        select_blocks(lab.stream, queries, pooled, positions, 0, scores, selected, count)
    few = lab.empty((1, 4))
    with pytest.raises(ShapeError, match=r"scores: expected float32 \[1, 3\]"):
        select_blocks(lab.stream, queries, pooled, positions, 4, few, selected, count)
    with pytest.raises(ShapeError, match="rows of scores: expected at least 1, got 0"):
        select_blocks(lab.stream, queries, pooled, positions, 4, few.rows(0, 0), selected, count)
    table, weight = lab.empty((12, 4, 2)), lab.empty((8,))
    with pytest.raises(ShapeError, match=r"pooled: expected float32 \[2, 8\]"):
        pool_index_blocks(lab.stream, lab.empty((12, 8)), positions, 5, weight, table, EPS, pooled)
