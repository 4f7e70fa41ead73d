"""A router and another row of float32 weights, slice by slice, and the routing of some tokens.

A hundred tokens make a few tiles of a router, each of which would take its columns one after the
other on one multiprocessor. Bits are those of ``matmul`` and ``route``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS, SLICED_FLOAT_TOKENS
from strata_cli.engine.kernels.gpu import gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.matmul_several import Product
from strata_cli.engine.kernels.products import (
    WARP,
    Matrix,
    Unit,
    matrix_of,
    slice_cols,
)
from strata_cli.engine.kernels.prompt_plan import (
    SPLIT_ROWS,
    SPLIT_SHARED_BYTES,
    SPLIT_WARPS,
    has_split_plan,
)
from strata_cli.engine.kernels.routing import CANDIDATE_WORDS, ROUTE_IN_REGISTERS
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType

SPLIT_SOURCE = "matmul_split.cu"
ROUTE_THREADS = 128  # of a block that adds up a token's logits, and routes it


class _Plan(NamedTuple):
    """The launch that makes slices, and how many."""

    kernel: Kernel
    launch: Launch
    num_slices: int


@lru_cache(maxsize=1024)
def _plan(first: Matrix, second: Matrix, tokens: int) -> _Plan:
    width = slice_cols(QuantType.F32, first.cols)
    num_slices = blocks(first.cols, width)
    tiles = sum(blocks(matrix.rows, SPLIT_ROWS) for matrix in (first, second))
    launch = Launch(
        items=1,
        grid=(blocks(tokens, SPLIT_ROWS), tiles, num_slices),
        block=(SPLIT_WARPS * WARP, 1, 1),
        shared_bytes=SPLIT_SHARED_BYTES,
        extents=(tokens, first.rows, second.rows, first.cols, width),
        early=True,
    )
    kernel = gpu_kernel(Unit(SPLIT_SOURCE, f"split_pair<{first.lane}, 2, 2>", ()))
    return _Plan(kernel, launch, num_slices)


def can_split_pair(
    stream: Stream, x: Tensor, first: Weight, second: Weight, scratch: Tensor
) -> bool:
    """Whether ``route_by_slices`` takes them, and first: more than few tokens, and on a GPU."""
    tokens = x.shape[0]
    if not stream.shared_bytes or not FEW_TOKENS < tokens <= SLICED_FLOAT_TOKENS:
        return False
    own, other = matrix_of(first), matrix_of(second)
    is_pair = other == own._replace(rows=other.rows)
    has_room = _plan(own, other, tokens).num_slices * tokens * (own.rows + other.rows)
    return is_pair and has_split_plan(own, x.address, gpu_of(stream)) and has_room <= scratch.size


def route_by_slices(
    stream: Stream,
    x: Tensor,
    first: Product,
    second: Product,
    scratch: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Enqueue ``matmul`` of x with two float32 weights and ``route``, where ``can_split_pair``.

    Args:
        stream: where it runs.
        x: activations, float32 [T, K].
        first: a router's weight, and its logits.
        second: the other one.
        scratch: float32 [any], overwritten.
        ids: int32 [T, k], as of ``route``.
        weights: float32 [T, k], as of ``route``.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = x.shape[0]
    expect("route_by_slices x", x, (tokens, first.weight.cols))
    for product in (first, second):
        expect("route_by_slices out", product.out, (tokens, product.weight.rows))
    plan = _plan(matrix_of(first.weight), matrix_of(second.weight), tokens)
    operands = (x, first.weight.data, second.weight.data, scratch)
    stream.launch(plan.kernel, plan.launch, *operands)
    num_experts, top_k = first.weight.rows, ids.shape[1]
    expect("route_by_slices ids", ids, (tokens, top_k), np.int32)
    expect("route_by_slices weights", weights, (tokens, top_k))
    kernel, launch = _route(plan.num_slices, tokens, num_experts, second.weight.rows, top_k)
    stream.launch(kernel, launch, scratch, first.out, second.out, ids, weights)


@lru_cache(maxsize=1024)
def _route(
    num_slices: int, tokens: int, num_experts: int, rows: int, top_k: int
) -> tuple[Kernel, Launch]:
    """What adds up the slices of a router, and routes."""
    local = ROUTE_IN_REGISTERS // WARP if num_experts <= ROUTE_IN_REGISTERS else 0
    launch = Launch(
        items=1,
        grid=(tokens, 1, 1),
        block=(ROUTE_THREADS, 1, 1),
        shared_bytes=4 * (num_experts + 2 * top_k + CANDIDATE_WORDS),
        extents=(num_slices, num_experts, rows, top_k),
        early=True,
    )
    return gpu_kernel(Unit("join_route.cu", f"join_route<{local}>", ())), launch
