"""Reads of the streams of few tokens on a GPU: their mix and their inject inside products.

A launch of its own for the mix of a token takes four microseconds, most of it start and wait. Bits
are those of the launches one by one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.few import FEW_COLUMNS, can_mix, few_plan
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import WARP, Matrix, Plan, dense_matrix, slice_cols
from strata_cli.engine.kernels.prompt_plan import has_thin_plan
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType

INJECT_TOKENS = 8  # of a warp
INJECT_WARPS = 4  # of a block, a slice each; fewer where it has fewer


def inject_parts(cols: int) -> int:
    """Parts of the inject of so many columns."""
    return blocks(cols, slice_cols(QuantType.F32, cols))


def can_inject_beside(stream: Stream, normed: Tensor, weight: Weight) -> bool:
    """Whether ``matmul_inject`` takes them: float32 weights, few tokens, and on a GPU."""
    is_few = stream.shared_bytes > 0 and 0 < normed.shape[0] <= FEW_TOKENS
    return is_few and has_thin_plan(_matrix(weight), normed.address)


def matmul_inject(
    stream: Stream, normed: Tensor, down: Weight, low: Tensor, inject: Weight, parts: Tensor
) -> None:
    """Enqueue the products of the normed streams with two weights, which run beside each other.

    Args:
        stream: where it runs; ``can_inject_beside`` said yes.
        normed: float32 [T, S * D].
        down: R rows of S * D.
        low: float32 [T, R], overwritten.
        inject: float32, N rows of S * D.
        parts: float32 [P, T, N], P as ``inject_parts``, overwritten: what ``stream_write`` takes.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens, width = normed.shape
    expect("matmul_inject normed", normed, (tokens, down.cols))
    expect("matmul_inject low", low, (tokens, down.rows))
    num_parts = inject_parts(width)
    expect("matmul_inject parts", parts, (num_parts, tokens, inject.rows))
    matrix, lane = _matrix(down), _matrix(inject).lane
    plan = _inject_plan(matrix, lane, tokens, num_parts, stream.shared_bytes)
    slice_width = slice_cols(QuantType.F32, width)
    numbers = (int(down.qtype), tokens, down.rows, down.cols, inject.rows, slice_width)
    operands = (normed, down.data, low, inject.data, parts)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, *operands, *numbers)


def can_mix_beside(stream: Stream, low: Tensor, num_streams: int, up: Weight) -> bool:
    """Whether ``matmul_silu_mix`` takes them: few tokens, and on a GPU."""
    tokens = low.shape[0]
    if not 0 < tokens <= FEW_TOKENS or not stream.shared_bytes:
        return False
    return _can_mix(_matrix(up), tokens, stream.shared_bytes, num_streams)


def matmul_silu_mix(
    stream: Stream, low: Tensor, num_streams: int, up: Weight, normed: Tensor, out: Tensor
) -> None:
    """Enqueue ``stream_mix`` by the gates that ``matmul_silu`` makes.

    Args:
        stream: where it runs; ``can_mix_beside`` said yes.
        low: float32 [T, R].
        num_streams: S.
        up: S * D rows of R.
        normed: float32 [T, S * D].
        out: float32 [T, D], overwritten.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = low.shape[0]
    expect("matmul_silu_mix low", low, (tokens, up.cols))
    expect("matmul_silu_mix normed", normed, (tokens, up.rows))
    expect("matmul_silu_mix out", out, (tokens, up.rows // num_streams))
    matrix, passes = _matrix(up), blocks(tokens, FEW_COLUMNS)
    limit = stream.shared_bytes
    plan = few_plan((matrix,), tokens, passes, limit, is_gated=True, streams=num_streams)
    numbers = (int(up.qtype), tokens, up.rows, up.cols)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, low, up.data, normed, out, *numbers)


@lru_cache(maxsize=64)
def _can_mix(matrix: Matrix, tokens: int, limit: int, num_streams: int) -> bool:
    return can_mix(matrix, tokens, blocks(tokens, FEW_COLUMNS), limit, num_streams)


@lru_cache(maxsize=64)
def _inject_plan(matrix: Matrix, lane: int, tokens: int, num_parts: int, limit: int) -> Plan:
    """The product's, with more blocks for the inject's slices."""
    plan = few_plan((matrix,), tokens, blocks(tokens, FEW_COLUMNS), limit)
    passes, num_blocks, _ = plan.grid
    warps = min(INJECT_WARPS, plan.block[0] // WARP)
    slices = blocks(num_parts * blocks(tokens, INJECT_TOKENS), warps)
    function = plan.unit.function.replace("matmul_few<", "matmul_few_inject<")
    function = f"{function[:-1]}, {lane}>"
    return replace(
        plan,
        unit=plan.unit._replace(function=function),
        grid=(passes, num_blocks + blocks(slices, passes), 1),
        extents=(num_blocks, *plan.extents),
    )


def _matrix(weight: Weight) -> Matrix:
    return dense_matrix(weight.qtype, weight.rows, weight.cols, weight.data.address)
