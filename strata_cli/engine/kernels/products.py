"""How a GPU runs the matrix products: which compiled function, in how many blocks of what size.

Two functions give the same bits: ``few`` for a few activation rows, bound by memory, and ``many``
for prompts, bound by the tensor cores. What decides the order of an output's sums, its slices and
its lanes, depends on the matrix alone (``slice_cols``, ``lane_weights``); everything else here may
be changed for speed. The layouts of shared memory are stated in matmul_few.cu and matmul_many.cu.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Launch, Stream
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import BLOCK, QuantType, grid, row_bytes
from strata_cli.errors import DeviceError

WARP = 32
NO_LIMIT = 1 << 30
FEW_COLUMNS = 8  # activation rows that a block of the few-row function takes at a time
FEW_SHARED_BYTES = 96 << 10  # most that it asks for: two blocks fit a multiprocessor
FEW_WARPS = 16
BOOK_BYTES = 16 << 10  # a code book takes in shared memory for few rows, several times over
MULTIPROCESSORS = 132  # of the reference GPU; with fewer, blocks wait for each other
RESIDENT_WARPS = 28  # of a multiprocessor, by the few-row function's registers
MOST_WARPS = 32
COPY_LANES = 16
LONG_ROWS = 8192  # with fewer rows a block has too few groups for a single buffer
WARP_ROWS = 32
WARP_TOKENS = 64
TOKEN_PITCH = 320  # bytes of one token in a stage of 128 k
TWO_BLOCKS_SHARED_BYTES = 113 << 10
GROUPED_BLOCKS = 1056  # a multiple of the multiprocessors of large GPUs; blocks take many tiles
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


def shared_limit(stream: Stream) -> int:
    """Shared memory that a plan may count on; the host, which has none, ignores the plan."""
    return stream.shared_bytes or NO_LIMIT


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


class _Warp(NamedTuple):
    """Shared memory of one warp of the few-row function: a row's 16-byte chunks, and all bytes."""

    chunks: int
    nbytes: int


def _few_warp(matrix: Matrix, rows: int, columns: int) -> _Warp:
    slice_weights = slice_cols(matrix.qtype, matrix.cols)
    most = matrix.bytes_of(slice_weights) + 16 - math.gcd(matrix.align, matrix.bytes_of(256))
    chunks = blocks(most, 16) | 1  # odd: then eight rows begin in different banks
    planes = 2 if matrix.qtype is QuantType.F32 else 1
    return _Warp(chunks, rows * 16 * chunks + slice_weights // 32 * columns * 64 * planes)


def few_tile_rows(matrix: Matrix) -> int:
    """Weight rows of a warp: eight where sixteen would leave multiprocessors idle."""
    return 16 if matrix.rows >= 4096 else 8


@lru_cache(maxsize=4096)
def few_plan(
    matrix: Matrix, tokens: int, segments: int, shared_bytes: int, tile_rows: int, experts: int = 0
) -> Plan:
    """The few-row function for a matrix, or for one of each of several experts.

    Args:
        matrix: what is multiplied.
        tokens: most activation rows of one segment.
        segments: passes over the tokens, or pairs.
        shared_bytes: what a block may have.
        tile_rows: weight rows of a warp, 8 or 16.
        experts: 0: one matrix.

    Raises:
        DeviceError: not even one warp fits the shared memory.
    """
    columns = min(FEW_COLUMNS, tokens)
    num_slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    warp = _few_warp(matrix, tile_rows, columns)
    book_bytes = BOOK_BYTES if code_book(matrix.qtype) else 0
    tile_bytes = 4 * num_slices * tile_rows * columns
    limit = min(shared_bytes, FEW_SHARED_BYTES) - book_bytes
    warps_per_tile = min(num_slices, FEW_WARPS, max(0, limit - tile_bytes) // warp.nbytes)
    if warps_per_tile == 0:
        raise DeviceError(
            f"{matrix.qtype.name} product with {matrix.cols} columns needs "
            f"{book_bytes + warp.nbytes + tile_bytes} bytes of shared memory per block, "
            f"the GPU has {shared_bytes}"
        )
    tiles = max(1, min(4 // warps_per_tile, limit // (warps_per_tile * warp.nbytes + tile_bytes)))
    warps = tiles * warps_per_tile
    parameters = (matrix.qtype, matrix.lane, tile_rows, matrix.align)
    return Plan(
        unit=unit_of("matmul_few.cu", "grouped_few" if experts else "matmul_few", *parameters),
        grid=(segments, blocks(matrix.rows, tiles * tile_rows), 1),
        block=(WARP * warps, 1, 1),
        shared_bytes=book_bytes + warps * warp.nbytes + tiles * tile_bytes,
        extents=(
            *((experts,) if experts else ()),
            slice_cols(matrix.qtype, matrix.cols),
            warps_per_tile,
            warp.chunks,
            columns,
        ),
    )


class Ahead(NamedTuple):
    """How blocks of the few-row function go through several groups of tiles.

    Attributes:
        buffers: groups whose rows a block holds, 1 or 2.
        copy_lanes: lanes that copy a row together, 4, 8 or 16.
    """

    buffers: int
    copy_lanes: int


def _rounds(groups: int, segments: int, resident: int) -> int:
    """Groups per block: all blocks resident, and little for the busiest multiprocessor."""
    most = max(1, MULTIPROCESSORS * resident // segments)
    fewest = blocks(groups, most)
    return min(
        (fewest, fewest + 1),
        key=lambda n: n * blocks(segments * blocks(groups, n), MULTIPROCESSORS),
    )


def ahead_plan(
    matrix: Matrix,
    tokens: int,
    segments: int,
    shared_bytes: int,
    tile_rows: int,
    ahead: Ahead,
    experts: int = 0,
) -> Plan | None:
    """As ``few_plan``, with as many blocks as are resident at once; None where they do not fit."""
    columns = min(FEW_COLUMNS, tokens)
    num_slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    tiles = max(1, 4 // num_slices)
    warps = tiles * num_slices
    warp = _few_warp(matrix, tile_rows, columns)
    warp_bytes = warp.nbytes + (ahead.buffers - 1) * tile_rows * 16 * warp.chunks
    nbytes = BOOK_BYTES if code_book(matrix.qtype) else 0
    nbytes += warps * (warp_bytes + 2 * 4 * tile_rows * columns)
    if warps > MOST_WARPS or nbytes > shared_bytes:
        return None
    resident = max(1, min(RESIDENT_WARPS // warps, shared_bytes // (nbytes + 1024)))
    groups = blocks(matrix.rows, tiles * tile_rows)
    rounds = _rounds(groups, segments, resident)
    parameters = (matrix.qtype, matrix.lane, tile_rows, matrix.align)
    unit = unit_of("matmul_few.cu", "grouped_few" if experts else "matmul_few", *parameters)
    defines = (f"AHEAD={ahead.buffers}", f"COPY_LANES={ahead.copy_lanes}")
    return Plan(
        unit=unit._replace(defines=unit.defines + defines),
        grid=(segments, blocks(groups, rounds), 1),
        block=(WARP * warps, 1, 1),
        shared_bytes=nbytes,
        extents=(
            *((experts,) if experts else ()),
            slice_cols(matrix.qtype, matrix.cols),
            num_slices,
            warp.chunks,
            columns,
        ),
    )


@lru_cache(maxsize=4096)
def decode_plan(
    matrix: Matrix, tokens: int, segments: int, shared_bytes: int, experts: int = 0
) -> Plan:
    """The fastest measured way of the few-row function; arguments as ``few_plan``.

    Rows of a byte per weight or more are copied for long: few of them per warp. Where blocks make
    few groups each, two buffers; and always long requests.
    """
    is_wide = BLOCK[matrix.qtype].nbytes >= BLOCK[matrix.qtype].weights
    tile_rows = 8 if is_wide and tokens == 1 else few_tile_rows(matrix) if is_wide else 16
    ahead = Ahead(1 if experts or matrix.rows >= LONG_ROWS else 2, COPY_LANES)
    plan = ahead_plan(matrix, tokens, segments, shared_bytes, tile_rows, ahead, experts)
    if plan is not None:
        return plan
    plan = few_plan(matrix, tokens, segments, shared_bytes, few_tile_rows(matrix), experts)
    defines = (*plan.unit.defines, f"COPY_LANES={COPY_LANES}")
    return replace(plan, unit=plan.unit._replace(defines=defines))


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
    raw = raw_stages * tile.rows * 16 * (chunks | 1)
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


def dense_matrix(qtype: QuantType, rows: int, cols: int, address: int) -> Matrix:
    """A matrix at an address."""
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols), address))
