"""How a GPU runs the many-row products: the shape of its tiles, and how many blocks make them.

Nothing here decides bits. The layouts of shared memory are stated in matmul_prompt.cu,
matmul_split.cu and matmul_thin.cu.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from strata_cli.engine.kernels.products import (
    MULTIPROCESSORS,
    WARP,
    Matrix,
    Plan,
    Unit,
    alignment,
    code_book,
    slice_cols,
    unit_of,
)
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import BLOCK, QuantType
from strata_cli.errors import DeviceError

WARP_ROWS = 32
WARP_TOKENS = 64
STAGE_BYTES = 256  # of one token, or one row of weights, in a stage of 128 k
SLOTS = 2  # stages in shared memory
RING_TILES = 6
TILE_BYTES = 24
SLOT_PADDING = 16
BLOCK_SHARED_BYTES = 1 << 10  # that a multiprocessor keeps for each block
WARPS_PER_MULTIPROCESSOR = 8  # by the function's registers
WIDE_BOOKS = (QuantType.IQ3_XXS, QuantType.IQ3_S)  # as f16, several times over
WIDE_BOOK_BYTES = 32 << 10
SPLIT_ROWS = 64  # weight rows, and activation rows, of a block of the float32 function
SPLIT_STAGES = 3
THIN_ROWS = 8  # most weight rows of the function of few of them
THIN_TOKENS = 16  # of a block; eight where these would be too few
THIN_WARPS = 8  # twenty of these
THIN_FEW_TOKENS = 8 * MULTIPROCESSORS
THIN_SHARED_BYTES = 48 << 10
SPLIT_ROW_BYTES = 256  # of a row in a stage
SPLIT_SHARED_BYTES = SPLIT_STAGES * 2 * SPLIT_ROWS * SPLIT_ROW_BYTES


class Gpu(NamedTuple):
    """What decides how many blocks run at once.

    Attributes:
        shared_bytes: most dynamic shared memory of a block.
        num_multiprocessors: how many there are.
        capability: compute capability.
    """

    shared_bytes: int
    num_multiprocessors: int
    capability: tuple[int, int] = (0, 0)


class Shape(NamedTuple):
    """The warps of a block: 32 weight rows each one way, 64 activation rows the other."""

    row_warps: int
    token_warps: int

    @property
    def rows(self) -> int:
        """Weight rows of a tile."""
        return WARP_ROWS * self.row_warps

    @property
    def tokens(self) -> int:
        """Activation rows of a tile."""
        return WARP_TOKENS * self.token_warps

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.row_warps * self.token_warps


# In order of preference. Wide tiles read least; small ones and 160 rows suit narrow matrices.
DENSE = tuple(Shape(*warps) for warps in ((4, 2), (4, 1), (5, 1), (2, 2), (2, 1), (1, 1)))


def is_long(matrix: Matrix) -> bool:
    """Whether a stage of raw rows is 256 k, two of activations."""
    return max(4 * matrix.lane, BLOCK[matrix.qtype].weights) == 256


def book_bytes(qtype: QuantType) -> int:
    """Of the type's code book in shared memory, as these functions keep it."""
    return WIDE_BOOK_BYTES if qtype in WIDE_BOOKS else 4 * len(code_book(qtype))


def prompt_shared_bytes(matrix: Matrix, shape: Shape) -> int:
    """Raw rows, activations, weights, known tiles and their tokens, code book."""
    raw_bytes = matrix.bytes_of(256 if is_long(matrix) else 128)
    chunks = blocks(raw_bytes + 16 - math.gcd(matrix.align, raw_bytes), 16) | 1
    slot = shape.rows * 16 * chunks + SLOT_PADDING + (shape.tokens + shape.rows) * STAGE_BYTES
    known = RING_TILES * (TILE_BYTES + 4 * shape.tokens) + 64  # read, not used, beyond the last
    return SLOTS * slot + known + book_bytes(matrix.qtype)


def _resident(matrix: Matrix, shape: Shape, gpu: Gpu) -> int:
    """Blocks that a multiprocessor holds at once; 0: not even one fits."""
    nbytes = prompt_shared_bytes(matrix, shape)
    if nbytes > gpu.shared_bytes:
        return 0
    all_bytes = gpu.shared_bytes + BLOCK_SHARED_BYTES
    return max(
        1, min(WARPS_PER_MULTIPROCESSOR // shape.warps, all_bytes // (nbytes + BLOCK_SHARED_BYTES))
    )


def _cost(shape: Shape, tiles: int, resident: int, num_multiprocessors: int) -> float:
    """Time of the busiest multiprocessor: its tiles, slower with few warps at work."""
    turns = blocks(tiles, max(1, num_multiprocessors))
    warps = shape.warps * min(turns, resident)
    return turns * shape.warps * (1 + WARPS_PER_MULTIPROCESSOR / 2 / warps)


class _Choice(NamedTuple):
    shape: Shape
    resident: int  # blocks of it on a multiprocessor


def _choose(matrix: Matrix, shapes: Iterable[Shape], tokens: int, gpu: Gpu) -> _Choice:
    """The shape that is done first; the first of several."""
    best, best_cost = None, math.inf
    for shape in shapes:
        resident = _resident(matrix, shape, gpu)
        if resident == 0:
            continue
        tiles = blocks(matrix.rows, shape.rows) * blocks(tokens, shape.tokens)
        cost = _cost(shape, tiles, resident, gpu.num_multiprocessors)
        if cost < best_cost:
            best, best_cost = _Choice(shape, resident), cost
    if best is None:
        raise DeviceError(
            f"{matrix.qtype.name} product with {matrix.cols} columns does not fit a block's "
            f"{gpu.shared_bytes} bytes of shared memory"
        )
    return best


@lru_cache(maxsize=4096)
def has_prompt_plan(matrix: Matrix, gpu: Gpu) -> bool:
    """Whether any shape fits; on GPUs with little shared memory some types' rows do not."""
    return any(_resident(matrix, shape, gpu) for shape in DENSE)


@lru_cache(maxsize=4096)
def prompt_plan(
    matrix: Matrix, tokens: int, gpu: Gpu, candidates: tuple[Shape, ...] = DENSE
) -> Plan:
    """The many-row function for one matrix and so many tokens.

    Raises:
        DeviceError: no candidate fits.
    """
    shape, resident = _choose(matrix, candidates, tokens, gpu)
    tiles = blocks(matrix.rows, shape.rows) * blocks(tokens, shape.tokens)
    return Plan(
        unit=unit_of(
            "matmul_prompt.cu", "matmul_prompt", matrix.qtype, matrix.lane, matrix.align, *shape
        ),
        grid=(min(tiles, resident * max(1, gpu.num_multiprocessors)), 1, 1),
        block=(WARP * shape.warps, 1, 1),
        shared_bytes=prompt_shared_bytes(matrix, shape),
        extents=(slice_cols(matrix.qtype, matrix.cols),),
    )


def has_split_plan(matrix: Matrix, x_address: int, gpu: Gpu) -> bool:
    """Whether the float32 function takes it: pieces of 16 bytes, and enough rows to share x."""
    return (
        matrix.qtype is QuantType.F32
        and matrix.cols % 4 == 0
        and matrix.align == alignment(x_address) == 16
        and matrix.rows >= SPLIT_ROWS // 2
        and gpu.shared_bytes >= SPLIT_SHARED_BYTES
    )


@lru_cache(maxsize=4096)
def split_plan(matrix: Matrix, tokens: int) -> Plan:
    """The function of float32 weights with many activation rows."""
    return Plan(
        unit=Unit("matmul_split.cu", f"matmul_split<{matrix.lane}, 2, 2>", ()),
        grid=(blocks(tokens, SPLIT_ROWS), blocks(matrix.rows, SPLIT_ROWS), 1),
        block=(4 * WARP, 1, 1),
        shared_bytes=SPLIT_SHARED_BYTES,
        extents=(slice_cols(matrix.qtype, matrix.cols),),
    )


def has_thin_plan(matrix: Matrix, x_address: int) -> bool:
    """Whether the function of few float32 rows takes it: pieces of 16 bytes."""
    return (
        matrix.qtype is QuantType.F32
        and matrix.cols % 4 == 0
        and matrix.align == alignment(x_address) == 16
        and matrix.rows <= THIN_ROWS
        and _thin_shared_bytes(matrix) <= THIN_SHARED_BYTES
    )


def _thin_shared_bytes(matrix: Matrix) -> int:
    slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    return slices * matrix.rows * THIN_TOKENS * 4


@lru_cache(maxsize=4096)
def thin_plan(matrix: Matrix, tokens: int) -> Plan:
    """The function of few float32 rows with many activation rows."""
    warps, groups = (20, 1) if tokens <= THIN_FEW_TOKENS else (THIN_WARPS, THIN_TOKENS // 8)
    return Plan(
        unit=Unit("matmul_thin.cu", f"matmul_thin<{matrix.lane}, {warps}, {groups}>", ()),
        grid=(blocks(tokens, 8 * groups), 1, 1),
        block=(warps * WARP, 1, 1),
        shared_bytes=_thin_shared_bytes(matrix) * groups // (THIN_TOKENS // 8),
        extents=(slice_cols(matrix.qtype, matrix.cols),),
    )
