"""How a GPU runs products of float32 weights with many activation rows.

Nothing here decides bits. The layouts of shared memory are stated in matmul_split.cu and
matmul_thin.cu.
"""

from __future__ import annotations

from functools import lru_cache

from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.products import (
    MULTIPROCESSORS,
    WARP,
    Matrix,
    Plan,
    Unit,
    alignment,
    slice_cols,
)
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.model.quants import QuantType

SPLIT_ROWS = 64  # weight rows, and activation rows, of a block of the float32 function
SPLIT_STAGES = 3
SPLIT_WARPS = 4
THIN_ROWS = 8  # most weight rows of the function of few of them
THIN_TOKENS = 16  # of a block; eight where these would be too few
THIN_WARPS = 8  # twenty of these
THIN_FEW_TOKENS = 16 * MULTIPROCESSORS
THIN_SHARED_BYTES = 48 << 10
SPLIT_ROW_BYTES = 256  # of a row in a stage
SPLIT_SHARED_BYTES = SPLIT_STAGES * 2 * SPLIT_ROWS * SPLIT_ROW_BYTES


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
        block=(SPLIT_WARPS * WARP, 1, 1),
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
