"""Reads of the streams of some tokens on a GPU: the low-rank product, and the inject beside it.

Bits are those of the launches one by one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS, SOME_TOKENS, slices_are_faster
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import (
    WARP,
    Matrix,
    Unit,
    alignment,
    matrix_of,
    slice_cols,
    sliced_plan,
)
from strata_cli.engine.kernels.prompt_plan import has_thin_plan
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.stream_read import INJECT_TOKENS, INJECT_WARPS, inject_parts
from strata_cli.engine.kernels.warpgroup_plan import warpgroup_sliced_plan
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType

SOURCE = "stream_squeeze.cu"
THREADS = INJECT_WARPS * WARP


class Inject(NamedTuple):
    """Float32 rows of S * D, and the parts [P, T, N] of their product with the normed streams."""

    weight: Weight
    parts: Tensor


def can_squeeze_some(
    stream: Stream, rounded: Tensor, down: Weight, inject: Weight | None, scratch: Tensor
) -> bool:
    """Whether ``squeeze_some`` takes them: more than few tokens, not many, and on a GPU."""
    tokens, matrix = rounded.shape[0], matrix_of(down)
    if not stream.shared_bytes or not FEW_TOKENS < tokens <= SOME_TOKENS:
        return False
    is_thin = inject is None or has_thin_plan(matrix_of(inject), 0)
    has_many = matrix.qtype is not QuantType.F32 and alignment(rounded.address) == 16
    if not (is_thin and has_many and matrix.cols % 8 == 0 and slices_are_faster(matrix, tokens)):
        return False
    return sliced_plan(matrix, tokens, stream.shared_bytes).num_floats <= scratch.size


def squeeze_some(
    stream: Stream,
    normed: Tensor,
    rounded: Tensor,
    down: Weight,
    inject: Inject | None,
    num_streams: int,
    scratch: Tensor,
    low: Tensor,
) -> None:
    """Enqueue silu of the normed streams' product with R rows over S, and their inject's parts.

    Args:
        stream: where it runs; ``can_squeeze_some`` said yes.
        normed: float32 [T, S * D], aligned to 16 bytes.
        rounded: normed as ``round_rows`` left it, float16 [T, S * D].
        down: R rows of S * D.
        inject: what ``stream_write`` takes, overwritten; None: none.
        num_streams: S.
        scratch: float32 [any], overwritten.
        low: float16 [T, R], overwritten: ``lowrank_silu`` of the product, as ``round_rows`` rounds.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens, width = normed.shape
    expect("squeeze_some rounded", rounded, (tokens, down.cols), np.float16)
    expect("squeeze_some low", low, (tokens, down.rows), np.float16)
    rows = 0
    if inject is not None:
        rows = inject.weight.rows
        expect("squeeze_some parts", inject.parts, (inject_parts(width), tokens, rows))
    plan = _plan(matrix_of(down), tokens, gpu_of(stream), num_streams, rows)
    numbers = (tokens, down.rows, down.cols)
    stream.launch(plan.multiply, plan.slices, rounded, down.data, scratch, *numbers)
    weights, parts = (down.data, scratch) if inject is None else (inject.weight.data, inject.parts)
    stream.launch(plan.activate, plan.join, scratch, low, normed, weights, parts)


class _Plan(NamedTuple):
    """Two launches: slices of the product, what adds them up, with blocks for the inject."""

    multiply: Kernel
    slices: Launch
    activate: Kernel
    join: Launch


@lru_cache(maxsize=1024)
def _plan(matrix: Matrix, tokens: int, gpu: Gpu, num_streams: int, rows: int) -> _Plan:
    """Of a product and an inject of so many rows, 0: none."""
    plan, cols = warpgroup_sliced_plan(matrix, tokens, gpu), matrix.cols
    plan = plan or sliced_plan(matrix, tokens, gpu.shared_bytes)
    num_slices, values = plan.join.extents
    joining = blocks(values, THREADS)
    jobs = inject_parts(cols) * blocks(tokens, INJECT_TOKENS) if rows else 0
    lane = Matrix(QuantType.F32, max(rows, 1), cols, 16).lane
    numbers = (num_streams, joining, tokens, rows, cols, slice_cols(QuantType.F32, cols))
    join = Launch(
        items=1,
        grid=(joining + blocks(jobs, INJECT_WARPS), 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_slices, values, *numbers),
        early=True,
    )
    activate = Unit(SOURCE, f"join_squeeze<{matrix.qtype.name}, {lane}>", plan.join.unit.defines)
    slices = plan.slices.launch(1, 1, early=True)
    return _Plan(gpu_kernel(plan.slices.unit), slices, gpu_kernel(activate), join)
