"""Matrix products with quantized weights, dense and grouped by expert.

Rows are decoded a few at a time, right before they are used, and multiplied with the tiles of
``simd.py``; no float copy of a matrix ever exists. An output depends on its weight row and its
activation row alone: not on the number of rows, their neighbours, the cut or the place of bytes.

Both products are one compiled function over segments: a segment is a run of output rows that share
a matrix, namely an expert's pairs, or a block of tokens. Compiled code takes addresses and plain
integers, because numba is slow to compile anything richer; strides and pitches are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import (
    FEW_PAIRS_PER_EXPERT,
    FEW_TOKENS,
    few_is_faster,
    slices_are_faster,
)
from strata_cli.engine.kernels.dequant import dequantizer
from strata_cli.engine.kernels.few import FEW_SOURCE, few_plan
from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.pointers import (
    address_of,
    allocate_bytes,
    call_decoder,
    call_dots,
    free_bytes,
)
from strata_cli.engine.kernels.products import (
    Matrix,
    Plan,
    Unit,
    alignment,
    grouped_many_plan,
    many_plan,
    matrix_of,
    sliced_plan,
)
from strata_cli.engine.kernels.prompt_plan import (
    has_split_plan,
    has_thin_plan,
    split_plan,
    thin_plan,
)
from strata_cli.engine.kernels.rows import compile_small
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.simd import multiply_rows
from strata_cli.engine.kernels.warpgroup_plan import (
    grouped_warpgroup_plan,
    has_warpgroup_plan,
    warpgroup_plan,
    warpgroup_sliced_plan,
)
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import QuantType, dequantize, row_bytes

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]

ROUND_THREADS = 256
ROW_TILE = 16  # weight rows of one host item
TOKEN_BLOCK = 256  # tokens of one host item where row tiles alone are too few to share
FEW_ROW_TILES = 16
FEW_ROWS = 8  # below this many activation rows, decoding costs more than multiplying

# Measured host time per weight decoded and per multiplication; they only steer the threads.
_DECODE_NS = 0.2
_PRODUCT_NS = 0.03
_WORTH_A_THREAD_NS = 50_000.0

_FLOAT_BYTES = 4
_LINE_BYTES = 64
# Floats between decoded rows of whole multiples of 2 KiB, which would compete for cache sets.
_PADDING = 16
_PADDED_COLS = 512


@nogil_jit
def product_items(
    begin: int,
    end: int,
    x: int,
    row_of: Ints,
    start: Ints,
    blobs: Longs,
    offset: int,
    parts: int,
    out: int,
    rows: int,
    cols: int,
    row_nbytes: int,
    function: int,
    table: int,
    block_weights: int,
    dots: int,
) -> None:
    """Items are (row tile, part of the segments), row tile outermost.

    Segment s makes output rows start[s] .. start[s + 1] from the packed matrix offset bytes into
    blobs[s] and the rows of x that row_of names. x and out are addresses; function, table,
    block_weights and dots are the type's decoder. One activation row is multiplied while weights
    are decoded. For a few it decodes four weight rows at a time, so that they are still in the
    first-level cache when they are used.
    """
    pitch, segments = rows * _FLOAT_BYTES, blobs.size
    w_pitch = (cols if cols % _PADDED_COLS else cols + _PADDING) * _FLOAT_BYTES
    scratch, floats = np.intp(0), np.intp(0)
    compile_small()
    for item in range(begin, end):
        first_row, part = item // parts * ROW_TILE, item % parts
        end_row = first_row + ROW_TILE if first_row + ROW_TILE < rows else rows
        for s in range(part * segments // parts, (part + 1) * segments // parts):
            first = np.intp(start[s])
            count = start[s + 1] - first
            if count == 0:
                continue
            if count == 1 and dots != 0:
                w, n = blobs[s] + offset + first_row * row_nbytes, end_row - first_row
                source = x + np.intp(row_of[first]) * cols * _FLOAT_BYTES
                to = out + first * pitch + first_row * _FLOAT_BYTES
                call_dots(dots, w, row_nbytes, n, source, cols // block_weights, table, to)
                continue
            if scratch == 0:
                scratch = allocate_bytes(ROW_TILE * w_pitch + _LINE_BYTES)
                floats = (scratch + _LINE_BYTES - 1) & -_LINE_BYTES
            ids = address_of(row_of) + first * 4
            step = 4 if count < FEW_ROWS else ROW_TILE
            for row in range(first_row, end_row, step):
                n = step if step < end_row - row else end_row - row
                w, w_stride = blobs[s] + offset + row * row_nbytes, row_nbytes
                if function != 0:
                    at_once = n if cols % _PADDED_COLS else 1
                    for i in range(0, n, at_once):
                        source, target = w + i * row_nbytes, floats + i * w_pitch
                        blocks = at_once * (cols // block_weights)
                        call_decoder(function, source, target, blocks, table)
                    w, w_stride = floats, w_pitch
                to = out + first * pitch + row * _FLOAT_BYTES
                multiply_rows(w, w_stride, n, x, cols, ids, count, to, pitch)
    if scratch != 0:
        free_bytes(scratch)


def _row_tiles(rows: int) -> int:
    return math.ceil(rows / ROW_TILE)


@lru_cache(maxsize=64)
def _identity(tokens: int) -> Ints:
    return np.arange(tokens, dtype=np.int32)


@lru_cache(maxsize=256)
def _token_blocks(tokens: int, rows: int) -> Ints:
    """First token of each block and, last, tokens."""
    block = tokens if _row_tiles(rows) >= FEW_ROW_TILES else TOKEN_BLOCK
    return np.array([*range(0, tokens, block), tokens], np.int32)


def _grain(cols: int, tokens: int, matrices: int = 1) -> int:
    """Items worth a thread of their own; tokens and matrices are those of one item."""
    item_ns = ROW_TILE * cols * (_DECODE_NS * matrices + _PRODUCT_NS * tokens)
    return max(1, math.ceil(_WORTH_A_THREAD_NS / item_ns))


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """As the one kind of array that the product is compiled for."""
    view = array.view()
    view.flags.writeable = False
    return view


def _bind_matmul(
    x: Floats, data: Bytes, out: Floats, qtype: int, tokens: int, rows: int, cols: int
) -> tuple[Any, ...]:
    start = _token_blocks(tokens, rows)
    blocks = start.size - 1
    blobs = np.full(blocks, _address(data), np.int64)
    return (
        _address(x),
        read_only(_identity(tokens)),
        read_only(start),
        read_only(blobs),
        0,
        blocks,
        _address(out),
        rows,
        cols,
        data.nbytes // rows,
        *dequantizer(qtype),
    )


def _matmul_reference(x: Floats, data: Bytes, qtype: QuantType, rows: int) -> Floats:
    """x [T, K] times packed rows [N, K], summed in float64: [T, N]."""
    weights = dequantize(qtype, data.reshape(rows, -1), x.shape[1])
    return (x.astype(np.float64) @ weights.T.astype(np.float64)).astype(np.float32)


MATMUL = Kernel("matmul", product_items, _matmul_reference, bind=_bind_matmul)


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
    num_blocks = len(_token_blocks(tokens, matrix.rows)) - 1
    items, grain = _row_tiles(matrix.rows) * num_blocks, _grain(matrix.cols, tokens // num_blocks)
    is_few = few_is_faster(matrix, tokens, can_slice=room != NO_ROOM)
    if not is_few and _has_many(matrix, half_phase):
        sliced = _sliced_way(matrix, tokens, room, gpu)
        if sliced is not None:
            return sliced
        plan = _dense_plan(matrix, tokens, gpu)
        kernel = _kernel(_bind_matmul_many, _matmul_reference, plan.unit)
        return _Way(True, kernel, plan.launch(items, grain, early=True))
    split = _split_plan(matrix, tokens, x_phase, gpu, is_few=is_few)
    plan = split or few_plan((matrix,), tokens, blocks(tokens, FEW_COLUMNS), gpu)
    kernel = _kernel(_bind_matmul, _matmul_reference, plan.unit)
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


def _grouped_plan(gpu: Gpu, matrix: Matrix, pairs: int, experts: int) -> Plan:
    """The faster of two functions for many pairs; they give the same bits."""
    if has_warpgroup_plan(matrix, gpu, experts):
        return grouped_warpgroup_plan(matrix, pairs, experts, gpu)
    return grouped_many_plan(matrix, pairs, experts, gpu.shared_bytes)


def _has_many(matrix: Matrix, half_phase: int) -> bool:
    """Whether the many-row function takes it: not float32, and rows of x in pieces of 16 bytes."""
    return matrix.qtype is not QuantType.F32 and matrix.cols % 8 == 0 and half_phase == 0


@lru_cache(maxsize=1024)
def _kernel(
    bind: Callable[..., tuple[Any, ...]], reference: Callable[..., Any], unit: Unit
) -> Kernel:
    name = unit.function
    keeps_cache = unit.source == FEW_SOURCE  # measured
    defines = unit.defines
    return Kernel(
        name, product_items, reference, unit.source, name, defines, bind, keeps_cache=keeps_cache
    )


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
        _address(x),
        read_only(row_of),
        read_only(expert_start),
        read_only(blobs),
        offset_bytes,
        1,
        _address(out),
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
        out[pairs] = _matmul_reference(x[row_of[pairs]], data, qtype, rows)
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
    items = _row_tiles(layout.rows)
    grain = _grain(layout.cols, pairs, min(pairs, experts))
    row_nbytes = row_bytes(layout.qtype, layout.cols)
    align = alignment(row_nbytes, layout.offset_bytes)
    matrix = Matrix(layout.qtype, layout.rows, layout.cols, align)
    numbers = (int(layout.qtype), layout.rows, layout.cols, layout.offset_bytes)
    gpu = gpu_of(stream)
    is_many = pairs > FEW_PAIRS_PER_EXPERT * experts
    if is_many and rounded is not None and _has_many(matrix, rounded.address & 15):
        expect("grouped_matmul rounded", rounded, x.shape, np.float16)
        plan = _grouped_plan(gpu, matrix, pairs, experts)
        kernel = _kernel(_bind_grouped_many, _grouped_reference, plan.unit)
        launch = plan.launch(items, grain, early=True)
        stream.launch(kernel, launch, x, rounded, blobs, row_of, expert_start, out, *numbers)
        return
    plan = few_plan((matrix,), x.shape[0], pairs, gpu, experts)
    kernel = _kernel(_bind_grouped, _grouped_reference, plan.unit)
    launch = plan.launch(items, grain, early=True)
    stream.launch(kernel, launch, x, blobs, row_of, expert_start, out, *numbers)
