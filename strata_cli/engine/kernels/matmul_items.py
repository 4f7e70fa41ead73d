"""Matrix products with quantized weights on the host: what its threads share, and how they do it.

Rows are decoded a few at a time, right before they are used, and multiplied with the tiles of
``simd.py``; no float copy of a matrix ever exists. An output depends on its weight row and its
activation row alone: not on the number of rows, their neighbours, the cut or the place of bytes.

All products are one compiled function over segments: a segment is a run of output rows that share
a matrix, namely an expert's pairs, or a block of tokens. Compiled code takes addresses and plain
integers, because numba is slow to compile anything richer; strides and pitches are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel
from strata_cli.engine.kernels.few import FEW_SOURCE
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.pointers import (
    address_of,
    allocate_bytes,
    call_decoder,
    call_dots,
    free_bytes,
)
from strata_cli.engine.kernels.products import Unit
from strata_cli.engine.kernels.rows import compile_small
from strata_cli.engine.kernels.simd import multiply_rows

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

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


def row_tiles(rows: int) -> int:
    """Of a matrix with so many rows."""
    return math.ceil(rows / ROW_TILE)


@lru_cache(maxsize=64)
def identity(tokens: int) -> Ints:
    """Each token's own row of x."""
    return np.arange(tokens, dtype=np.int32)


@lru_cache(maxsize=256)
def token_blocks(tokens: int, rows: int) -> Ints:
    """First token of each block and, last, tokens."""
    block = tokens if row_tiles(rows) >= FEW_ROW_TILES else TOKEN_BLOCK
    return np.array([*range(0, tokens, block), tokens], np.int32)


def items_grain(cols: int, tokens: int, matrices: int = 1) -> int:
    """Items worth a thread of their own; tokens and matrices are those of one item."""
    item_ns = ROW_TILE * cols * (_DECODE_NS * matrices + _PRODUCT_NS * tokens)
    return max(1, math.ceil(_WORTH_A_THREAD_NS / item_ns))


def address_of_array(array: NDArray[Any]) -> int:
    """As compiled code takes it; whoever calls keeps the array."""
    address: int = array.__array_interface__["data"][0]
    return address


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    """As the one kind of array that the product is compiled for."""
    view = array.view()
    view.flags.writeable = False
    return view


@lru_cache(maxsize=1024)
def product_kernel(
    bind: Callable[..., tuple[Any, ...]], reference: Callable[..., Any], unit: Unit
) -> Kernel:
    """A product that a GPU makes by a unit's function, and the host by ``product_items``."""
    name = unit.function
    keeps_cache = unit.source == FEW_SOURCE  # measured
    defines = unit.defines
    return Kernel(
        name, product_items, reference, unit.source, name, defines, bind, keeps_cache=keeps_cache
    )
