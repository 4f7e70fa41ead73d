"""Random rows of every tensor type whose weights are small and finite."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes

Bytes = NDArray[np.uint8]

# Offsets of the f16 fields of a block, with the size of what is put there.
_HALVES = {
    QuantType.Q4_0: ((0, 0.01),),
    QuantType.Q4_1: ((0, 0.01), (2, -0.08)),
    QuantType.Q5_0: ((0, 0.005),),
    QuantType.Q5_1: ((0, 0.005), (2, -0.08)),
    QuantType.Q8_0: ((0, 0.001),),
    QuantType.Q2_K: ((80, 0.003), (82, 0.003)),
    QuantType.Q3_K: ((108, 0.001),),
    QuantType.Q4_K: ((0, 0.0003), (2, 0.002)),
    QuantType.Q5_K: ((0, 0.0002), (2, 0.002)),
    QuantType.Q6_K: ((208, 0.00004),),
    QuantType.IQ1_S: ((0, 0.01),),
    QuantType.IQ2_XXS: ((0, 0.001),),
    QuantType.IQ2_XS: ((0, 0.001),),
    QuantType.IQ2_S: ((0, 0.001),),
    QuantType.IQ3_XXS: ((0, 0.0003),),
    QuantType.IQ3_S: ((0, 0.0005),),
    QuantType.IQ4_NL: ((0, 0.001),),
    QuantType.IQ4_XS: ((0, 0.00004),),
    QuantType.TQ1_0: ((52, 0.1),),
    QuantType.TQ2_0: ((64, 0.1),),
    QuantType.Q1_0: ((0, 0.1),),
    QuantType.Q2_0: ((0, 0.1),),
}


def packed_rows(qtype: QuantType, rows: int, cols: int, seed: int) -> Bytes:
    """Rows [rows, row_bytes]: random codes, random scales of a size that the type may have."""
    rng = np.random.default_rng(seed)
    if qtype is QuantType.F32:
        return rng.standard_normal((rows, cols)).astype("<f4").view(np.uint8)
    data = rng.integers(0, 256, (rows, row_bytes(qtype, cols)), dtype=np.uint8)
    if qtype in (QuantType.F16, QuantType.BF16):
        data[:, 1::2] = data[:, 1::2] & 0x87 | 0x38
        return data
    blocks = data.reshape(rows, -1, BLOCK[qtype].nbytes)
    for at, size in _HALVES.get(qtype, ()):
        scales = size * rng.uniform(0.5, 1.5, blocks.shape[:2])
        blocks[..., at : at + 2] = _halves(scales)
    if qtype is QuantType.MXFP4:
        blocks[..., 0] = rng.integers(118, 124, blocks.shape[:2])
    elif qtype is QuantType.NVFP4:
        blocks[..., :4] = rng.integers(0, 64, (*blocks.shape[:2], 4))
    elif qtype is QuantType.IQ1_M:
        _put_nibbles(blocks, _halves(0.01 * rng.uniform(0.5, 1.5, blocks.shape[:2])))
    return data


def _halves(values: NDArray[np.float64]) -> Bytes:
    return values.astype("<f2").view(np.uint8).reshape(*values.shape, 2)


def _put_nibbles(blocks: Bytes, scales: Bytes) -> None:
    """IQ1_M keeps its f16 scale in the top four bits of four 16-bit words, lowest first."""
    for i in range(4):
        nibble = scales[..., i // 2] >> (4 * (i % 2)) & 15
        high = blocks[..., 49 + 2 * i]
        high[:] = high & 15 | nibble << 4
