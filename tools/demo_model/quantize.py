"""Storage types of the demo model's tensors, and a Q4_0 quantizer that searches its scales."""

import numpy as np
from gguf import GGMLQuantizationType as QuantType
from gguf import quants
from numpy.typing import NDArray

Q4_BLOCK = 32
# Multiples of the usual scale that are tried for a Q4_0 block. The usual one maps the largest
# weight exactly to code -8; a little less often leaves a smaller squared error.
SCALE_STEPS = np.linspace(0.80, 1.10, 31, dtype=np.float32)


def storage_type(name: str, ndim: int) -> QuantType:
    """Choose the storage type of a GGUF tensor of `ndim` axes.

    Routed experts and the n-gram table are most of the bytes and stand four bits best; what steers
    the computation (norms, convolutions, the router) stays exact.
    """
    if ndim == 1 or "norm" in name or "conv1d" in name or name.endswith("ffn_gate_inp.weight"):
        return QuantType.F32
    if name.endswith("_exps.weight") or name.startswith("per_layer_token_embd"):
        return QuantType.Q4_0
    return QuantType.Q8_0


def quantize(values: NDArray[np.float32], qtype: QuantType) -> NDArray[np.uint8]:
    """Encode float32 rows [..., cols] as the bytes of `qtype` [..., row bytes]."""
    if qtype == QuantType.Q4_0:
        return quantize_q4_0(values)
    encoded: NDArray[np.uint8] = quants.quantize(values, qtype).view(np.uint8)
    return encoded


def dequantize(data: NDArray[np.uint8], qtype: QuantType) -> NDArray[np.float32]:
    """Decode what `quantize` made, with the gguf package's own reader."""
    decoded: NDArray[np.float32] = quants.dequantize(data, qtype)
    return decoded


def quantize_q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Encode rows [..., cols] as Q4_0, choosing each block's scale for the least squared error.

    Source: ggml Q4_0: 32 weights as an f16 scale d and 16 bytes; weight j is (low nibble of byte
    j - 8) * d for j < 16, the high nibble of byte j - 16 for the rest.
    """
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, Q4_BLOCK)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)[:, 0]
    best_error = np.full(len(blocks), np.inf, dtype=np.float32)
    best_scale = np.zeros(len(blocks), dtype=np.float16)
    for step in (np.float32(1.0), *SCALE_STEPS):
        scale = (peak / np.float32(-8.0) * step).astype(np.float16)
        error = np.square(codes_of(blocks, scale) * scale[:, None].astype(np.float32) - blocks)
        total = error.sum(axis=1)
        better = total < best_error
        best_error[better], best_scale[better] = total[better], scale[better]
    codes = (codes_of(blocks, best_scale) + 8).astype(np.uint8)
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    encoded = np.concatenate([best_scale[:, None].view(np.uint8), packed], axis=1)
    return encoded.reshape(*values.shape[:-1], -1)


def codes_of(blocks: NDArray[np.float32], scale: NDArray[np.float16]) -> NDArray[np.float32]:
    """Round blocks [n, 32] to the codes -8..7 of their scales [n]; a zero scale gives zeros."""
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide != 0)
    return np.clip(np.rint(blocks * inverse[:, None]), -8, 7)
