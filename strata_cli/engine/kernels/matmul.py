"""Matrix products with quantized weights, dense and grouped by expert.

Rows are decoded a few at a time, right before they are used, and multiplied with the tiles of
``simd.py``; no float copy of a matrix ever exists. An output depends on its weight row and its
activation row alone: not on the number of rows, their neighbours, the cut or the place of bytes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.dequant import Dequantizer, dequantizer
from strata_cli.engine.kernels.dequant_loads import call_dequantizer
from strata_cli.engine.kernels.jit import inline_jit, nogil_jit
from strata_cli.engine.kernels.simd import tile_1x1, tile_4x1, tile_4x4
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import QuantType, dequantize, row_bytes
from strata_cli.errors import ShapeError

ROW_TILE = 16  # weight rows of one host item
TOKEN_BLOCK = 256  # activation rows of one host item where row tiles alone are too few to share
FEW_ROW_TILES = 16

# Measured host time per weight decoded and per multiplication; they only steer the threads.
_DECODE_NS = 0.4
_PRODUCT_NS = 0.03
_WORTH_A_THREAD_NS = 25_000.0

_FLOAT_BYTES = 4
_ADDRESS_BYTES = 8
_LINE_BYTES = 64
_PADDING = 16  # floats between decoded rows: rows 4 KiB apart would compete for cache sets
_FEW_TOKENS = 8


class PackedRows(NamedTuple):
    """Consecutive rows of one quantized matrix.

    Attributes:
        address: first byte.
        row_bytes: bytes per row.
        rows: how many.
        cols: weights per row.
    """

    address: int
    row_bytes: int
    rows: int
    cols: int


@inline_jit
def _decode(packed: PackedRows, decoder: Dequantizer, scratch: int, stride: int) -> None:
    """Write the rows as float32 at scratch, stride bytes apart."""
    blocks = packed.cols // decoder.block_weights
    for row in range(packed.rows):
        source = packed.address + row * packed.row_bytes
        call_dequantizer(decoder.function, source, scratch + row * stride, blocks, decoder.table)


@inline_jit
def _multiply(floats: PackedRows, x_rows: NDArray[np.int64], out: int, out_stride: int) -> None:
    """out[p, r] = sum_k w[r, k] x[p, k], for float32 rows and a table of activation addresses."""
    table, count, stride, cols = x_rows.ctypes.data, len(x_rows), floats.row_bytes, floats.cols
    for p in range(count):
        in_four = p < count & ~3
        if in_four and p & 3:
            continue
        x = table + p * _ADDRESS_BYTES
        for r in range(0, floats.rows - 3, 4):
            w = floats.address + r * stride
            to = out + p * out_stride + r * _FLOAT_BYTES
            if in_four:
                tile_4x4(w, stride, x, cols, to, out_stride)
            else:
                tile_4x1(w, stride, x, cols, to, out_stride)
    for p in range(count):
        for r in range(floats.rows & ~3, floats.rows):
            w = floats.address + r * stride
            to = out + p * out_stride + r * _FLOAT_BYTES
            tile_1x1(w, stride, table + p * _ADDRESS_BYTES, cols, to, out_stride)


@inline_jit
def _row_tile(
    packed: PackedRows,
    decoder: Dequantizer,
    scratch: NDArray[np.uint8],
    x_rows: NDArray[np.int64],
    out: int,
    out_stride: int,
) -> None:
    """Decode and multiply one tile of weight rows; out is the address of its first output.

    For a few activation rows it goes four weight rows at a time, so that the floats are still in
    the first-level cache when they are used.
    """
    if decoder.function == 0:
        _multiply(packed, x_rows, out, out_stride)
        return
    floats = (scratch.ctypes.data + _LINE_BYTES - 1) & -_LINE_BYTES
    stride = (packed.cols + _PADDING) * _FLOAT_BYTES
    step = 4 if len(x_rows) < _FEW_TOKENS else packed.rows
    for row in range(0, packed.rows, step):
        rows = min(step, packed.rows - row)
        part = PackedRows(
            packed.address + row * packed.row_bytes, packed.row_bytes, rows, packed.cols
        )
        _decode(part, decoder, floats, stride)
        decoded = PackedRows(floats, stride, rows, packed.cols)
        _multiply(decoded, x_rows, out + row * _FLOAT_BYTES, out_stride)


@inline_jit
def _scratch(cols: int) -> NDArray[np.uint8]:
    return np.empty(ROW_TILE * (cols + _PADDING) * _FLOAT_BYTES + _LINE_BYTES, np.uint8)


@inline_jit
def _tile_of(matrix: PackedRows, tile: int) -> PackedRows:
    row = tile * ROW_TILE
    return PackedRows(
        matrix.address + row * matrix.row_bytes,
        matrix.row_bytes,
        min(ROW_TILE, matrix.rows - row),
        matrix.cols,
    )


@nogil_jit
def _matmul_items(
    begin: int,
    end: int,
    x: NDArray[np.float32],
    matrix: PackedRows,
    decoder: Dequantizer,
    token_block: int,
    out: NDArray[np.float32],
) -> None:
    """Items are pairs of a row tile (outermost) and a block of activation rows."""
    tokens, cols = x.shape
    scratch = _scratch(cols)
    x_rows = np.empty(tokens, np.int64)
    for t in range(tokens):
        x_rows[t] = x.ctypes.data + t * cols * _FLOAT_BYTES
    blocks = (tokens + token_block - 1) // token_block
    for item in range(begin, end):
        tile, first = item // blocks, item % blocks * token_block
        to = out.ctypes.data + (first * matrix.rows + tile * ROW_TILE) * _FLOAT_BYTES
        part = x_rows[first : min(first + token_block, tokens)]
        _row_tile(_tile_of(matrix, tile), decoder, scratch, part, to, matrix.rows * _FLOAT_BYTES)


@nogil_jit
def _grouped_items(
    begin: int,
    end: int,
    x: NDArray[np.float32],
    blobs: NDArray[np.int64],
    row_of: NDArray[np.int32],
    expert_start: NDArray[np.int32],
    matrix: PackedRows,
    decoder: Dequantizer,
    out: NDArray[np.float32],
) -> None:
    """Items are row tiles, of all experts: equal work whatever the routing. matrix.address is the
    offset inside a blob."""
    scratch = _scratch(matrix.cols)
    x_rows = np.empty(len(row_of), np.int64)
    for p in range(len(row_of)):
        x_rows[p] = x.ctypes.data + np.int64(row_of[p]) * matrix.cols * _FLOAT_BYTES
    for tile in range(begin, end):
        part = _tile_of(matrix, tile)
        for expert in range(len(blobs)):
            first, last = np.int64(expert_start[expert]), np.int64(expert_start[expert + 1])
            if first == last:
                continue
            packed = PackedRows(blobs[expert] + part.address, part.row_bytes, part.rows, part.cols)
            to = out.ctypes.data + (first * matrix.rows + tile * ROW_TILE) * _FLOAT_BYTES
            _row_tile(packed, decoder, scratch, x_rows[first:last], to, matrix.rows * _FLOAT_BYTES)


def _row_tiles(rows: int) -> int:
    return math.ceil(rows / ROW_TILE)


def _token_block(tokens: int, rows: int) -> int:
    return tokens if _row_tiles(rows) >= FEW_ROW_TILES else min(tokens, TOKEN_BLOCK)


def _grain(cols: int, tokens: int, matrices: int = 1) -> int:
    """Items that are worth a thread, tokens and matrices being those of one item."""
    item_ns = ROW_TILE * cols * (_DECODE_NS * matrices + _PRODUCT_NS * tokens)
    return max(1, math.ceil(_WORTH_A_THREAD_NS / item_ns))


def _matmul_host(
    begin: int,
    end: int,
    x: NDArray[np.float32],
    data: NDArray[np.uint8],
    out: NDArray[np.float32],
    qtype: int,
    tokens: int,
    rows: int,
    cols: int,
) -> None:
    matrix = PackedRows(data.ctypes.data, row_bytes(QuantType(qtype), cols), rows, cols)
    _matmul_items(begin, end, x, matrix, dequantizer(qtype), _token_block(tokens, rows), out)


def _matmul_reference(
    x: NDArray[np.float32], data: NDArray[np.uint8], qtype: QuantType, rows: int
) -> NDArray[np.float32]:
    """x [T, K] times a matrix of packed rows [N, K], in float64, rounded once: [T, N]."""
    weights = dequantize(qtype, data.reshape(rows, -1), x.shape[1])
    return (x.astype(np.float64) @ weights.T.astype(np.float64)).astype(np.float32)


def _grouped_host(
    begin: int,
    end: int,
    x: NDArray[np.float32],
    blobs: NDArray[np.int64],
    row_of: NDArray[np.int32],
    expert_start: NDArray[np.int32],
    out: NDArray[np.float32],
    qtype: int,
    rows: int,
    cols: int,
    offset_bytes: int,
) -> None:
    matrix = PackedRows(offset_bytes, row_bytes(QuantType(qtype), cols), rows, cols)
    decoder = dequantizer(qtype)
    _grouped_items(begin, end, x, blobs, row_of, expert_start, matrix, decoder, out)


def _grouped_reference(
    x: NDArray[np.float32],
    experts: list[NDArray[np.uint8]],
    qtype: QuantType,
    rows: int,
    row_of: NDArray[np.int32],
    expert_start: NDArray[np.int32],
) -> NDArray[np.float32]:
    """Pair p of expert e: x[row_of[p]] times e's packed rows; [P, N]."""
    out = np.empty((len(row_of), rows), np.float32)
    for expert, data in enumerate(experts):
        pairs = slice(expert_start[expert], expert_start[expert + 1])
        out[pairs] = _matmul_reference(x[row_of[pairs]], data, qtype, rows)
    return out


MATMUL = Kernel("matmul", _matmul_host, _matmul_reference)
GROUPED_MATMUL = Kernel("grouped_matmul", _grouped_host, _grouped_reference)


def _require(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: Any) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ShapeError(
            f"{name}: expected {list(shape)} {np.dtype(dtype)}, "
            f"got {list(tensor.shape)} {tensor.dtype}"
        )


def matmul(stream: Stream, x: Tensor, weight: Weight, out: Tensor) -> None:
    """Enqueue out = x times the weight's rows; a weight row makes an output column.

    Args:
        stream: where it runs.
        x: activations, float32 [T, K], T >= 0.
        weight: N rows of K quantized weights.
        out: float32 [T, N], overwritten; must not overlap x.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = x.shape[0]
    _require("matmul x", x, (tokens, weight.cols), np.float32)
    _require("matmul out", out, (tokens, weight.rows), np.float32)
    if tokens == 0:
        return
    token_block = _token_block(tokens, weight.rows)
    launch = Launch(
        items=_row_tiles(weight.rows) * math.ceil(tokens / token_block),
        grain=_grain(weight.cols, token_block),
    )
    stream.launch(
        MATMUL, launch, x, weight.data, out, int(weight.qtype), tokens, weight.rows, weight.cols
    )


def grouped_matmul(
    stream: Stream,
    x: Tensor,
    blobs: Tensor,
    layout: WeightLayout,
    row_of: Tensor,
    expert_start: Tensor,
    out: Tensor,
) -> None:
    """Enqueue one product per routed pair of a token and an expert, grouped by expert.

    Args:
        stream: where it runs.
        x: activations, float32 [R, K].
        blobs: address of each expert's blob, int64 [E]; read only where an expert has pairs.
        layout: the matrix inside every blob, N rows of K weights.
        row_of: row of x that each pair reads, int32 [P], pairs sorted by expert.
        expert_start: first pair of each expert and, last, P: int32 [E + 1].
        out: float32 [P, N], overwritten; must not overlap x.

    Raises:
        ShapeError: extents or types do not fit.
    """
    pairs, experts = row_of.shape[0], blobs.shape[0]
    _require("grouped_matmul x", x, (x.shape[0], layout.cols), np.float32)
    _require("grouped_matmul blobs", blobs, (experts,), np.int64)
    _require("grouped_matmul row_of", row_of, (pairs,), np.int32)
    _require("grouped_matmul expert_start", expert_start, (experts + 1,), np.int32)
    _require("grouped_matmul out", out, (pairs, layout.rows), np.float32)
    if pairs == 0:
        return
    launch = Launch(
        items=_row_tiles(layout.rows), grain=_grain(layout.cols, pairs, min(pairs, experts))
    )
    stream.launch(
        GROUPED_MATMUL,
        launch,
        x,
        blobs,
        row_of,
        expert_start,
        out,
        int(layout.qtype),
        layout.rows,
        layout.cols,
        layout.offset_bytes,
    )
