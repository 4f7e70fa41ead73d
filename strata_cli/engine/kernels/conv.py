"""Depthwise causal convolution over tokens, as the gated delta net and the n-gram embedding use it.

A window holds the rows before the tokens at hand, then their own rows, for the n channels of one
piece of work: (K - 1) * dilation + rows rows of n floats. Arrays here are flat.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import inline_jit
from strata_cli.engine.kernels.rows import add_products, clear_row, compile_small, silu_row

Floats = NDArray[np.float32]
ROWS_AT_ONCE = 32  # tokens convolved together: bounds the window's size, changes no bit


@inline_jit
def channel_taps(weight: Floats, begin: int, n: int) -> Floats:
    """Taps of n channels from begin on, oldest tap first, out of a weight [channels, K]."""
    compile_small()
    num_taps = weight.shape[1]
    taps = np.empty(num_taps * n, np.float32)
    for channel in range(n):
        for tap in range(num_taps):
            taps[tap * n + channel] = weight[begin + channel, tap]
    return taps


@inline_jit
def convolve_silu(
    window: Floats, rows: int, n: int, taps: Floats, dilation: int | np.int64, out: Floats
) -> None:
    """out[row, c] = silu(sum over taps j of taps[j, c] * window[row + j * dilation, c]).

    The sum runs over ascending j by fused multiply-add. out, of rows * n or more, is overwritten.
    """
    compile_small()
    clear_row(out, 0, rows * n)
    for row in range(rows):
        for tap in range(taps.size // n):
            add_products(out, row * n, taps, tap * n, window, (row + tap * dilation) * n, n)
    silu_row(out, 0, rows * n)
