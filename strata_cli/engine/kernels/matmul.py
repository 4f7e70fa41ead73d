"""Matrix products with quantized weights, and the rounding of what some of them take.

How the host makes them is in ``matmul_items.py``; a GPU takes the function that is done first.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS, few_is_faster, slices_are_faster
from strata_cli.engine.kernels.dequant import dequantizer
from strata_cli.engine.kernels.few import few_plan
from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.matmul_items import (
    address_of_array,
    identity,
    items_grain,
    product_items,
    product_kernel,
    read_only,
    row_tiles,
    token_blocks,
)
from strata_cli.engine.kernels.products import Matrix, Plan, many_plan, matrix_of, sliced_plan
from strata_cli.engine.kernels.prompt_plan import (
    has_split_plan,
    has_thin_plan,
    split_plan,
    thin_plan,
)
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.warpgroup_plan import (
    has_warpgroup_plan,
    warpgroup_plan,
    warpgroup_sliced_plan,
)
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType, dequantize

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]

ROUND_THREADS = 256


def _bind_matmul(
    x: Floats, data: Bytes, out: Floats, qtype: int, tokens: int, rows: int, cols: int
) -> tuple[Any, ...]:
    start = token_blocks(tokens, rows)
    blocks = start.size - 1
    blobs = np.full(blocks, address_of_array(data), np.int64)
    return (
        address_of_array(x),
        read_only(identity(tokens)),
        read_only(start),
        read_only(blobs),
        0,
        blocks,
        address_of_array(out),
        rows,
        cols,
        data.nbytes // rows,
        *dequantizer(qtype),
    )


def matmul_reference(x: Floats, data: Bytes, qtype: QuantType, rows: int) -> Floats:
    """x [T, K] times packed rows [N, K], summed in float64: [T, N]."""
    weights = dequantize(qtype, data.reshape(rows, -1), x.shape[1])
    return (x.astype(np.float64) @ weights.T.astype(np.float64)).astype(np.float32)


MATMUL = Kernel("matmul", product_items, matmul_reference, bind=_bind_matmul)


def _bind_matmul_many(x: Floats, _rounded: Halves, *args: Any) -> tuple[Any, ...]:
    return _bind_matmul(x, *args)


def matmul(
    stream: Stream,
    x: Tensor,
    weight: Weight,
    out: Tensor,
    rounded: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Enqueue out = x times the transposed weight; a weight row makes an output column.

    A GPU rounds activations of every type but F32 to f16. Its bits do not depend on ``rounded``,
    which only makes many rows fast.

    Args:
        stream: where it runs.
        x: activations, float32 [T, K], T >= 0.
        weight: N rows of K quantized weights.
        out: float32 [T, N], overwritten; must not overlap x.
        rounded: x as ``round_rows`` left it, float16 [T, K].
        scratch: float32 [any], overwritten; the more, the sooner some rows are done.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = x.shape[0]
    expect("matmul x", x, (tokens, weight.cols))
    expect("matmul out", out, (tokens, weight.rows))
    if tokens == 0:
        return
    matrix = matrix_of(weight)
    half_phase = NO_HALVES if rounded is None else rounded.address & 15
    room = NO_ROOM if scratch is None or not stream.shared_bytes else scratch.size
    way = _dense_way(matrix, tokens, x.address & 15, half_phase, room, gpu_of(stream))
    numbers = (int(weight.qtype), tokens, weight.rows, weight.cols)
    if not way.takes_halves:
        stream.launch(way.kernel, way.launch, x, weight.data, out, *numbers)
        return
    assert rounded is not None
    expect("matmul rounded", rounded, (tokens, weight.cols), np.float16)
    if way.join is None:
        stream.launch(way.kernel, way.launch, x, rounded, weight.data, out, *numbers)
        return
    assert scratch is not None
    stream.launch(way.kernel, way.launch, rounded, weight.data, scratch, *numbers[1:])
    stream.launch(*way.join, scratch, out)


NO_HALVES = -1  # in place of what is left of an address
NO_ROOM = -1


class _Way(NamedTuple):
    """How a dense product is made: by which launch, of float16 activations or float32 ones.

    Attributes:
        join: where that makes slices, what adds them up.
    """

    takes_halves: bool
    kernel: Kernel
    launch: Launch
    join: tuple[Kernel, Launch] | None = None


@lru_cache(maxsize=4096)
def _dense_way(
    matrix: Matrix, tokens: int, x_phase: int, half_phase: int, room: int, gpu: Gpu
) -> _Way:
    """The fastest way on a GPU, and its share of the work on the host.

    Args:
        matrix: the weight's.
        tokens: rows of activations.
        x_phase: last four bits of the address of float32 activations.
        half_phase: the same of float16 ones, or NO_HALVES.
        room: floats of scratch, or NO_ROOM.
        gpu: where it runs.
    """
    num_blocks = len(token_blocks(tokens, matrix.rows)) - 1
    items = row_tiles(matrix.rows) * num_blocks
    grain = items_grain(matrix.cols, tokens // num_blocks)
    is_few = few_is_faster(matrix, tokens, can_slice=room != NO_ROOM)
    if not is_few and has_many(matrix, half_phase):
        sliced = _sliced_way(matrix, tokens, room, gpu)
        if sliced is not None:
            return sliced
        plan = _dense_plan(matrix, tokens, gpu)
        kernel = product_kernel(_bind_matmul_many, matmul_reference, plan.unit)
        return _Way(True, kernel, plan.launch(items, grain, early=True))
    split = _split_plan(matrix, tokens, x_phase, gpu, is_few=is_few)
    plan = split or few_plan((matrix,), tokens, blocks(tokens, FEW_COLUMNS), gpu)
    kernel = product_kernel(_bind_matmul, matmul_reference, plan.unit)
    return _Way(False, kernel, plan.launch(items, grain, early=True))


def forget_choices() -> None:
    """Choose anew how dense products are made, after what chooses was replaced."""
    _dense_way.cache_clear()


def _sliced_way(matrix: Matrix, tokens: int, room: int, gpu: Gpu) -> _Way | None:
    """Slice by slice, where that is faster and there is room for their sums."""
    if room == NO_ROOM or not slices_are_faster(matrix, tokens):
        return None
    plan = warpgroup_sliced_plan(matrix, tokens, gpu)
    plan = plan or sliced_plan(matrix, tokens, gpu.shared_bytes)
    if plan.num_floats > room:
        return None
    slices, join = (each.launch(1, 1, early=True) for each in (plan.slices, plan.join))
    return _Way(True, gpu_kernel(plan.slices.unit), slices, (gpu_kernel(plan.join.unit), join))


def _split_plan(
    matrix: Matrix, tokens: int, x_phase: int, gpu: Gpu, *, is_few: bool
) -> Plan | None:
    """A function for float32 weights and many rows; None where there is none for them."""
    if tokens <= FEW_TOKENS:
        return None
    if has_thin_plan(matrix, x_phase):
        return thin_plan(matrix, tokens)
    if is_few:
        return None
    return split_plan(matrix, tokens) if has_split_plan(matrix, x_phase, gpu) else None


def _dense_plan(matrix: Matrix, tokens: int, gpu: Gpu) -> Plan:
    """The faster of two functions for many rows; they give the same bits."""
    if has_warpgroup_plan(matrix, gpu):
        return warpgroup_plan(matrix, tokens, gpu)
    return many_plan(matrix, tokens, gpu.shared_bytes)


def has_many(matrix: Matrix, half_phase: int) -> bool:
    """Whether the many-row function takes it: not float32, and rows of x in pieces of 16 bytes."""
    return matrix.qtype is not QuantType.F32 and matrix.cols % 8 == 0 and half_phase == 0


def _round_rows(_begin: int, _end: int, _x: Floats, _rounded: Halves) -> None:
    """The host multiplies float32 activations as they are."""


def _round_reference(x: Floats) -> Halves:
    return np.clip(x, -65504.0, 65504.0).astype(np.float16)


ROUND_ROWS = Kernel("round_rows", _round_rows, _round_reference, "round_rows.cu")


def round_rows(stream: Stream, x: Tensor, rounded: Tensor) -> None:
    """Enqueue rounding to f16, for products with many rows. On the host nothing is written.

    Args:
        stream: where it runs.
        x: float32 [T, K].
        rounded: float16 [T, K], overwritten: nearest, at most 65504 in magnitude.

    Raises:
        ShapeError: extents or types do not fit.
    """
    expect("round_rows x", x, x.shape)
    expect("round_rows rounded", rounded, x.shape, np.float16)
    launch = Launch(
        items=1 if x.size else 0,
        grid=(max(1, blocks(x.size, 8 * ROUND_THREADS)), 1, 1),
        block=(ROUND_THREADS, 1, 1),
        extents=(x.size,),
        early=True,
    )
    stream.launch(ROUND_ROWS, launch, x, rounded)
