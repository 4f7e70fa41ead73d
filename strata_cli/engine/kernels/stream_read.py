"""Reads of the streams of few tokens on a GPU: their mix and their inject inside products.

A launch of its own for the mix of a token takes four microseconds, most of it start and wait. Bits
are those of the launches one by one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.few import Extra, can_mix, few_plan
from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import WARP, Matrix, Plan, matrix_of, slice_cols
from strata_cli.engine.kernels.prompt_plan import has_thin_plan
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType

INJECT_TOKENS = 8  # of a warp
INJECT_WARPS = 4  # of a block, a slice each; fewer where it has fewer
MOST_STREAMS = 6  # that a block norms: 25 warps
MOST_COLUMNS = 12 * 256  # of each
NORM_WARPS = 8  # whose sums are a stream's
MOST_EACH = 2  # of these sums, that a warp makes
FLOAT_LANE = 32  # where there is no inject
_FLOAT_BYTES = 4


def inject_parts(cols: int) -> int:
    """Parts of the inject of so many columns."""
    return blocks(cols, slice_cols(QuantType.F32, cols))


def can_inject_beside(stream: Stream, normed: Tensor, weight: Weight) -> bool:
    """Whether ``matmul_inject`` takes them: float32 weights, few tokens, and on a GPU."""
    is_few = stream.shared_bytes > 0 and 0 < normed.shape[0] <= FEW_TOKENS
    return is_few and has_thin_plan(matrix_of(weight), normed.address)


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
    matrix, lane = matrix_of(down), matrix_of(inject).lane
    plan = _inject_plan(matrix, lane, tokens, num_parts, gpu_of(stream))
    slice_width = slice_cols(QuantType.F32, width)
    numbers = (int(down.qtype), tokens, down.rows, down.cols, inject.rows, slice_width)
    operands = (normed, down.data, low, inject.data, parts)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, *operands, *numbers)


def can_norm_beside(stream: Stream, x: Tensor, norm: Tensor, down: Weight) -> bool:
    """Whether ``read_few`` takes streams x [T, S, D]: of one token, and on a GPU."""
    num_tokens, num_streams, size = x.shape
    if num_tokens != 1 or not stream.shared_bytes or num_streams > MOST_STREAMS:
        return False
    is_aligned = size % 4 == 0 and (x.address | norm.address) % 16 == 0 and down.cols % 32 == 0
    return is_aligned and size <= MOST_COLUMNS and _FLOAT_BYTES * down.cols <= stream.shared_bytes


def read_few(
    stream: Stream,
    x: Tensor,
    norm: Tensor,
    eps: float,
    normed: Tensor,
    down: Weight,
    low: Tensor,
    inject: Weight | None,
    parts: Tensor | None,
) -> None:
    """Enqueue ``stream_norm`` and ``matmul_inject`` of what it makes, in one launch.

    Args:
        stream: where it runs; ``can_norm_beside`` said yes.
        x: streams, float32 [1, S, D].
        norm: its weight, float32 [S * D].
        eps: added to the mean square.
        normed: float32 [1, S * D], overwritten.
        down: as of ``matmul_inject``.
        low: as of ``matmul_inject``.
        inject: as of ``matmul_inject``, or None.
        parts: as of ``matmul_inject``, or None like that.

    Raises:
        ShapeError: extents or types do not fit.
    """
    _, num_streams, size = x.shape
    width = num_streams * size
    expect("read_few norm", norm, (width,))
    expect("read_few normed", normed, (1, down.cols))
    expect("read_few low", low, (1, down.rows))
    rows, num_parts, lane = 0, 0, FLOAT_LANE
    others = (normed, normed)
    if inject is not None and parts is not None:
        rows, num_parts, lane = inject.rows, inject_parts(width), matrix_of(inject).lane
        expect("read_few parts", parts, (num_parts, 1, rows))
        others = (inject.data, parts)
    plan = _read_plan(matrix_of(down), num_streams, lane, num_parts, gpu_of(stream))
    numbers = (size, down.rows, down.cols, rows, slice_cols(QuantType.F32, width))
    operands = (x, norm, eps, normed, down.data, low, *others)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, *operands, *numbers)


def can_mix_beside(stream: Stream, low: Tensor, num_streams: int, up: Weight) -> bool:
    """Whether ``matmul_silu_mix`` takes them: few tokens, and on a GPU."""
    tokens = low.shape[0]
    if not 0 < tokens <= FEW_TOKENS or not stream.shared_bytes:
        return False
    return _can_mix(matrix_of(up), tokens, gpu_of(stream), num_streams)


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
    matrix, passes = matrix_of(up), blocks(tokens, FEW_COLUMNS)
    extra = Extra(is_gated=True, streams=num_streams)
    plan = few_plan((matrix,), tokens, passes, gpu_of(stream), extra=extra)
    numbers = (int(up.qtype), tokens, up.rows, up.cols)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, low, up.data, normed, out, *numbers)


@lru_cache(maxsize=64)
def _can_mix(matrix: Matrix, tokens: int, gpu: Gpu, num_streams: int) -> bool:
    return can_mix(matrix, tokens, blocks(tokens, FEW_COLUMNS), gpu, num_streams)


@lru_cache(maxsize=64)
def _inject_plan(matrix: Matrix, lane: int, tokens: int, num_parts: int, gpu: Gpu) -> Plan:
    """The product's, with more blocks for the inject's slices."""
    plan = few_plan((matrix,), tokens, blocks(tokens, FEW_COLUMNS), gpu)
    warps = min(INJECT_WARPS, plan.block[0] // WARP)
    slices = blocks(num_parts * blocks(tokens, INJECT_TOKENS), warps)
    return _with_more(plan, "matmul_few_inject", lane, slices)


@lru_cache(maxsize=64)
def _read_plan(matrix: Matrix, num_streams: int, lane: int, num_parts: int, gpu: Gpu) -> Plan:
    """The same, with warps that norm streams, and room for these in each of the inject's blocks."""
    plan = few_plan((matrix,), 1, 1, gpu)
    threads = WARP * (blocks(num_streams * NORM_WARPS, MOST_EACH) + 1)
    plan = replace(plan, block=(max(plan.block[0], threads), 1, 1))
    warps = min(INJECT_WARPS, plan.block[0] // WARP)
    more = _with_more(plan, "read_few", lane, blocks(num_parts, warps))
    least = _FLOAT_BYTES * matrix.cols if num_parts else 0
    return replace(more, shared_bytes=max(plan.shared_bytes, least))


def _with_more(plan: Plan, name: str, lane: int, more: int) -> Plan:
    """Another function than matmul_few, with so many blocks more."""
    passes, num_blocks, _ = plan.grid
    parameters = plan.unit.function.partition("<")[2].rstrip(">")
    return replace(
        plan,
        unit=plan.unit._replace(function=f"{name}<{parameters}, {lane}>"),
        grid=(passes, num_blocks + blocks(more, passes), 1),
        extents=(num_blocks, *plan.extents),
    )
