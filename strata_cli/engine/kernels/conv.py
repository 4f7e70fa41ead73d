"""Depthwise causal convolution over tokens, as the gated delta net and the n-gram embedding use it.

A window holds the rows before the tokens at hand, then their own rows, for the n channels of one
piece of work: float32 [(K - 1) * dilation + rows, n].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import inline_jit
from strata_cli.engine.kernels.math32 import silu32
from strata_cli.engine.kernels.rows import add_products, clear_row

Floats = NDArray[np.float32]
ROWS_AT_ONCE = 32  # tokens convolved together: bounds the window's size, changes no bit


@inline_jit
def channel_taps(weight: Floats, begin: int, n: int) -> Floats:
    """Taps [K, n] of n channels from begin on, out of a weight [channels, K]."""
    taps = np.empty((weight.shape[1], n), np.float32)
    for channel in range(n):
        for tap in range(weight.shape[1]):
            taps[tap, channel] = weight[begin + channel, tap]
    return taps


@inline_jit
def convolve_silu(window: Floats, rows: int, taps: Floats, dilation: int, out: Floats) -> None:
    """out[row, c] = silu(sum over taps j of taps[j, c] * window[row + j * dilation, c]).

    The sum runs over ascending j by fused multiply-add. out [>= rows, n] is overwritten.
    """
    num_taps, n = taps.shape
    for row in range(rows):
        clear_row(out, row * n, n)
        for tap in range(num_taps):
            add_products(out, row * n, taps, tap * n, window, (row + tap * dilation) * n, n)
        for channel in range(n):
            out[row, channel] = silu32(out[row, channel])
