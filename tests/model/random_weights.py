"""Random stored weights of any type, with a chosen spread: what a quantizer would have written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize, row_bytes
from tools.synth.blocks import MINIMUM_AT, PLAIN, SCALE_AT


def random_rows(
    rng: np.random.Generator, qtype: QuantType, rows: int, cols: int, std: float = 1.0
) -> NDArray[np.uint8]:
    """Stored bytes of random weights, [rows, row_bytes(qtype, cols)], about ``std`` wide."""
    if qtype in PLAIN:
        return store_plain(qtype, rng.standard_normal((rows, cols), dtype=np.float32) * std)
    block = BLOCK[qtype]
    sample = _blocks(rng, qtype, 64, 1.0)
    unit = float(np.std(dequantize(qtype, sample, block.weights)))
    blocks = _blocks(rng, qtype, rows * cols // block.weights, std / unit)
    return blocks.reshape(rows, row_bytes(qtype, cols))


def store_plain(qtype: QuantType, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Values as F32, F16 or BF16 (cut off, not rounded), [rows, bytes]."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if qtype is QuantType.F16:
        return values.astype(np.float16).view(np.uint8)
    if qtype is QuantType.BF16:
        return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8)
    return values.view(np.uint8)


def _blocks(
    rng: np.random.Generator, qtype: QuantType, count: int, scale: float
) -> NDArray[np.uint8]:
    """Random codes with every block's scale set so that values grow linearly with ``scale``."""
    blocks = rng.integers(0, 256, (count, BLOCK[qtype].nbytes), dtype=np.uint8)
    if qtype is QuantType.MXFP4:
        blocks[:, 0] = np.clip(round(127 + np.log2(scale)), 1, 254)
    elif qtype is QuantType.NVFP4:
        blocks[:, :4] = np.clip(round(56 + 8 * np.log2(scale)), 1, 126)
    elif qtype is QuantType.IQ1_M:
        _set_iq1_m_scale(blocks, scale)
    else:
        _set_half(blocks, SCALE_AT[qtype], scale)
    if qtype in MINIMUM_AT:
        at, factor = MINIMUM_AT[qtype]
        _set_half(blocks, at, scale * factor)
    return blocks


def _set_half(blocks: NDArray[np.uint8], at: int, value: float) -> None:
    blocks[:, at : at + 2] = np.array([value], dtype="<f2").view(np.uint8)


def _set_iq1_m_scale(blocks: NDArray[np.uint8], value: float) -> None:
    """Its float16 scale is spread over the top nibbles of the last four 16-bit words."""
    bits = int(np.array([value], dtype="<f2").view(np.uint16)[0])
    for word in range(4):
        at = 49 + 2 * word
        nibble = (bits >> (4 * word)) & 15
        blocks[:, at] = (blocks[:, at] & 15) | (nibble << 4)
