"""Products of one expert's matrix on the host's processor, as threads of a pool share them out.

Either with the bits of the host's own products, or, where the processor has the instructions for
it, in fixed point: see ``fixed_dots.py``. A thread makes the digits of a row when it first needs
them, which is sooner done than waiting for another one that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.dequant import dequantizer
from strata_cli.engine.kernels.fixed_dots import UNIT_BYTES
from strata_cli.engine.kernels.fixed_types import NO_PRODUCT, fixed_product
from strata_cli.engine.kernels.jit import inline_jit
from strata_cli.engine.kernels.matmul_items import ROW_TILE, product_items
from strata_cli.engine.kernels.pointers import address_of, call_digits, call_fixed_dots
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.quants import row_bytes

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

# Fields of a matrix.
OFFSET, ROWS, COLS, ROW_BYTES = range(4)
DECODE, TABLE, BLOCK_WEIGHTS, DOTS = range(4, 8)
MAKE_DIGITS, FIXED_DOTS, PIECE_WEIGHTS, PIECE_DIGITS, ROOM = range(8, 13)
FIELDS = 13
_LINE_BYTES = 64
_FLOAT_BYTES = 4


class Digits(NamedTuple):
    """Rows in fixed point that one thread has made.

    Attributes:
        rooms: uint8 [rooms, P, stride].
        made: what each was last made for, int64 [rooms, P]; see product().
    """

    rooms: Bytes
    made: Longs


def matrix_fields(matrices: Sequence[WeightLayout], *, is_exact: bool) -> list[list[int]]:
    """An expert's gate, up and down as compiled code takes them, [3, FIELDS].

    Args:
        matrices: the three.
        is_exact: with the bits of the host's own products.
    """
    fields = []
    for index, layout in enumerate(matrices):
        fixed = NO_PRODUCT if is_exact else fixed_product(layout.qtype, layout.cols)
        nbytes = row_bytes(layout.qtype, layout.cols)
        shape = [layout.offset_bytes, layout.rows, layout.cols, nbytes]
        fields.append([*shape, *dequantizer(layout.qtype), *fixed, index])
    gate, up, _ = fields
    if gate[MAKE_DIGITS] == up[MAKE_DIGITS]:
        up[ROOM] = gate[ROOM]  # both read the same rows
    return fields


def new_digits(matrices: Longs, pairs: int) -> Digits:
    """Room of a thread for so many pairs of any layer; matrices are [L, 3, FIELDS]."""
    pieces = matrices[..., COLS] // matrices[..., PIECE_WEIGHTS]
    stride = UNIT_BYTES + int((pieces * matrices[..., PIECE_DIGITS]).max())
    shape = (matrices.shape[1], pairs, stride)
    memory = np.zeros(int(np.prod(shape)) + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    rooms = memory[start : start + memory.size - _LINE_BYTES].reshape(shape)
    return Digits(rooms, np.zeros(shape[:2], np.int64))


@inline_jit
def product(
    begin: int,
    end: int,
    matrix: Longs,
    x: int,
    rows: Ints,
    pairs: Ints,
    blob: Longs,
    out: int,
    following: int,
    number: int,
    rooms: Bytes,
    made: Longs,
) -> None:
    """Tiles ``begin`` .. ``end`` of the rows of an expert's matrix, for its pairs.

    Args:
        begin: first tile of ROW_TILE rows.
        end: behind the last.
        matrix: its fields.
        x: address of float32 [R, K].
        rows: row of x that each pair reads.
        pairs: first of the expert's pairs and end, [2].
        blob: its address, [1].
        out: address of float32 [P, N].
        following: address of rows that the thread wants next; 0: not known.
        number: of what is in x: digits that were made for another number are made again.
        rooms: of the thread's Digits.
        made: of the same.
    """
    if matrix[FIXED_DOTS] == 0:
        product_items(
            begin,
            end,
            x,
            rows,
            pairs,
            blob,
            matrix[OFFSET],
            1,
            out,
            matrix[ROWS],
            matrix[COLS],
            matrix[ROW_BYTES],
            matrix[DECODE],
            matrix[TABLE],
            matrix[BLOCK_WEIGHTS],
            matrix[DOTS],
        )
        return
    first = begin * ROW_TILE
    count = min(end * ROW_TILE, matrix[ROWS]) - first
    source = tile_address(begin, matrix, blob[0])
    pieces = matrix[COLS] // matrix[PIECE_WEIGHTS]
    for pair in range(pairs[0], pairs[1]):
        digits = _digits(matrix, x, rows[pair], number, rooms, made)
        to = out + (pair * matrix[ROWS] + first) * _FLOAT_BYTES
        shape = source, matrix[ROW_BYTES], count
        call_fixed_dots(matrix[FIXED_DOTS], *shape, digits, pieces, to, following)


@inline_jit
def tile_address(tile: int, matrix: Longs, blob: int) -> int:
    """Where a tile of rows of an expert's matrix begins."""
    address: int = blob + matrix[OFFSET] + tile * ROW_TILE * matrix[ROW_BYTES]
    return address


@inline_jit
def _digits(matrix: Longs, x: int, row: int, number: int, rooms: Bytes, made: Longs) -> int:
    """Address of a row's digits."""
    room = matrix[ROOM]
    at: int = address_of(rooms) + (room * rooms.shape[1] + row) * rooms.shape[2]
    if made[room, row] != number:
        source = x + row * matrix[COLS] * _FLOAT_BYTES
        call_digits(matrix[MAKE_DIGITS], source, matrix[COLS] // matrix[PIECE_WEIGHTS], at)
        made[room, row] = number
    return at
