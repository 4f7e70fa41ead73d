"""Tensor types of a GGUF file: their ids, their block sizes, and a plain dequantizer.

The dequantizer is the reference that fast kernels are measured against, so it favours being
obviously right over being fast. Where the ``gguf`` package has a type, its dequantizer is used;
Q1_0 and Q2_0, which it lacks, are written here from the format's definition.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.errors import ShapeError


class QuantType(IntEnum):
    """How the weights of a tensor are stored; the numbers are ggml's type ids."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


class BlockLayout(NamedTuple):
    """The unit in which a type is stored: so many weights in so many bytes."""

    weights: int
    nbytes: int


BLOCK: dict[QuantType, BlockLayout] = {
    QuantType.F32: BlockLayout(1, 4),
    QuantType.F16: BlockLayout(1, 2),
    QuantType.BF16: BlockLayout(1, 2),
    QuantType.Q4_0: BlockLayout(32, 18),
    QuantType.Q4_1: BlockLayout(32, 20),
    QuantType.Q5_0: BlockLayout(32, 22),
    QuantType.Q5_1: BlockLayout(32, 24),
    QuantType.Q8_0: BlockLayout(32, 34),
    QuantType.Q2_K: BlockLayout(256, 84),
    QuantType.Q3_K: BlockLayout(256, 110),
    QuantType.Q4_K: BlockLayout(256, 144),
    QuantType.Q5_K: BlockLayout(256, 176),
    QuantType.Q6_K: BlockLayout(256, 210),
    QuantType.IQ1_S: BlockLayout(256, 50),
    QuantType.IQ1_M: BlockLayout(256, 56),
    QuantType.IQ2_XXS: BlockLayout(256, 66),
    QuantType.IQ2_XS: BlockLayout(256, 74),
    QuantType.IQ2_S: BlockLayout(256, 82),
    QuantType.IQ3_XXS: BlockLayout(256, 98),
    QuantType.IQ3_S: BlockLayout(256, 110),
    QuantType.IQ4_NL: BlockLayout(32, 18),
    QuantType.IQ4_XS: BlockLayout(256, 136),
    QuantType.TQ1_0: BlockLayout(256, 54),
    QuantType.TQ2_0: BlockLayout(256, 66),
    QuantType.MXFP4: BlockLayout(32, 17),
    QuantType.NVFP4: BlockLayout(64, 36),
    QuantType.Q1_0: BlockLayout(128, 18),
    QuantType.Q2_0: BlockLayout(64, 18),
}


def row_bytes(qtype: QuantType, cols: int) -> int:
    """Bytes that one row of ``cols`` weights takes.

    Raises:
        ShapeError: cols is not a positive multiple of the type's block.
    """
    block = BLOCK[qtype]
    if cols <= 0 or cols % block.weights:
        raise ShapeError(
            f"a row of {cols} weights cannot be {qtype.name}: its blocks hold {block.weights}"
        )
    return cols // block.weights * block.nbytes


def dequantize(qtype: QuantType, data: NDArray[np.uint8], cols: int) -> NDArray[np.float32]:
    """The float32 values of stored rows.

    Args:
        qtype: how the rows are stored.
        data: the stored bytes, [rows, row_bytes(qtype, cols)].
        cols: weights per row.

    Returns:
        A new array, [rows, cols].

    Raises:
        ShapeError: cols does not fit the block, or data does not fit cols.

    Source: ggml's block definitions, through the ``gguf`` package where it has the type.
    """
    nbytes = row_bytes(qtype, cols)
    if data.ndim != 2 or data.shape[1] != nbytes or data.dtype != np.uint8:
        raise ShapeError(
            f"{qtype.name} rows of {cols} weights are uint8 [rows, {nbytes}], "
            f"got {data.dtype} {list(data.shape)}"
        )
    rows = np.ascontiguousarray(data)
    # Arbitrary bytes may hold infinities; the values are what the format says, not a mistake.
    with np.errstate(all="ignore"):
        if qtype is QuantType.F32:
            return rows.view("<f4").astype(np.float32)
        if qtype is QuantType.F16:
            return rows.view("<f2").astype(np.float32)
        if qtype is QuantType.Q1_0:
            return _dequantize_q1_0(rows, cols)
        if qtype is QuantType.Q2_0:
            return _dequantize_q2_0(rows, cols)
        return _dequantize_with_gguf(qtype, rows, cols)


@cache
def grid(qtype: QuantType) -> NDArray[np.int8]:
    """The code book of a type whose codes are indices: read-only int8 [entries, weights per entry].

    IQ2_XXS, IQ2_XS, IQ2_S: magnitudes, [256 | 512 | 1024, 8]. IQ3_XXS, IQ3_S: magnitudes,
    [256 | 512, 4]. IQ1_S, IQ1_M: -1, 0 or 1, [2048, 8]. IQ4_NL, IQ4_XS: values, [16, 1].
    MXFP4, NVFP4: the e2m1 values doubled, [16, 1]; the format halves their scales in return.

    Raises:
        ShapeError: the type has no code book.
    """
    from gguf import quants

    owner = {QuantType.IQ4_XS: "IQ4_NL"}.get(qtype, qtype.name)
    codec: Any = getattr(quants, owner, None)
    table: NDArray[np.int8]
    if hasattr(codec, "kvalues"):
        table = np.array(codec.kvalues, dtype=np.int8).reshape(-1, 1)
    elif getattr(codec, "grid_hex", None) is not None:
        codec.init_grid()
        table = codec.grid.astype(np.int8).reshape(codec.grid_shape)
    else:
        raise ShapeError(f"{qtype.name} has no code book")
    table.flags.writeable = False
    return table


def _dequantize_with_gguf(
    qtype: QuantType, rows: NDArray[np.uint8], cols: int
) -> NDArray[np.float32]:
    # Imported here: the package takes 0.12 s, and a run that uses only kernels never needs it.
    from gguf import GGMLQuantizationType, quants

    values: NDArray[np.float32] = quants.dequantize(rows, GGMLQuantizationType(int(qtype)))
    return np.ascontiguousarray(values, dtype=np.float32).reshape(rows.shape[0], cols)


def _dequantize_q1_0(rows: NDArray[np.uint8], cols: int) -> NDArray[np.float32]:
    """Block: f16 d, then 16 bytes; weight j is bit j % 8 of byte j // 8, set +d, clear -d."""
    blocks = rows.reshape(-1, 18)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, d, -d).reshape(rows.shape[0], cols)


def _dequantize_q2_0(rows: NDArray[np.uint8], cols: int) -> NDArray[np.float32]:
    """Block: f16 d, then 16 bytes; weight j is the two bits from 2(j % 4) up of byte j // 4.

    Codes 0, 1, 2, 3 mean -d, 0, d, 2d.
    """
    blocks = rows.reshape(-1, 18)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)
    codes = (blocks[:, 2:, None] >> shifts) & np.uint8(3)
    signed = codes.reshape(-1, 64).astype(np.float32) - np.float32(1)
    return (signed * d).reshape(rows.shape[0], cols)
