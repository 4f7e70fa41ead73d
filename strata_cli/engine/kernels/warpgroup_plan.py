"""How a GPU of compute capability 9.0 runs the many-row products by its warpgroups.

Nothing here decides bits. The layout of shared memory is stated in warpgroup_block.cuh.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.products import (
    Matrix,
    Plan,
    SlicedPlan,
    Unit,
    code_book,
    defines_of,
    slice_cols,
    sliced_plan,
    unit_of,
)
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import BLOCK, QuantType
from strata_cli.errors import DeviceError

CAPABILITY = (9, 0)  # wgmma belongs to exactly this one
TILE_ROWS = 128
MOST_MATRICES = 6  # of a launch that makes several
MOST_KINDS = 3
TILE_TOKENS = 128
SHORT_STAGE = 128  # k; long ones are twice that
TOKENS = (128, 96, 64, 32)  # that a function is compiled for; the first of equally good ones
DECODING_TOKENS = 64  # as long as it takes to multiply so many, a tile takes in any case
THREADS = 512
TOKEN_BYTES = 128  # of 64 k
SLOT_PADDING = 16
WIDE_BOOKS = (QuantType.IQ3_XXS, QuantType.IQ3_S)  # as f16, several times over
WIDE_BOOK_BYTES = 32 << 10
GATE_BYTES = 8
SCRATCH_BYTES = 4 * THREADS // 32


class Slots(NamedTuple):
    """Stages in shared memory, of 256 k or 128: of activations, and of raw rows."""

    x: int
    raw: int


# In order of preference: the first that fits.
LONG_STAGES = tuple(Slots(*n) for n in ((2, 4), (2, 3), (2, 2)))
SHORT_STAGES = tuple(Slots(*n) for n in ((4, 4), (4, 3), (3, 3), (2, 2)))


def _is_long(matrix: Matrix) -> bool:
    """Whether a stage is 256 k."""
    return max(4 * matrix.lane, BLOCK[matrix.qtype].weights) == 256


def _book_bytes(qtype: QuantType) -> int:
    return WIDE_BOOK_BYTES if qtype in WIDE_BOOKS else 4 * len(code_book(qtype))


def warpgroup_shared_bytes(matrix: Matrix, slots: Slots, experts: int = 0) -> int:
    """Activations, raw rows, gates, code book and which tiles are which expert's."""
    stage = 256 if _is_long(matrix) else 128
    x = slots.x * stage // 64 * TILE_TOKENS * TOKEN_BYTES
    raw_bytes = matrix.bytes_of(stage)
    chunks = blocks(raw_bytes + 16 - math.gcd(matrix.align, raw_bytes), 16) | 1
    raw = slots.raw * (TILE_ROWS * 16 * chunks + SLOT_PADDING)
    gates = 2 * GATE_BYTES * sum(slots)
    known = SCRATCH_BYTES + 6 * (experts + 1) if experts else 0
    return x + raw + gates + _book_bytes(matrix.qtype) + known


def _slots(matrix: Matrix, gpu: Gpu, experts: int) -> Slots | None:
    for slots in LONG_STAGES if _is_long(matrix) else SHORT_STAGES:
        if warpgroup_shared_bytes(matrix, slots, experts) <= gpu.shared_bytes:
            return slots
    return None


@lru_cache(maxsize=4096)
def has_warpgroup_plan(matrix: Matrix, gpu: Gpu, experts: int = 0) -> bool:
    """Whether the GPU has such products, and room for them."""
    return gpu.capability == CAPABILITY and _slots(matrix, gpu, experts) is not None


def _tile_tokens(matrix: Matrix, tokens: int, num_multiprocessors: int) -> int:
    """What the busiest multiprocessor is done with first; the most of several."""
    row_tiles, available = blocks(matrix.rows, TILE_ROWS), max(1, num_multiprocessors)

    def cost(size: int) -> int:
        turns = blocks(row_tiles * blocks(tokens, size), available)
        return turns * (size + DECODING_TOKENS)

    return min(TOKENS, key=cost)


def _plan(
    name: str, matrix: Matrix, tiles: int, gpu: Gpu, experts: int = 0, *parameters: int
) -> Plan:
    slots = _slots(matrix, gpu, experts)
    if slots is None:
        raise DeviceError(
            f"{matrix.qtype.name} product with {matrix.cols} columns does not fit a block's "
            f"{gpu.shared_bytes} bytes of shared memory"
        )
    numbers = (matrix.lane, matrix.align, *slots, *parameters)
    return Plan(
        unit=unit_of("matmul_warpgroup.cu", name, matrix.qtype, *numbers),
        grid=(min(tiles, max(1, gpu.num_multiprocessors)), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=warpgroup_shared_bytes(matrix, slots, experts),
        extents=(*((experts,) if experts else ()), slice_cols(matrix.qtype, matrix.cols)),
    )


@lru_cache(maxsize=4096)
def warpgroup_plan(matrix: Matrix, tokens: int, gpu: Gpu) -> Plan:
    """The many-row function for one matrix and so many tokens.

    Raises:
        DeviceError: it does not fit.
    """
    size = _tile_tokens(matrix, tokens, gpu.num_multiprocessors)
    tiles = blocks(matrix.rows, TILE_ROWS) * blocks(tokens, size)
    return _plan("matmul_warpgroup", matrix, tiles, gpu, 0, size)


@lru_cache(maxsize=1024)
def warpgroup_several_plan(matrices: tuple[Matrix, ...], tokens: int, gpu: Gpu) -> Plan | None:
    """A function that makes up to six matrices of as many columns, a multiprocessor for each tile.

    Returns:
        The plan, whose extents are rows and kind of six matrices, and the slices of three kinds;
        None where there are too few multiprocessors, or too many kinds.
    """
    kinds = tuple(dict.fromkeys(m._replace(rows=0) for m in matrices))
    books = {kind.qtype for kind in kinds if code_book(kind.qtype)}
    slots = [_slots(kind, gpu, 0) for kind in kinds]
    row_tiles = sum(blocks(m.rows, TILE_ROWS) for m in matrices)
    most = gpu.num_multiprocessors // row_tiles  # tiles of tokens
    size = min((each for each in TOKENS if blocks(tokens, each) <= most), default=0)
    is_too_much = len(matrices) > MOST_MATRICES or len(kinds) > MOST_KINDS or len(books) > 1
    if not size or is_too_much or len({m.cols for m in matrices}) > 1:
        return None
    sides, shared_bytes = [], 0
    for kind, own in zip(kinds, slots, strict=True):
        if own is None:
            return None
        numbers = ", ".join(map(str, (kind.lane, kind.align, *own)))
        sides.append(f"Side<{kind.qtype.name}, {numbers}>")
        shared_bytes = max(shared_bytes, warpgroup_shared_bytes(kind, own))
    defines = tuple(dict.fromkeys(d for kind in kinds for d in defines_of(kind.qtype)))
    shapes = [n for m in matrices for n in (m.rows, kinds.index(m._replace(rows=0)))]
    cuts = [slice_cols(kind.qtype, kind.cols) for kind in kinds]
    return Plan(
        unit=Unit("matmul_warpgroup.cu", f"warpgroup_several<{size}, {', '.join(sides)}>", defines),
        grid=(row_tiles * blocks(tokens, size), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=shared_bytes,
        extents=(
            *shapes,
            *(0 for _ in range(2 * (MOST_MATRICES - len(matrices)))),
            *cuts,
            *(0 for _ in range(MOST_KINDS - len(kinds))),
        ),
    )


@lru_cache(maxsize=4096)
def warpgroup_sliced_plan(matrix: Matrix, tokens: int, gpu: Gpu) -> SlicedPlan | None:
    """``sliced_plan`` by warpgroups, a slice of a tile to a block; None: not of this matrix."""
    is_full = BLOCK[matrix.qtype].weights > 1 and 4 * matrix.lane >= SHORT_STAGE
    stage = 2 * SHORT_STAGE if _is_long(matrix) else SHORT_STAGE
    if not is_full or matrix.cols % stage or not has_warpgroup_plan(matrix, gpu):
        return None
    slots = _slots(matrix, gpu, 0)
    assert slots is not None
    size = min((each for each in TOKENS if each >= tokens), default=TILE_TOKENS)
    slice_width = slice_cols(matrix.qtype, matrix.cols)
    tiles = blocks(matrix.rows, TILE_ROWS) * blocks(tokens, size)
    numbers = (matrix.lane, matrix.align, *slots, size)
    slices = Plan(
        unit=unit_of("matmul_warpgroup.cu", "warpgroup_slices", matrix.qtype, *numbers),
        grid=(tiles, blocks(matrix.cols, slice_width), 1),
        block=(THREADS, 1, 1),
        shared_bytes=warpgroup_shared_bytes(matrix, slots),
        extents=(slice_width,),
    )
    return sliced_plan(matrix, tokens, gpu.shared_bytes)._replace(slices=slices)


@lru_cache(maxsize=4096)
def grouped_warpgroup_plan(matrix: Matrix, pairs: int, experts: int, gpu: Gpu) -> Plan:
    """The many-row function over the pairs of all experts.

    Raises:
        DeviceError: it does not fit.
    """
    most_tiles = pairs // TILE_TOKENS + min(pairs, experts)
    tiles = most_tiles * blocks(matrix.rows, TILE_ROWS)
    return _plan("grouped_warpgroup", matrix, tiles, gpu, experts)
