"""Matrix products grouped by expert: each pair of a token and an expert has the bits of matmul."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_PAIRS_PER_EXPERT
from strata_cli.engine.kernels.dequant import dequantizer
from strata_cli.engine.kernels.few import few_plan
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.matmul import has_many, matmul_reference
from strata_cli.engine.kernels.matmul_items import (
    address_of_array,
    items_grain,
    product_items,
    product_kernel,
    read_only,
    row_tiles,
)
from strata_cli.engine.kernels.products import Matrix, Plan, alignment, grouped_many_plan
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.warpgroup_plan import grouped_warpgroup_plan, has_warpgroup_plan
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.quants import QuantType, row_bytes

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]


def _grouped_plan(gpu: Gpu, matrix: Matrix, pairs: int, experts: int) -> Plan:
    """The faster of two functions for many pairs; they give the same bits."""
    if has_warpgroup_plan(matrix, gpu, experts):
        return grouped_warpgroup_plan(matrix, pairs, experts, gpu)
    return grouped_many_plan(matrix, pairs, experts, gpu.shared_bytes)


def _bind_grouped(
    x: Floats,
    blobs: Longs,
    row_of: Ints,
    expert_start: Ints,
    out: Floats,
    qtype: int,
    rows: int,
    cols: int,
    offset_bytes: int,
) -> tuple[Any, ...]:
    """Every item goes through all experts: equal work for each thread whatever the routing."""
    return (
        address_of_array(x),
        read_only(row_of),
        read_only(expert_start),
        read_only(blobs),
        offset_bytes,
        1,
        address_of_array(out),
        rows,
        cols,
        row_bytes(QuantType(qtype), cols),
        *dequantizer(qtype),
    )


def _grouped_reference(
    x: Floats, experts: list[Bytes], qtype: QuantType, rows: int, row_of: Ints, expert_start: Ints
) -> Floats:
    """Pair p of expert e: x[row_of[p]] times e's packed rows; [P, N]."""
    out = np.empty((len(row_of), rows), np.float32)
    for expert, data in enumerate(experts):
        pairs = slice(expert_start[expert], expert_start[expert + 1])
        out[pairs] = matmul_reference(x[row_of[pairs]], data, qtype, rows)
    return out


GROUPED_MATMUL = Kernel("grouped_matmul", product_items, _grouped_reference, bind=_bind_grouped)


def _bind_grouped_many(x: Floats, _rounded: Halves, *args: Any) -> tuple[Any, ...]:
    return _bind_grouped(x, *args)


def _coarse(pairs: int) -> int:
    """At least so many, in few enough steps that plans are found again."""
    step = max(16, 1 << max(pairs.bit_length() - 4, 0))
    return blocks(pairs, step) * step


def grouped_matmul(
    stream: Stream,
    x: Tensor,
    blobs: Tensor,
    layout: WeightLayout,
    row_of: Tensor,
    expert_start: Tensor,
    out: Tensor,
    rounded: Tensor | None = None,
    num_pairs: int | None = None,
) -> None:
    """Enqueue one product per routed pair of a token and an expert, grouped by expert.

    Each pair has the bits of ``matmul`` with its expert. Experts that follow each other may be
    given without the others: then only their pairs' rows of ``out`` are written.

    Args:
        stream: where it runs.
        x: activations, float32 [R, K].
        blobs: address of each expert's blob, int64 [E]; read only where an expert has pairs. Each
            is a multiple of 16, or of the largest power of two that divides a row's bytes.
        layout: the matrix inside every blob, N rows of K weights.
        row_of: row of x that each pair reads, int32 [P], pairs sorted by expert.
        expert_start: first pair of each expert and end of the last one's, at most P: int32 [E + 1].
        out: float32 [P, N]; the experts' pairs are overwritten; must not overlap x.
        rounded: x as ``round_rows`` left it, float16 [R, K]; makes many pairs fast.
        num_pairs: of all these experts; None: P.

    Raises:
        ShapeError: extents or types do not fit.
    """
    pairs, experts = row_of.shape[0], blobs.shape[0]
    expect("grouped_matmul x", x, (x.shape[0], layout.cols))
    expect("grouped_matmul blobs", blobs, (experts,), np.int64)
    expect("grouped_matmul row_of", row_of, (pairs,), np.int32)
    expect("grouped_matmul expert_start", expert_start, (experts + 1,), np.int32)
    expect("grouped_matmul out", out, (pairs, layout.rows))
    if num_pairs is not None:
        pairs = min(pairs, _coarse(num_pairs))
    if pairs == 0:
        return
    items = row_tiles(layout.rows)
    grain = items_grain(layout.cols, pairs, min(pairs, experts))
    row_nbytes = row_bytes(layout.qtype, layout.cols)
    align = alignment(row_nbytes, layout.offset_bytes)
    matrix = Matrix(layout.qtype, layout.rows, layout.cols, align)
    numbers = (int(layout.qtype), layout.rows, layout.cols, layout.offset_bytes)
    gpu = gpu_of(stream)
    is_many = pairs > FEW_PAIRS_PER_EXPERT * experts
    if is_many and rounded is not None and has_many(matrix, rounded.address & 15):
        expect("grouped_matmul rounded", rounded, x.shape, np.float16)
        plan = _grouped_plan(gpu, matrix, pairs, experts)
        kernel = product_kernel(_bind_grouped_many, _grouped_reference, plan.unit)
        launch = plan.launch(items, grain, early=True)
        stream.launch(kernel, launch, x, rounded, blobs, row_of, expert_start, out, *numbers)
        return
    plan = few_plan((matrix,), x.shape[0], pairs, gpu, experts)
    kernel = product_kernel(_bind_grouped, _grouped_reference, plan.unit)
    launch = plan.launch(items, grain, early=True)
    stream.launch(kernel, launch, x, blobs, row_of, expert_start, out, *numbers)
