"""Gated delta net around its delta rule: the causal convolution before, the gated norm behind.

Source: qwen4exp GDN mixer. T tokens of one sequence, nv value heads, dim wide each.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.conv import ROWS_AT_ONCE, channel_taps, convolve_silu
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.reduce import rms_scale
from strata_cli.engine.kernels.rows import (
    compile_small,
    copy_rows,
    multiply_row,
    scale_row,
    sigmoid_row,
)
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain, halves_of

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Halves = NDArray[np.uint16]
F32 = np.float32
SOURCE = "gdn.cu"
THREADS = 128  # per block on a GPU
RUN_TOKENS = 32  # convolved by one of a GPU's threads, one after the other
_CHANNELS_AT_LEAST = 64  # for a thread's piece of a convolution


def causal_conv_silu(
    stream: Stream, u: Tensor, history: Tensor, weight: Tensor, out: Tensor
) -> None:
    """Depthwise causal convolution over tokens, then silu, for one sequence's next T tokens.

    Args:
        stream: enqueues here.
        u: float32 [T, channels].
        history: the K - 1 rows before u, float32 [K - 1, channels], zeros at a sequence's start;
            replaced by the last K - 1 rows of history and u together.
        weight: taps, oldest first, float32 [channels, K].
        out: float32 [T, channels], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("causal_conv_silu u", u, 2)
    expect_rank("causal_conv_silu weight", weight, 2)
    num_tokens, channels = u.shape
    num_taps = weight.shape[1]
    expect("causal_conv_silu u", u, u.shape)
    expect("causal_conv_silu weight", weight, (channels, num_taps))
    expect("causal_conv_silu history", history, (num_taps - 1, channels))
    expect("causal_conv_silu out", out, u.shape)
    run = max(RUN_TOKENS, num_taps - 1)
    launch = Launch(
        items=channels,
        grain=max(_CHANNELS_AT_LEAST, grain(4 * num_tokens)),
        grid=(blocks(channels, THREADS), blocks(num_tokens, run), 1),
        block=(THREADS, 1, 1),
        extents=(num_tokens, channels, run),
        early=True,
    )
    stream.launch(_causal_conv_silu_kernel(num_taps), launch, u, history, weight, out)


def gated_norm(
    stream: Stream,
    o: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """RMS-normalise each value head, scale by weight, gate by sigmoid(z).

    Args:
        stream: enqueues here.
        o: float32 [T, nv * dim].
        z: float32 [T, nv * dim], before the sigmoid.
        weight: float32 [dim].
        eps: added to the mean square.
        out: float32 [T, nv * dim], overwritten.
        rounded: float16 [T, nv * dim], overwritten on a GPU, or None.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("gated_norm o", o, 2)
    expect_rank("gated_norm weight", weight, 1)
    num_tokens, dim = o.shape[0], weight.shape[0]
    num_heads = o.shape[1] // dim
    expect("gated_norm o", o, (num_tokens, num_heads * dim))
    expect("gated_norm weight", weight, (dim,))
    expect("gated_norm z", z, o.shape)
    expect("gated_norm out", out, o.shape)
    halves = halves_of("gated_norm", rounded, out)
    launch = Launch(
        items=num_tokens * num_heads,
        grain=grain(4 * dim),
        grid=(blocks(num_tokens * num_heads, THREADS // 16), 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_tokens * num_heads, dim, rounded is not None),
        early=True,
    )
    stream.launch(GATED_NORM, launch, o, z, weight, eps, out, halves)


@nogil_jit
def _causal_conv_silu(
    begin: int, end: int, u: Floats, history: Floats, weight: Floats, out: Floats
) -> None:
    """Items: channels."""
    num_tokens, channels = u.shape
    n, past = end - begin, history.shape[0]
    most = num_tokens if num_tokens < ROWS_AT_ONCE else ROWS_AT_ONCE
    compile_small()
    taps = channel_taps(weight, begin, n)
    window, result = np.empty((past + most) * n, F32), np.empty(most * n, F32)
    copy_rows(window, 0, n, history, begin, channels, past, n)
    for first in range(0, num_tokens, ROWS_AT_ONCE):
        rows = most if first + most <= num_tokens else num_tokens - first
        copy_rows(window, past * n, n, u, first * channels + begin, channels, rows, n)
        convolve_silu(window, rows, n, taps, np.int64(1), result)
        copy_rows(out, first * channels + begin, channels, result, 0, n, rows, n)
        copy_rows(window, 0, n, window, rows * n, n, past, n)
    copy_rows(history, begin, channels, window, 0, n, past, n)


@nogil_jit
def _gated_norm(
    begin: int,
    end: int,
    o: Floats,
    z: Floats,
    weight: Floats,
    eps: float,
    out: Floats,
    _rounded: Halves,
) -> None:
    """Items: (token, value head), one row of dim in o, z and out each."""
    dim = weight.size
    gate = np.empty(dim, F32)
    compile_small()
    for at in range(begin * dim, end * dim, dim):
        sigmoid_row(gate, 0, z, at, dim)
        scale_row(out, at, o, at, rms_scale(o, at, dim, eps), dim)
        multiply_row(out, at, weight, 0, dim)
        multiply_row(out, at, gate, 0, dim)


def causal_conv_silu_reference(u: Floats, history: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """causal_conv_silu in plain numpy: (out, the new history)."""
    rows = np.concatenate([history, u]).astype(np.float64)
    num_taps, num_tokens = weight.shape[1], len(u)
    total = sum(rows[j : j + num_tokens] * weight[:, j] for j in range(num_taps))
    out = total / (1.0 + np.exp(-total))
    return out.astype(np.float32), rows[len(rows) - len(history) :].astype(np.float32)


def gated_norm_reference(o: Floats, z: Floats, weight: Floats, eps: float) -> Floats:
    """gated_norm in plain numpy: [T, nv * dim]."""
    heads = o.astype(np.float64).reshape(len(o), -1, len(weight))
    normed: Doubles = heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + eps) * weight
    gate = 1.0 / (1.0 + np.exp(-z.astype(np.float64)))
    return (normed.reshape(o.shape) * gate).astype(np.float32)


@cache
def _causal_conv_silu_kernel(num_taps: int) -> Kernel:
    function = f"causal_conv_silu<{num_taps}>"
    return Kernel(function, _causal_conv_silu, causal_conv_silu_reference, SOURCE, function)


CAUSAL_CONV_SILU = _causal_conv_silu_kernel(4)
GATED_NORM = Kernel("gated_norm", _gated_norm, gated_norm_reference, SOURCE)
