"""Which of the functions that give the same bits makes a product first, between few and many rows.

A model of their times on the reference GPU, microseconds, from what they took there in passes of
16, 100 and 300 tokens. Nothing here decides bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from strata_cli.engine.kernels.few import FEW_COLUMNS
from strata_cli.engine.kernels.products import MULTIPROCESSORS, WARP_TOKENS, Matrix, slice_cols
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import QuantType

FEW_TOKENS = 32  # up to here, passes of the few-row function are at least as fast on a GPU
FEW_PAIRS_PER_EXPERT = 6  # the same for grouped products
MOST_SHARED_COLS = 5120  # of several products in one launch: the activations of more do not fit
FEW_TILE_ROWS = 8
MANY_TILE_ROWS = 128
START_US = 4.0
LOAD_US_PER_COL = 1e-3  # eight rows of activations to shared memory
DECODE_WEIGHTS_PER_US = 20e3  # of a multiprocessor; with eight rows, multiplying them is free
FLOAT_WEIGHTS_PER_US = 4.5e3  # of float32, which are split in two
MANY_US_PER_COL = 0.0145  # of a tile of many rows; float32 takes as long in two pieces
FLOAT_US_PER_COL = 0.03
CROWDED_TOKENS = 1100  # from so many on, tiles of few long rows hinder each other
MOST_CROWDED = 1.8
BLOCKS_AT_ONCE = 2 * MULTIPROCESSORS
SLICED_US_PER_COL = 0.02  # two blocks to a multiprocessor
SLICE_START_US = 3.0
MEMORY_BYTES_PER_US = 3e6
MARGIN = 0.8  # of a model


@lru_cache(maxsize=4096)
def few_is_faster(matrix: Matrix, tokens: int) -> bool:
    """Whether passes over eight rows at a time are done before tiles of many rows."""
    if tokens <= FEW_TOKENS:
        return True
    return _few_us(matrix, tokens) < MARGIN * _many_us(matrix, tokens)


def all_few(matrices: Sequence[Matrix], tokens: int) -> bool:
    """The same of several matrices, in one launch."""
    is_narrow = tokens <= FEW_TOKENS or matrices[0].cols <= MOST_SHARED_COLS
    return is_narrow and all(few_is_faster(matrix, tokens) for matrix in matrices)


@lru_cache(maxsize=4096)
def slices_are_faster(matrix: Matrix, tokens: int) -> bool:
    """Whether tiles of many rows are done sooner when every slice of one has a block of its own."""
    num_slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    tiles = blocks(matrix.rows, MANY_TILE_ROWS) * blocks(tokens, WARP_TOKENS)
    turns = blocks(tiles * num_slices, BLOCKS_AT_ONCE)
    sums_us = 8 * num_slices * tokens * matrix.rows / MEMORY_BYTES_PER_US
    slices_us = 2 * START_US + turns * (
        SLICE_START_US + SLICED_US_PER_COL * matrix.cols / num_slices
    )
    return num_slices > 1 and slices_us + sums_us < MARGIN * _many_us(matrix, tokens)


def _few_us(matrix: Matrix, tokens: int) -> float:
    passes = blocks(tokens, FEW_COLUMNS)
    per_pass = max(1, MULTIPROCESSORS // passes)
    tiles = blocks(blocks(matrix.rows, FEW_TILE_ROWS), per_pass)
    rate = FLOAT_WEIGHTS_PER_US if matrix.qtype is QuantType.F32 else DECODE_WEIGHTS_PER_US
    tile_us = min(FEW_TILE_ROWS, matrix.rows) * matrix.cols / rate
    turns = blocks(passes, MULTIPROCESSORS)
    return START_US + turns * (LOAD_US_PER_COL * matrix.cols + tiles * tile_us)


def _many_us(matrix: Matrix, tokens: int) -> float:
    tiles = blocks(matrix.rows, MANY_TILE_ROWS) * blocks(tokens, WARP_TOKENS)
    per_col = FLOAT_US_PER_COL if matrix.qtype is QuantType.F32 else MANY_US_PER_COL
    if matrix.cols > MOST_SHARED_COLS:
        crowd = min(max(tokens / CROWDED_TOKENS, 1.0), MOST_CROWDED)
        if tiles < MULTIPROCESSORS:
            return START_US + crowd * per_col * matrix.cols
    return START_US + max(1.0, tiles / MULTIPROCESSORS) * per_col * matrix.cols
