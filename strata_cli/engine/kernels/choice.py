"""Which of the functions that give the same bits makes a product first, between few and many rows.

A model of their times on the reference GPU, microseconds, fitted to what they took there
(benchmarks/results/short_passes.md). Nothing here decides bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS
from strata_cli.engine.kernels.products import MULTIPROCESSORS, WARP_TOKENS, Matrix, slice_cols
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import QuantType

FEW_TOKENS = 32  # up to here, passes of the few-row function are at least as fast on a GPU
SOME_TOKENS = 256  # up to here dense products by a function between these two
SLICED_FLOAT_TOKENS = 1024  # up to here float32 tiles slice by slice
GATED_TOKENS = 128  # up to here few rows that gate as they load save two launches and lose nothing
FEW_PAIRS_PER_EXPERT = 8  # the same for grouped products
SOME_PAIRS_PER_EXPERT = 8  # up to here, where there is room, a function between these two
MOST_SHARED_COLS = 5120  # of several products in one launch: the activations of more do not fit
FEW_TILE_ROWS = 8
MANY_TILE_ROWS = 128
BLOCKS_AT_ONCE = 2 * MULTIPROCESSORS  # of tiles of many rows
FEW_START_US = 10.0
MANY_START_US = 4.0
SLICES_START_US = 16.0  # of two launches
SLICE_START_US = 3.0
LOAD_US_PER_COL = 2.5e-3  # eight rows of activations to shared memory
DECODE_WEIGHTS_PER_US = 20e3  # of a multiprocessor; with eight rows, multiplying them is free
FLOAT_WEIGHTS_PER_US = 4.5e3  # of float32, which are split in two
MANY_US_PER_COL = 0.0145  # of a tile of many rows; float32 takes as long in two pieces
FLOAT_US_PER_COL = 0.03
SLICED_US_PER_COL = 0.028  # two blocks to a multiprocessor
MEMORY_BYTES_PER_US = 3e6
MARGIN = 0.9  # of a model


@lru_cache(maxsize=4096)
def few_is_faster(matrix: Matrix, tokens: int, *, can_slice: bool = False) -> bool:
    """Whether passes over eight rows at a time are done before tiles of many rows.

    Args:
        matrix: of a dense product.
        tokens: activation rows.
        can_slice: there is scratch for tiles that are made slice by slice.
    """
    if tokens <= FEW_TOKENS:
        return True
    few_us = _few_us(matrix, tokens)
    is_best = not can_slice or few_us <= _slices_us(matrix, tokens)
    return is_best and few_us < MARGIN * _many_us(matrix, tokens)


def all_few(matrices: Sequence[Matrix], tokens: int) -> bool:
    """The same of several matrices, in one launch."""
    is_narrow = tokens <= FEW_TOKENS or matrices[0].cols <= MOST_SHARED_COLS
    return is_narrow and all(few_is_faster(matrix, tokens) for matrix in matrices)


@lru_cache(maxsize=4096)
def slices_are_faster(matrix: Matrix, tokens: int) -> bool:
    """Whether tiles of many rows are done sooner when every slice of one has a block of its own."""
    return _slices_us(matrix, tokens) < MARGIN * _many_us(matrix, tokens)


def _few_us(matrix: Matrix, tokens: int) -> float:
    passes = blocks(tokens, FEW_COLUMNS)
    per_pass = max(1, MULTIPROCESSORS // passes)
    tiles = blocks(blocks(matrix.rows, FEW_TILE_ROWS), per_pass)
    rate = FLOAT_WEIGHTS_PER_US if matrix.qtype is QuantType.F32 else DECODE_WEIGHTS_PER_US
    tile_us = min(FEW_TILE_ROWS, matrix.rows) * matrix.cols / rate
    turns = blocks(passes, MULTIPROCESSORS)
    return FEW_START_US + turns * (LOAD_US_PER_COL * matrix.cols + tiles * tile_us)


def _many_us(matrix: Matrix, tokens: int) -> float:
    per_col = FLOAT_US_PER_COL if matrix.qtype is QuantType.F32 else MANY_US_PER_COL
    turns = max(1.0, _tiles(matrix, tokens) / MULTIPROCESSORS)
    return MANY_START_US + turns * per_col * matrix.cols


def _slices_us(matrix: Matrix, tokens: int) -> float:
    """Infinite where there is but one."""
    num_slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    if num_slices == 1:
        return math.inf
    turns = blocks(_tiles(matrix, tokens) * num_slices, BLOCKS_AT_ONCE)
    slice_us = SLICE_START_US + SLICED_US_PER_COL * matrix.cols / num_slices
    sums_bytes = 8 * num_slices * tokens * matrix.rows  # written, and read again
    return SLICES_START_US + turns * slice_us + sums_bytes / MEMORY_BYTES_PER_US


def _tiles(matrix: Matrix, tokens: int) -> int:
    return blocks(matrix.rows, MANY_TILE_ROWS) * blocks(tokens, WARP_TOKENS)
