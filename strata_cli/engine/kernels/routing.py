"""Routing of tokens to experts: which ones and how much of each, and the pairs in experts' order.

T tokens, E experts, k experts per token, P = T * k (token, expert) pairs. Source: qwen4exp MoE;
ties and orders are this project's: lower id first, ranks in order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.reduce import max16, sum16
from strata_cli.engine.kernels.rows import compile_small, divide_row, exp_row
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.errors import ShapeError

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
F32 = np.float32
I32 = np.int32

THREADS = 128  # per block on a GPU
ORDER_THREADS = 256  # of a block that orders the pairs of one expert
ROUTE_TOGETHER = 16  # at most so many tokens are routed and ordered by one of a GPU's blocks
WARPS = THREADS // 32
CANDIDATE_WORDS = 64  # of shared memory, for a warp that routes
ROUTE_IN_REGISTERS = 512  # experts whose logits a GPU's warp keeps in registers
MIN_WEIGHT_SUM = F32(2.0**-14)  # the router weights' sum is clamped from below by this
LOWEST = F32(-np.inf)


class Routing(NamedTuple):
    """Each token's experts, best first: ids int32 [T, k] and weights float32 [T, k]."""

    ids: Ints
    weights: Floats


class ExpertOrder(NamedTuple):
    """Pairs sorted by expert, as order_by_expert writes them."""

    expert_start: Ints
    row_of: Ints
    pair_of: Ints


class RouteOperands(NamedTuple):
    """What route_in_order reads, logits, and writes, where experts are not ranked."""

    logits: Tensor
    ids: Tensor
    weights: Tensor
    expert_start: Tensor
    row_of: Tensor
    pair_of: Tensor

    def check(self) -> int:
        """The number of experts.

        Raises:
            ShapeError: one has another shape or type.
        """
        num_experts = _expect_route(self.logits, self.ids, self.weights)
        expect("route_in_order expert_start", self.expert_start, (num_experts + 1,), I32)
        _expect_order(self.ids, self.expert_start, self.row_of, self.pair_of)
        return num_experts


class Ranked(NamedTuple):
    """An order of the experts: rank_of int32 [E]; ranks int32 [T, k] is scratch for relabel."""

    rank_of: Tensor
    ranks: Tensor


def route(stream: Stream, logits: Tensor, ids: Tensor, weights: Tensor) -> None:
    """Pick each token's experts and their mixing weights.

    Softmax over all experts; the k most probable, equal ones by lower id; their probabilities
    divided by their sum, clamped from below at 2**-14. A logit that is not a number counts as the
    smallest, so ids are always valid and distinct; the token's weights then are not numbers.

    Args:
        stream: enqueues here.
        logits: router output, float32 [T, E].
        ids: int32 [T, k], overwritten, best first.
        weights: float32 [T, k], overwritten.

    Raises:
        ShapeError: an argument has another shape or type, or k is not in 1..E.
    """
    num_experts = _expect_route(logits, ids, weights)
    num_tokens, top_k = ids.shape
    launch = Launch(
        items=num_tokens,
        grain=grain(4 * num_experts),
        grid=(blocks(num_tokens, WARPS), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=4 * WARPS * (2 * top_k + CANDIDATE_WORDS),
        extents=(num_tokens, num_experts, top_k),
        early=True,
    )
    kernel = ROUTE if num_experts <= ROUTE_IN_REGISTERS else ROUTE_MANY
    stream.launch(kernel, launch, logits, ids, weights)


def route_bytes(num_tokens: int, top_k: int) -> int:
    """Shared memory of a GPU's block that routes and orders so many tokens."""
    return 4 * num_tokens * (2 * top_k + CANDIDATE_WORDS + 2)


def route_in_order(
    stream: Stream,
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_start: Tensor,
    row_of: Tensor,
    pair_of: Tensor,
    ranked: Ranked | None = None,
) -> None:
    """Route, then order_by_expert; one launch where tokens are few.

    Where experts are ranked, pairs are sorted by the rank of their expert instead of its id.

    Args:
        stream: enqueues here.
        logits: as route's.
        ids: as route's, overwritten.
        weights: as route's, overwritten.
        expert_start: as order_by_expert's, int32 [E + 1], overwritten.
        row_of: as order_by_expert's, overwritten.
        pair_of: as order_by_expert's, overwritten.
        ranked: ranks of the experts, and where to write the pairs'; None: an id is its rank.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    num_tokens, top_k = ids.shape
    if ranked is not None or num_tokens > ROUTE_TOGETHER:
        route(stream, logits, ids, weights)
        order_pairs(stream, ids, expert_start, row_of, pair_of, ranked)
        return
    operands = RouteOperands(logits, ids, weights, expert_start, row_of, pair_of)
    num_experts = operands.check()
    launch = Launch(
        items=1,
        grid=(1, 1, 1),
        block=(max(4 * THREADS, 32 * num_tokens), 1, 1),
        shared_bytes=route_bytes(num_tokens, top_k),
        extents=(num_tokens, num_experts, top_k),
        early=True,
    )
    kernel = ROUTE_FEW if num_experts <= ROUTE_IN_REGISTERS else ROUTE_FEW_MANY
    stream.launch(kernel, launch, *operands)


def order_pairs(
    stream: Stream,
    ids: Tensor,
    expert_start: Tensor,
    row_of: Tensor,
    pair_of: Tensor,
    ranked: Ranked | None = None,
) -> None:
    """Enqueue order_by_expert, of ranks where experts are ranked. Arguments as route_in_order's."""
    if ranked is not None:
        relabel(stream, ids, ranked.rank_of, ranked.ranks)
        ids = ranked.ranks
    order_by_expert(stream, ids, expert_start, row_of, pair_of)


def order_by_expert(
    stream: Stream, ids: Tensor, expert_start: Tensor, row_of: Tensor, pair_of: Tensor
) -> None:
    """Sort the (token, rank) pairs by expert, then token, then rank.

    Args:
        stream: enqueues here.
        ids: int32 [T, k], each in 0..E-1.
        expert_start: int32 [E + 1], overwritten: expert e has pairs start[e] .. start[e + 1].
        row_of: int32 [T * k], overwritten: the token of each sorted pair.
        pair_of: int32 [T, k], overwritten: where each (token, rank) went.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    _expect_order(ids, expert_start, row_of, pair_of)
    num_experts = expert_start.size - 1
    launch = Launch(
        items=1,
        grid=(num_experts, 1, 1),
        block=(ORDER_THREADS, 1, 1),
        extents=(num_experts, ids.size, ids.shape[1]),
        early=True,
    )
    stream.launch(ORDER_BY_EXPERT, launch, ids, expert_start, row_of, pair_of)


def relabel(stream: Stream, ids: Tensor, rank_of: Tensor, ranks: Tensor) -> None:
    """Look up the rank of each pair's expert.

    Args:
        stream: enqueues here.
        ids: int32 [T, k], each in 0..E-1.
        rank_of: int32 [E].
        ranks: int32 [T, k], overwritten; may be ids itself.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("relabel ids", ids, 2)
    expect_rank("relabel rank_of", rank_of, 1)
    expect("relabel ids", ids, ids.shape, I32)
    expect("relabel rank_of", rank_of, rank_of.shape, I32)
    expect("relabel ranks", ranks, ids.shape, I32)
    launch = Launch(
        items=ids.shape[0],
        grain=grain(ids.shape[1]),
        grid=(blocks(ids.size, THREADS), 1, 1),
        block=(THREADS, 1, 1),
        extents=(ids.size,),
        early=True,
    )
    stream.launch(RELABEL, launch, ids, rank_of, ranks)


def _expect_route(logits: Tensor, ids: Tensor, weights: Tensor) -> int:
    """Check route's arguments; returns the number of experts."""
    expect_rank("route logits", logits, 2)
    expect_rank("route ids", ids, 2)
    (num_tokens, num_experts), top_k = logits.shape, ids.shape[1]
    if not 1 <= top_k <= num_experts:
        raise ShapeError(f"route: cannot choose {top_k} of {num_experts} experts per token")
    expect("route logits", logits, logits.shape)
    expect("route ids", ids, (num_tokens, top_k), I32)
    expect("route weights", weights, (num_tokens, top_k))
    return num_experts


def _expect_order(ids: Tensor, expert_start: Tensor, row_of: Tensor, pair_of: Tensor) -> None:
    expect_rank("order_by_expert ids", ids, 2)
    expect_rank("order_by_expert expert_start", expert_start, 1)
    expect("order_by_expert ids", ids, ids.shape, I32)
    expect("order_by_expert expert_start", expert_start, expert_start.shape, I32)
    expect("order_by_expert row_of", row_of, (ids.size,), I32)
    expect("order_by_expert pair_of", pair_of, ids.shape, I32)


@nogil_jit
def _route(begin: int, end: int, logits: Floats, ids: Ints, weights: Floats) -> None:
    """Items: tokens. Experts are chosen by logit: it orders as the probabilities do, unrounded.

    The best so far stay sorted, in the token's own rows; a later equal one goes behind.
    """
    num_experts, top_k = logits.shape[1], ids.shape[1]
    exps = np.empty(num_experts, F32)
    compile_small()
    for token in range(begin, end):
        row = token * num_experts
        exp_row(exps, 0, logits, row, max16(logits, row, num_experts), num_experts)
        total = sum16(exps, 0, num_experts)
        for e in range(num_experts):
            score = logits[token, e]
            score = score if score > LOWEST else LOWEST
            place = e if e < top_k else top_k
            while place > 0 and score > weights[token, place - 1]:
                if place < top_k:
                    weights[token, place] = weights[token, place - 1]
                    ids[token, place] = ids[token, place - 1]
                place -= 1
            if place < top_k:
                weights[token, place] = score
                ids[token, place] = e
        weight_sum = F32(0.0)
        for rank in range(top_k):
            weights[token, rank] = exps[ids[token, rank]] / total
            weight_sum += weights[token, rank]
        weight_sum = MIN_WEIGHT_SUM if weight_sum < MIN_WEIGHT_SUM else weight_sum
        divide_row(weights, token * top_k, weight_sum, top_k)


@nogil_jit
def _order_by_expert(
    begin: int, end: int, ids: Ints, expert_start: Ints, row_of: Ints, pair_of: Ints
) -> None:
    """One item: a stable counting sort, sequential."""
    num_experts, (num_tokens, top_k) = expert_start.size - 1, ids.shape
    compile_small()
    for _ in range(begin, end):
        for e in range(num_experts + 1):
            expert_start[e] = 0
        for token in range(num_tokens):
            for rank in range(top_k):
                expert_start[ids[token, rank] + 1] += 1
        for e in range(num_experts):
            expert_start[e + 1] += expert_start[e]
        # Placing advances each start to the next expert's; the shift below undoes that.
        for token in range(num_tokens):
            for rank in range(top_k):
                pair = expert_start[ids[token, rank]]
                expert_start[ids[token, rank]] = pair + 1
                row_of[pair] = token
                pair_of[token, rank] = pair
        for e in range(num_experts, 0, -1):
            expert_start[e] = expert_start[e - 1]
        expert_start[0] = 0


@nogil_jit
def _relabel(begin: int, end: int, ids: Ints, rank_of: Ints, ranks: Ints) -> None:
    """Items: tokens."""
    for token in range(begin, end):
        for rank in range(ids.shape[1]):
            ranks[token, rank] = rank_of[ids[token, rank]]


@nogil_jit
def _route_few(
    begin: int,
    end: int,
    logits: Floats,
    ids: Ints,
    weights: Floats,
    expert_start: Ints,
    row_of: Ints,
    pair_of: Ints,
) -> None:
    """One item: all tokens."""
    for _ in range(begin, end):
        _route(0, logits.shape[0], logits, ids, weights)
        _order_by_expert(0, 1, ids, expert_start, row_of, pair_of)


def route_reference(logits: Floats, top_k: int) -> Routing:
    """route in plain numpy: logits [T, E] -> ids and weights [T, k]."""
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    exps = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    chosen = np.take_along_axis(exps / exps.sum(axis=1, keepdims=True), ids, axis=1)
    weights = chosen / np.maximum(chosen.sum(axis=1, keepdims=True), MIN_WEIGHT_SUM)
    return Routing(ids.astype(I32), weights.astype(F32))


def order_by_expert_reference(ids: Ints, num_experts: int) -> ExpertOrder:
    """order_by_expert in plain numpy: ids [T, k]."""
    order = np.argsort(ids.reshape(-1), kind="stable")
    pair_of = np.empty(ids.size, I32)
    pair_of[order] = np.arange(ids.size)
    counts = np.bincount(ids.reshape(-1), minlength=num_experts)
    expert_start = np.concatenate([[0], np.cumsum(counts)]).astype(I32)
    return ExpertOrder(
        expert_start, (order // ids.shape[1]).astype(I32), pair_of.reshape(ids.shape)
    )


def route_in_order_reference(logits: Floats, top_k: int) -> tuple[Routing, ExpertOrder]:
    """route_in_order in plain numpy."""
    routing = route_reference(logits, top_k)
    return routing, order_by_expert_reference(routing.ids, logits.shape[1])


def relabel_reference(ids: Ints, rank_of: Ints) -> Ints:
    """relabel in plain numpy: ids [T, k] and rank_of [E] -> [T, k]."""
    return rank_of[ids]


SOURCE = "route.cu"
ROUTE = Kernel("route", _route, route_reference, SOURCE, "route<16>")
ROUTE_MANY = Kernel("route_many", _route, route_reference, SOURCE, "route<0>")
ROUTE_FEW = Kernel("route_few", _route_few, route_in_order_reference, SOURCE, "route_few<16>")
ROUTE_FEW_MANY = Kernel(
    "route_few_many", _route_few, route_in_order_reference, SOURCE, "route_few<0>"
)
ORDER_BY_EXPERT = Kernel("order_by_expert", _order_by_expert, order_by_expert_reference, SOURCE)
RELABEL = Kernel("relabel", _relabel, relabel_reference, SOURCE)
