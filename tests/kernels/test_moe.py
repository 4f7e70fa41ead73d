"""Routing, ordering, activation and combination against plain numpy; ties, empty experts, bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.moe import COMBINE, SWIGLU, combine, swiglu
from strata_cli.engine.kernels.routing import (
    MIN_WEIGHT_SUM,
    ORDER_BY_EXPERT,
    RELABEL,
    ROUTE,
    ExpertOrder,
    Ranked,
    Routing,
    order_by_expert,
    relabel,
    route,
    route_in_order,
)
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
I32 = np.int32


def run_route(lab: Lab, logits: Floats, top_k: int) -> Routing:
    ids, weights = lab.empty((len(logits), top_k), I32), lab.empty((len(logits), top_k))
    route(lab.stream, lab.put(logits), ids, weights)
    return Routing(lab.get(ids), lab.get(weights))


def run_order(lab: Lab, ids: Ints, num_experts: int) -> ExpertOrder:
    expert_start = lab.empty((num_experts + 1,), I32)
    row_of, pair_of = lab.empty((ids.size,), I32), lab.empty(ids.shape, I32)
    order_by_expert(lab.stream, lab.put(ids), expert_start, row_of, pair_of)
    return ExpertOrder(lab.get(expert_start), lab.get(row_of), lab.get(pair_of))


def run_both(
    lab: Lab, logits: Floats, top_k: int, rank_of: Ints | None = None
) -> tuple[Routing, ExpertOrder]:
    ids, weights = lab.empty((len(logits), top_k), I32), lab.empty((len(logits), top_k))
    expert_start = lab.empty((logits.shape[1] + 1,), I32)
    row_of, pair_of = lab.empty((ids.size,), I32), lab.empty(ids.shape, I32)
    ranked = None if rank_of is None else Ranked(lab.put(rank_of), lab.empty(ids.shape, I32))
    route_in_order(lab.stream, lab.put(logits), ids, weights, expert_start, row_of, pair_of, ranked)
    routing = Routing(lab.get(ids), lab.get(weights))
    return routing, ExpertOrder(lab.get(expert_start), lab.get(row_of), lab.get(pair_of))


def run_swiglu(lab: Lab, gate: Floats, up: Floats) -> Floats:
    out = lab.empty(gate.shape)
    swiglu(lab.stream, lab.put(gate), lab.put(up), out)
    return lab.get(out)


def run_combine(
    lab: Lab, expert_out: Floats, pair_of: Ints, weights: Floats, shared: Floats, logit: Floats
) -> Floats:
    out = lab.empty(shared.shape)
    tensors = [lab.put(values) for values in (expert_out, pair_of, weights, shared, logit)]
    combine(lab.stream, tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], out)
    return lab.get(out)


def some_ids(seed: int, num_tokens: int, num_experts: int, top_k: int) -> Ints:
    """Distinct experts per token, from the lower half only where that has enough."""
    rng = np.random.default_rng(seed)
    pool = max(top_k, num_experts // 2)
    return np.array([rng.permutation(pool)[:top_k] for _ in range(num_tokens)], I32)


ROUTINGS = {
    "num_tokens": st.integers(1, 9),
    "num_experts": st.integers(1, 70),
    "top_k": st.integers(1, 11),
    "seed": st.integers(0, 999),
}


@given(**ROUTINGS, levels=st.sampled_from([1, 3, 1000]))
@settings(max_examples=40)
def test_route_agrees_with_numpy_ties_included(
    lab: Lab, num_tokens: int, num_experts: int, top_k: int, seed: int, levels: int
) -> None:
    """Few levels make many exact ties."""
    top_k = min(top_k, num_experts)
    rounded = np.round(normal(seed, num_tokens, num_experts) * levels / 3)
    logits = (rounded * (3 / levels)).astype(np.float32)
    routing, expected = run_route(lab, logits, top_k), ROUTE.reference(logits, top_k)
    np.testing.assert_array_equal(routing.ids, expected.ids)
    assert_close(routing.weights, expected.weights)


def test_equal_experts_are_chosen_by_lower_id(lab: Lab) -> None:
    logits = np.array([[0, 2, 1, 2, 1, 1, 2, 0], [5] * 8, [-1e30] * 8], np.float32)
    routing = run_route(lab, logits, 4)
    assert routing.ids.tolist() == [[1, 3, 6, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    np.testing.assert_array_equal(routing.weights[1:], np.full((2, 4), 0.25, np.float32))


def test_logits_that_round_to_one_probability_still_rank_by_logit(lab: Lab) -> None:
    low = np.float32(-200.0)
    logits = np.array([[low, np.nextafter(low, np.float32(0)), low + 1, 0.0]], np.float32)
    assert run_route(lab, logits, 4).ids.tolist() == [[3, 2, 1, 0]]


def test_weights_sum_to_one_unless_all_chosen_are_improbable(lab: Lab) -> None:
    spread = np.zeros((1, 4096 * 8), np.float32)  # uniform: one expert has 2**-15
    assert run_route(lab, spread, 1).weights[0, 0] == np.float32(2.0**-15) / MIN_WEIGHT_SUM
    weights = run_route(lab, normal(3, 5, 512, scale=3.0), 10).weights
    assert_close(weights.sum(axis=1), np.ones(5, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_give_valid_ids_and_weights_that_are_not_numbers(
    lab: Lab, bad: float
) -> None:
    logits = normal(0, 3, 6)
    logits[0, 2] = bad
    logits[1, :] = bad
    routing = run_route(lab, logits, 6)
    assert all(sorted(row) == list(range(6)) for row in routing.ids.tolist())
    assert routing.ids[0, -1 if np.isnan(bad) else 0] == 2  # not a number ranks last
    assert np.isnan(routing.weights[:2]).all()
    assert np.isfinite(routing.weights[2]).all()


@given(**ROUTINGS, many=st.booleans())
@settings(max_examples=30)
def test_routing_in_order_is_routing_and_then_ordering(
    lab: Lab, num_tokens: int, num_experts: int, top_k: int, seed: int, many: bool
) -> None:
    top_k = min(top_k, num_experts)
    logits = np.round(normal(seed, num_tokens + 20 * many, num_experts) * 2)
    routing, order = run_both(lab, logits, top_k)
    for actual, expected in zip(routing, run_route(lab, logits, top_k), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for actual, expected in zip(order, run_order(lab, routing.ids, num_experts), strict=True):
        np.testing.assert_array_equal(actual, expected)


@given(**ROUTINGS, many=st.booleans())
@settings(max_examples=20)
def test_pairs_are_sorted_by_the_rank_of_their_expert_where_there_is_one(
    lab: Lab, num_tokens: int, num_experts: int, top_k: int, seed: int, many: bool
) -> None:
    top_k = min(top_k, num_experts)
    logits = normal(seed, num_tokens + 20 * many, num_experts)
    rank_of = np.random.default_rng(seed).permutation(num_experts).astype(I32)
    routing, order = run_both(lab, logits, top_k, rank_of)
    for actual, expected in zip(routing, run_route(lab, logits, top_k), strict=True):
        np.testing.assert_array_equal(actual, expected)
    by_rank = run_order(lab, rank_of[routing.ids], num_experts)
    for actual, expected in zip(order, by_rank, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_ranks_may_take_the_place_of_ids(lab: Lab) -> None:
    ids, rank_of = some_ids(0, 7, 9, 3), np.random.default_rng(1).permutation(9).astype(I32)
    tensor = lab.put(ids)
    relabel(lab.stream, tensor, lab.put(rank_of), tensor)
    np.testing.assert_array_equal(lab.get(tensor), RELABEL.reference(ids, rank_of))


@given(**ROUTINGS)
@settings(max_examples=40)
def test_order_agrees_with_a_stable_sort_and_leaves_experts_empty(
    lab: Lab, num_tokens: int, num_experts: int, top_k: int, seed: int
) -> None:
    ids = some_ids(seed, num_tokens, num_experts, min(top_k, num_experts))
    for actual, expected in zip(
        run_order(lab, ids, num_experts), ORDER_BY_EXPERT.reference(ids, num_experts), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_pairs_of_an_expert_keep_token_then_rank_order(lab: Lab) -> None:
    order = run_order(lab, np.array([[2, 0], [0, 2], [2, 3]], I32), 5)
    assert order.expert_start.tolist() == [0, 2, 2, 5, 6, 6]
    assert order.row_of.tolist() == [0, 1, 0, 1, 2, 2]
    assert order.pair_of.tolist() == [[2, 0], [1, 3], [4, 5]]


@given(
    num_pairs=st.integers(1, 30),
    width=st.integers(1, 70),
    top_k=st.integers(1, 5),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_swiglu_and_combine_agree_with_numpy_at_odd_sizes(
    lab: Lab, num_pairs: int, width: int, top_k: int, seed: int
) -> None:
    gate, up = normal(seed, num_pairs, width, scale=4.0), normal(seed + 1, num_pairs, width)
    assert_close(run_swiglu(lab, gate, up), SWIGLU.reference(gate, up))
    arguments = combination(seed, num_pairs, top_k, width)
    assert_close(run_combine(lab, *arguments), COMBINE.reference(*arguments))


def combination(
    seed: int, num_tokens: int, top_k: int, size: int
) -> tuple[Floats, Ints, Floats, Floats, Floats]:
    pairs = np.random.default_rng(seed).permutation(num_tokens * top_k)
    return (
        normal(seed, num_tokens * top_k, size),
        pairs.reshape(num_tokens, top_k).astype(I32),
        np.abs(normal(seed + 1, num_tokens, top_k)),
        normal(seed + 2, num_tokens, size),
        normal(seed + 3, num_tokens, 1),
    )


def test_swiglu_may_overwrite_its_gate(lab: Lab) -> None:
    gate, up = normal(1, 5, 37), normal(2, 5, 37)
    expected = run_swiglu(lab, gate, up)
    tensor = lab.put(gate)
    swiglu(lab.stream, tensor, lab.put(up), tensor)
    np.testing.assert_array_equal(lab.get(tensor), expected)


def test_experts_are_summed_in_rank_order_wherever_their_rows_lie(lab: Lab) -> None:
    """1e8 - 1e8 + 1 is 1 in that order only."""
    rows = np.array([[1.0], [-1e8], [1e8]], np.float32)
    silent = np.zeros((1, 1), np.float32)
    for ranks, total in (([2, 1, 0], 1.0), ([2, 0, 1], 0.0)):
        pair_of = np.array([ranks], I32)
        ones = np.ones((1, 3), np.float32)
        assert run_combine(lab, rows, pair_of, ones, silent, silent)[0, 0] == total


@given(**ROUTINGS, points=st.lists(st.floats(0, 1), max_size=4))
@settings(max_examples=25)
def test_bits_do_not_depend_on_cuts_neighbours_or_alignment(
    host_lab: Lab, num_tokens: int, num_experts: int, top_k: int, seed: int, points: list[float]
) -> None:
    top_k = min(top_k, num_experts)
    logits = normal(seed, num_tokens, num_experts, scale=2.0)
    expert_out, _, _, shared, gate = combination(seed, num_tokens, top_k, 33)

    def layer(lab: Lab, rows: slice) -> list[NDArray[np.generic]]:
        """Routing to combination, each expert product replaced by rows made beforehand."""
        routing = run_route(lab, logits[rows], top_k)
        order = run_order(lab, routing.ids, num_experts)
        made = expert_out.reshape(num_tokens, top_k, -1)[rows].reshape(-1, 33)
        by_pair = np.empty_like(made)
        by_pair[order.pair_of.reshape(-1)] = made
        active = run_swiglu(lab, by_pair, by_pair)
        out = run_combine(lab, active, order.pair_of, routing.weights, shared[rows], gate[rows])
        return [routing.ids, routing.weights, out]

    whole = layer(host_lab, slice(None))
    for lab in (host_lab.cut(points), host_lab.skewed(4), host_lab.skewed(12)):
        for same, expected in zip(layer(lab, slice(None)), whole, strict=True):
            np.testing.assert_array_equal(same, expected)
    for token in range(num_tokens):
        one = slice(token, token + 1)
        for alone, expected in zip(layer(host_lab, one), whole, strict=True):
            np.testing.assert_array_equal(alone, expected[one])


def _one_lanes(seed: int) -> Floats:
    """The best experts of a GPU's warp belong to one lane."""
    logits = normal(seed, 3, 512)
    logits[:, 5::32] += 9
    return logits


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("logits", "top_k"),
    [
        (np.zeros((3, 512), np.float32), 10),
        (np.round(normal(1, 3, 512)), 10),
        (_one_lanes(2), 10),
        (normal(3, 3, 31), 31),
        (normal(4, 3, 512), 40),
    ],
)
def test_a_gpu_chooses_as_the_host_however_the_best_are_spread(
    host_lab: Lab, gpu_lab: Lab, logits: Floats, top_k: int
) -> None:
    gpu, host = (run_both(lab, logits, top_k) for lab in (gpu_lab, host_lab))
    np.testing.assert_array_equal(gpu[0].ids, host[0].ids)
    assert_close(gpu[0].weights, host[0].weights)
    for actual, expected in zip(gpu[1], host[1], strict=True):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "size"),
    [(1, 512, 10, 640), (203, 512, 10, 640), (3, 70, 11, 33), (2, 1030, 5, 5)],
)
def test_a_gpu_agrees_with_the_host_and_with_itself(
    host_lab: Lab, gpu_lab: Lab, num_tokens: int, num_experts: int, top_k: int, size: int
) -> None:
    logits = normal(0, num_tokens, num_experts, scale=2.0)
    arguments = combination(1, num_tokens, top_k, size)
    gpu, host = (run_route(lab, logits, top_k) for lab in (gpu_lab, host_lab))
    np.testing.assert_array_equal(gpu.ids, host.ids)
    assert_close(gpu.weights, host.weights)
    last = slice(num_tokens - 1, None)
    for alone, expected in zip(run_route(gpu_lab, logits[last], top_k), gpu, strict=True):
        np.testing.assert_array_equal(alone, expected[last])
    orders = (run_order(lab, gpu.ids, num_experts) for lab in (gpu_lab, host_lab))
    for actual, expected in zip(*orders, strict=True):
        np.testing.assert_array_equal(actual, expected)
    active, expected = (
        run_swiglu(lab, arguments[0], 3 * arguments[0]) for lab in (gpu_lab, host_lab)
    )
    np.testing.assert_array_equal(active, expected)
    assert_close(run_combine(gpu_lab, *arguments), run_combine(host_lab, *arguments))


def test_wrong_shapes_are_refused_by_name(lab: Lab) -> None:
    logits, ids, weights = lab.empty((2, 4)), lab.empty((2, 5), I32), lab.empty((2, 5))
    with pytest.raises(ShapeError, match="cannot choose 5 of 4 experts"):
        route(lab.stream, logits, ids, weights)
    with pytest.raises(ShapeError, match=r"ids: expected int32 \[2, 4\], got float32"):
        route(lab.stream, logits, lab.empty((2, 4)), weights)
    with pytest.raises(ShapeError, match=r"row_of: expected int32 \[10\]"):
        order_by_expert(lab.stream, ids, lab.empty((5,), I32), lab.empty((9,), I32), ids)
    with pytest.raises(ShapeError, match=r"ranks: expected int32 \[2, 5\]"):
        relabel(lab.stream, ids, lab.empty((4,), I32), lab.empty((2, 4), I32))
    with pytest.raises(ShapeError, match="up: expected float32"):
        swiglu(lab.stream, logits, weights, logits)
    with pytest.raises(ShapeError, match=r"expert_out: expected float32 \[10, 4\]"):
        combine(lab.stream, logits, ids, weights, logits, logits, logits)
