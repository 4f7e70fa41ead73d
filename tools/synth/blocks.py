"""Random stored weights of every tensor type, as fast as random bytes can be drawn.

A block of a quantized type is codes plus scales. Any codes are valid; only the scales decide how
large the weights are. So a block is random bytes with the same scale bytes written over each one.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize, row_bytes

PLAIN = frozenset({QuantType.F32, QuantType.F16, QuantType.BF16})

_SAMPLE_BLOCKS = 2048
_SAMPLE_SEED = 20_260_101

# Byte of a block at which its float16 scale lies.
SCALE_AT = {
    QuantType.Q4_0: 0,
    QuantType.Q4_1: 0,
    QuantType.Q5_0: 0,
    QuantType.Q5_1: 0,
    QuantType.Q8_0: 0,
    QuantType.Q2_K: 80,
    QuantType.Q3_K: 108,
    QuantType.Q4_K: 0,
    QuantType.Q5_K: 0,
    QuantType.Q6_K: 208,
    QuantType.IQ1_S: 0,
    QuantType.IQ2_XXS: 0,
    QuantType.IQ2_XS: 0,
    QuantType.IQ2_S: 0,
    QuantType.IQ3_XXS: 0,
    QuantType.IQ3_S: 0,
    QuantType.IQ4_NL: 0,
    QuantType.IQ4_XS: 0,
    QuantType.TQ1_0: 52,
    QuantType.TQ2_0: 64,
    QuantType.Q1_0: 0,
    QuantType.Q2_0: 0,
}

# Types with a minimum: the byte of its float16, and minimum / scale that centres uniform codes.
MINIMUM_AT = {
    QuantType.Q4_1: (2, -7.5),
    QuantType.Q5_1: (2, -15.5),
    QuantType.Q2_K: (82, 1.5),
    QuantType.Q4_K: (2, 7.5),
    QuantType.Q5_K: (2, 15.5),
}

# Integer scales of the sub-blocks, all equal (and equal to the sub-block's minimum where there is
# one, so that MINIMUM_AT centres each sub-block): where they start, and their bytes.
_SUB_SCALES = {
    QuantType.Q2_K: (0, b"\x88" * 16),  # 4 bits each: 8 and 8
    QuantType.Q3_K: (96, b"\x00" * 8 + b"\xff" * 4),  # 6 bits each: 48, stored + 32
    QuantType.Q4_K: (4, b"\xa8" * 8 + b"\x88" * 4),  # 6 bits each: 40 and 40
    QuantType.Q5_K: (4, b"\xa8" * 8 + b"\x88" * 4),
    QuantType.Q6_K: (192, b"\x10" * 16),  # int8: 16
}


class Field(NamedTuple):
    """Bytes that are the same in every block, and where in the block they start."""

    at: int
    value: bytes


def scale_fields(qtype: QuantType, std: float) -> tuple[Field, ...]:
    """The scale bytes with which random codes become weights of this standard deviation.

    MXFP4's and NVFP4's scales are coarse: they meet it within a factor of 1.42 and 1.07. With
    ``std`` 0 all weights are 0 (but for MXFP4, whose smallest scale is 2**-127).

    Args:
        qtype: a quantized type.
        std: wanted standard deviation of the weights, at least 0.

    Source: ggml's block definitions.
    """
    return _fields(qtype, std / _std_of_unit_scale(qtype))


def random_blocks(
    bits: np.random.BitGenerator, qtype: QuantType, count: int, fields: tuple[Field, ...]
) -> NDArray[np.uint8]:
    """Blocks with random codes and the given scale bytes, [count, bytes of a block].

    Releases the GIL nearly all the time.
    """
    nbytes = count * BLOCK[qtype].nbytes
    words: NDArray[np.uint64] = bits.random_raw(-(-nbytes // 8))
    stored: NDArray[np.uint8] = words.astype("<u8", copy=False).view(np.uint8)[:nbytes]
    blocks: NDArray[np.uint8] = stored.reshape(count, BLOCK[qtype].nbytes)
    set_fields(blocks, fields)
    return blocks


def set_fields(blocks: NDArray[np.uint8], fields: tuple[Field, ...]) -> None:
    """Write the fields into every block of an array [..., bytes of a block]."""
    for at, value in fields:
        blocks[..., at : at + len(value)] = np.frombuffer(value, dtype=np.uint8)


def store_plain(qtype: QuantType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Values as F32, F16 or BF16 (rounded to nearest even), [rows, row_bytes(qtype, cols)]."""
    values = np.ascontiguousarray(values, dtype="<f4")
    if qtype is QuantType.F32:
        return values.view(np.uint8)
    if qtype is QuantType.F16:
        return values.astype("<f2").view(np.uint8)
    bits = values.view("<u4")
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    halves: NDArray[np.uint16] = rounded.astype("<u2")
    return halves.view(np.uint8)


@cache
def _std_of_unit_scale(qtype: QuantType) -> float:
    """Standard deviation of weights whose codes are random and whose scale is 1."""
    block = BLOCK[qtype]
    bits = np.random.SFC64(_SAMPLE_SEED)
    blocks = random_blocks(bits, qtype, _SAMPLE_BLOCKS, _fields(qtype, 1.0))
    cols = _SAMPLE_BLOCKS * block.weights
    return float(np.std(dequantize(qtype, blocks.reshape(1, row_bytes(qtype, cols)), cols)))


def _fields(qtype: QuantType, scale: float) -> tuple[Field, ...]:
    if qtype is QuantType.MXFP4:
        return (Field(0, bytes([_mxfp4_scale(scale)])),)
    if qtype is QuantType.NVFP4:
        return (Field(0, bytes([_nvfp4_scale(scale)] * 4)),)
    if qtype is QuantType.IQ1_M:
        return _iq1_m_fields(scale)
    fields = [Field(SCALE_AT[qtype], _half(scale))]
    if qtype in MINIMUM_AT:
        at, factor = MINIMUM_AT[qtype]
        fields.append(Field(at, _half(scale * factor)))
    if qtype in _SUB_SCALES:
        fields.append(Field(*_SUB_SCALES[qtype]))
    return tuple(fields)


def _half(value: float) -> bytes:
    stored = np.array(value, dtype="<f2")
    assert np.isfinite(stored), f"{value} is beyond float16"
    return stored.tobytes()


def _mxfp4_scale(scale: float) -> int:
    """A power of two, stored as its exponent + 127."""
    return min(max(round(127 + math.log2(scale)), 0), 254) if scale > 0 else 0


def _nvfp4_scale(scale: float) -> int:
    """An unsigned float with 4 exponent bits (bias 7) and 3 mantissa bits; 0x7E is the largest."""
    if scale < 2.0**-10:
        return 0
    exponent = max(math.floor(math.log2(scale)), -6)
    steps = round(scale / 2.0**exponent * 8)  # 8 to 16; below 8 it is subnormal
    return min(max(8 * (exponent + 6) + steps, 0), 0x7E)


def _iq1_m_fields(scale: float) -> tuple[Field, ...]:
    """Its float16 scale is spread over the top nibbles of the last four 16-bit words.

    The low nibble of those bytes belongs to sub-block scales, here fixed like the rest.
    """
    bits = int.from_bytes(_half(scale), "little")
    nibbles = ((bits >> (4 * word)) & 15 for word in range(4))
    return tuple(
        Field(49 + 2 * word, bytes([nibble << 4 | 4])) for word, nibble in enumerate(nibbles)
    )
