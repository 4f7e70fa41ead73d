"""How a GPU runs the matrix products: which compiled function, in how many blocks of what size.

Functions give the same bits: ``few`` for a few activation rows, bound by memory, and ``many`` for
prompts, bound by the tensor cores; those of warpgroup_plan.py too, on GPUs with wgmma. What decides
the order of an output's sums, its slices and its lanes, depends on the matrix alone
(``slice_cols``, ``lane_weights``); everything else here may be changed for speed. The layouts of
shared memory are stated in few_block.cuh and matmul_many.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Launch
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import BLOCK, QuantType, grid, row_bytes
from strata_cli.errors import DeviceError

WARP = 32
MULTIPROCESSORS = 132  # of the reference GPU, whose times choices between functions follow
WARP_ROWS = 32
WARP_TOKENS = 64
TOKEN_PITCH = 320  # bytes of one token in a stage of 128 k
STAGE_PADDING = 16  # behind the raw rows of a stage
TWO_BLOCKS_SHARED_BYTES = 113 << 10
GROUPED_BLOCKS = 1056  # a multiple of the multiprocessors of large GPUs; blocks take many tiles
JOIN_THREADS = 256
WIDE_TILES = 256  # with fewer tiles of 128 tokens than this, tiles of 64 fill a GPU better


class Matrix(NamedTuple):
    """What a product is compiled for and cut by.

    Attributes:
        qtype: how a row's bytes encode its weights.
        rows: output features N.
        cols: input features K.
        align: a power of two up to 16 that divides the address of every row.
    """

    qtype: QuantType
    rows: int
    cols: int
    align: int

    @property
    def lane(self) -> int:
        """Weights of a span that one lane owns."""
        return lane_weights(self.qtype, self.cols)

    def bytes_of(self, cols: int) -> int:
        """Bytes that so many weights of a row take."""
        block = BLOCK[self.qtype]
        return cols // block.weights * block.nbytes


class Unit(NamedTuple):
    """A CUDA function: its source, the template instance, and macros."""

    source: str
    function: str
    defines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """One launch of a CUDA function."""

    unit: Unit
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    extents: tuple[int, ...]

    def launch(self, items: int, grain: int, *, early: bool = False) -> Launch:
        """With the host's share of the launch; early as in ``Launch``."""
        return Launch(
            items=items,
            grain=grain,
            grid=self.grid,
            block=self.block,
            shared_bytes=self.shared_bytes,
            extents=self.extents,
            early=early,
        )


def alignment(*offsets: int) -> int:
    """The largest power of two up to 16 that divides every offset."""
    return math.gcd(16, *offsets)


@cache
def lane_weights(qtype: QuantType, cols: int) -> int:
    """Consecutive weights of a row that one lane of four owns, in every span of four times that.

    The most that suits the type and cuts the row, filled up to a multiple of 32, into whole spans.
    """
    filled = blocks(cols, 32) * 32
    most = 32 if BLOCK[qtype].weights == 1 or code_book(qtype) else 64
    return next(lane for lane in (most, 32, 16, 8) if filled % (4 * lane) == 0)


@cache
def slice_cols(qtype: QuantType, cols: int) -> int:
    """Weights of a row that are summed in one go; slices are then added in order.

    About 512, so that a decode step has enough slices to fill a GPU; a multiple of 256.
    """
    target = 256 if qtype is QuantType.F32 else 512
    num_slices = max(1, cols // target)
    return blocks(blocks(cols, num_slices), 256) * 256


@cache
def code_book(qtype: QuantType) -> tuple[int, ...]:
    """Each entry's weights as hex digits, the index of the magnitude, first weight lowest."""
    if qtype.name[:3] not in ("IQ1", "IQ2", "IQ3"):
        return ()
    entries = grid(qtype)
    digits = np.searchsorted(np.unique(entries), entries).astype(np.uint32)
    shifts = 4 * np.arange(entries.shape[1], dtype=np.uint32)
    return tuple(int(word) for word in np.bitwise_or.reduce(digits << shifts, axis=1))


@cache
def defines_of(qtype: QuantType) -> tuple[str, ...]:
    """Macros that a source using the type's codec is compiled with."""
    book = code_book(qtype)
    return (f"BOOK_ENTRIES={','.join(map(hex, book))}",) if book else ()


@cache
def unit_of(source: str, name: str, qtype: QuantType, *parameters: int) -> Unit:
    """The instance of a source's template with the type and numbers that it takes."""
    instance = f"{name}<{', '.join((qtype.name, *map(str, parameters)))}>"
    return Unit(source, instance, defines_of(qtype))


class Tile(NamedTuple):
    """Shape of a block of the many-row function: its warps, and stages of activations ahead."""

    row_warps: int
    token_warps: int
    stages: int

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return WARP_ROWS * self.row_warps

    @property
    def tokens(self) -> int:
        """Activation rows of a block."""
        return WARP_TOKENS * self.token_warps


WIDE = (Tile(4, 2, 3), Tile(4, 2, 2))
NARROW = (Tile(4, 1, 3), Tile(4, 1, 2), Tile(2, 1, 2), Tile(1, 1, 2))


def many_shared_bytes(matrix: Matrix, tile: Tile) -> int:
    """Raw rows, activations, the tile's row numbers and the code book."""
    is_long = max(4 * matrix.lane, BLOCK[matrix.qtype].weights) == 256
    raw_cols, raw_stages = (256, 2) if is_long else (128, tile.stages)
    raw_bytes = matrix.bytes_of(raw_cols)
    chunks = blocks(raw_bytes + 16 - math.gcd(matrix.align, raw_bytes), 16)
    raw = raw_stages * (tile.rows * 16 * (chunks | 1) + STAGE_PADDING)
    activations = tile.stages * tile.tokens * TOKEN_PITCH
    return raw + activations + 4 * tile.tokens + 4 * len(code_book(matrix.qtype))


def _choose_tile(
    matrix: Matrix, candidates: tuple[Tile, ...], extra_bytes: int, limits: tuple[int, ...]
) -> Tile:
    """The first candidate that fits the first limit that any fits."""
    for limit in limits:
        for tile in candidates:
            if many_shared_bytes(matrix, tile) + extra_bytes <= limit:
                return tile
    raise DeviceError(
        f"{matrix.qtype.name} product with {matrix.cols} columns does not fit a block's "
        f"{limits[-1]} bytes of shared memory"
    )


def _many(name: str, matrix: Matrix, tile: Tile, num_blocks: int, experts: int = 0) -> Plan:
    prefix_bytes = 4 * (experts + 1) if experts else 0
    return Plan(
        unit=unit_of("matmul_many.cu", name, matrix.qtype, matrix.lane, matrix.align, *tile),
        grid=(num_blocks, 1, 1),
        block=(WARP * tile.row_warps * tile.token_warps, 1, 1),
        shared_bytes=many_shared_bytes(matrix, tile) + prefix_bytes,
        extents=(*((experts,) if experts else ()), slice_cols(matrix.qtype, matrix.cols)),
    )


@lru_cache(maxsize=4096)
def many_plan(
    matrix: Matrix, tokens: int, shared_bytes: int, candidates: tuple[Tile, ...] = ()
) -> Plan:
    """The many-row function for one matrix; candidates replace the usual tiles."""
    is_wide = blocks(matrix.rows, WIDE[0].rows) * blocks(tokens, WIDE[0].tokens) >= WIDE_TILES
    usual = (*WIDE, *NARROW) if is_wide else NARROW
    tile = _choose_tile(matrix, candidates or usual, 0, (shared_bytes,))
    num_blocks = blocks(matrix.rows, tile.rows) * blocks(tokens, tile.tokens)
    return _many("matmul_many", matrix, tile, num_blocks)


class SlicedPlan(NamedTuple):
    """Two launches: one that makes every slice of the sums by itself, one that adds them up."""

    slices: Plan
    join: Plan
    num_floats: int  # of scratch between them


@lru_cache(maxsize=4096)
def sliced_plan(matrix: Matrix, tokens: int, shared_bytes: int) -> SlicedPlan:
    """The many-row function for one matrix, a slice of a tile to a block."""
    tile = _choose_tile(matrix, NARROW, 0, (shared_bytes,))
    num_tiles = blocks(matrix.rows, tile.rows) * blocks(tokens, tile.tokens)
    whole = _many("matmul_many_slices", matrix, tile, num_tiles)
    num_slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    values = tokens * matrix.rows
    join = Plan(
        unit=Unit("matmul_many.cu", f"join_slices<{matrix.qtype.name}>", whole.unit.defines),
        grid=(blocks(values, JOIN_THREADS), 1, 1),
        block=(JOIN_THREADS, 1, 1),
        shared_bytes=0,
        extents=(num_slices, values),
    )
    slices = replace(whole, grid=(num_tiles, num_slices, 1))
    return SlicedPlan(slices, join, num_slices * values)


@lru_cache(maxsize=4096)
def grouped_many_plan(
    matrix: Matrix, pairs: int, experts: int, shared_bytes: int, candidates: tuple[Tile, ...] = ()
) -> Plan:
    """The many-row function over the pairs of all experts; candidates replace the usual tiles."""
    prefix_bytes = 4 * (experts + 1)
    limits = (min(shared_bytes, TWO_BLOCKS_SHARED_BYTES), shared_bytes)
    tile = _choose_tile(matrix, candidates or NARROW, prefix_bytes, limits)
    most_tiles = pairs // tile.tokens + min(pairs, experts)
    num_blocks = min(GROUPED_BLOCKS, most_tiles * blocks(matrix.rows, tile.rows))
    return _many("grouped_many", matrix, tile, num_blocks, experts)


def matrix_of(weight: Weight) -> Matrix:
    """A weight as plans see it."""
    return dense_matrix(weight.qtype, weight.rows, weight.cols, weight.data.address)


def dense_matrix(qtype: QuantType, rows: int, cols: int, address: int) -> Matrix:
    """A matrix at an address."""
    return _dense_matrix(qtype, rows, cols, address & 15)


@lru_cache(maxsize=4096)
def _dense_matrix(qtype: QuantType, rows: int, cols: int, phase: int) -> Matrix:
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols), phase))
