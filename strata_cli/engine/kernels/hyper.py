"""Hyper-connections: the residual streams' norm, low-rank mixer read, and write.

Source: qwen4exp stream read and write. T tokens, S streams, D hidden size, R stream rank; a vector
over all streams is stream-major, element s * D + d. Every kernel here reads and writes each element
about once, so memory bandwidth is its limit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import sigmoid32
from strata_cli.engine.kernels.reduce import rms_scale
from strata_cli.engine.kernels.rows import (
    add_gated_row,
    add_scaled_row,
    clear_row,
    compile_small,
    divide_row,
    multiply_row,
    scale_row,
    silu_row,
)
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.errors import ShapeError

Floats = NDArray[np.float32]
F32 = np.float32
THREADS = 128  # per block on a GPU
COLUMNS = 4 * THREADS  # of a row, that such a block treats


def stream_norm(stream: Stream, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """RMS-normalise each residual stream on its own.

    Args:
        stream: enqueues here.
        x: residual streams, float32 [T, S, D].
        weight: float32 [S * D].
        eps: added to the mean square.
        out: float32 [T, S * D], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("stream_norm x", x, 3)
    num_tokens, num_streams, size = x.shape
    expect("stream_norm x", x, x.shape)
    expect("stream_norm weight", weight, (num_streams * size,))
    expect("stream_norm out", out, (num_tokens, num_streams * size))
    rows = num_tokens * num_streams
    launch = Launch(
        items=rows,
        grain=grain(size),
        grid=(rows, 1, 1),
        block=(2 * THREADS, 1, 1),
        shared_bytes=4 * size,
        extents=(num_streams, size),
    )
    weight, out = weight.reshape(num_streams, size), out.reshape(rows, size)
    stream.launch(STREAM_NORM, launch, x.reshape(rows, size), weight, eps, out)


def lowrank_silu(stream: Stream, low: Tensor, num_streams: int) -> None:
    """Replace the mixer's low-rank activations by silu(low / num_streams).

    Args:
        stream: enqueues here.
        low: float32 [T, R], in place.
        num_streams: S.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("lowrank_silu low", low, 2)
    expect("lowrank_silu low", low, low.shape)
    launch = Launch(
        items=low.shape[0],
        grain=grain(low.shape[1]),
        grid=(blocks(low.size, THREADS), 1, 1),
        block=(THREADS, 1, 1),
        extents=(low.size,),
    )
    stream.launch(LOWRANK_SILU, launch, low, num_streams)


def stream_mix(stream: Stream, gate: Tensor, normed: Tensor, out: Tensor) -> None:
    """Mix the normalised streams into a layer's input: the mean over s of sigmoid(gate) * normed.

    Args:
        stream: enqueues here.
        gate: float32 [T, S * D], before the sigmoid.
        normed: float32 [T, S * D], from stream_norm.
        out: float32 [T, D], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("stream_mix normed", normed, 2)
    expect_rank("stream_mix out", out, 2)
    expect("stream_mix normed", normed, normed.shape)
    expect("stream_mix gate", gate, normed.shape)
    num_tokens, width = normed.shape
    size = out.shape[1]
    expect("stream_mix out", out, (num_tokens, size))
    if width % size:
        raise ShapeError(f"stream_mix: {width} columns are not whole streams of {size}")
    shape = (num_tokens, width // size, size)
    launch = _by_columns(shape)
    stream.launch(STREAM_MIX, launch, gate.reshape(*shape), normed.reshape(*shape), out)


def stream_write(stream: Stream, x: Tensor, out: Tensor, inject: Tensor) -> None:
    """Add a layer's output to every stream: x[s] += 2 sigmoid(inject[s] / S) * out.

    Args:
        stream: enqueues here.
        x: residual streams, float32 [T, S, D], in place.
        out: the layer's output, float32 [T, D].
        inject: float32 [T, S], before the sigmoid.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("stream_write x", x, 3)
    num_tokens, num_streams, size = x.shape
    expect("stream_write x", x, x.shape)
    expect("stream_write out", out, (num_tokens, size))
    expect("stream_write inject", inject, (num_tokens, num_streams))
    launch = _by_columns(x.shape)
    stream.launch(STREAM_WRITE, launch, x, out, inject)


def _by_columns(shape: tuple[int, ...]) -> Launch:
    """A launch over tokens, on a GPU also over columns, of [T, S, D]."""
    num_tokens, num_streams, size = shape
    return Launch(
        items=num_tokens,
        grain=grain(num_streams * size),
        grid=(num_tokens, blocks(size, COLUMNS), 1),
        block=(THREADS, 1, 1),
        extents=(num_streams, size),
    )


@nogil_jit
def _stream_norm(begin: int, end: int, x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    """Items: rows of x [T * S, D] and out [T * S, D]; weight [S, D]."""
    num_streams, size = weight.shape
    compile_small()
    for row in range(begin, end):
        at = row * size
        scale_row(out, at, x, at, rms_scale(x, at, size, eps), size)
        multiply_row(out, at, weight, row % num_streams * size, size)


@nogil_jit
def _lowrank_silu(begin: int, end: int, low: Floats, num_streams: int) -> None:
    """Items: tokens."""
    rank = low.shape[1]
    compile_small()
    for token in range(begin, end):
        divide_row(low, token * rank, F32(num_streams), rank)
        silu_row(low, token * rank, rank)


@nogil_jit
def _stream_mix(begin: int, end: int, gate: Floats, normed: Floats, out: Floats) -> None:
    """Items: tokens of gate and normed [T, S, D]."""
    _, num_streams, size = normed.shape
    compile_small()
    for token in range(begin, end):
        at = token * size
        clear_row(out, at, size)
        for s in range(num_streams):
            row = (token * num_streams + s) * size
            add_gated_row(out, at, gate, row, normed, row, size)
        divide_row(out, at, F32(num_streams), size)


@nogil_jit
def _stream_write(begin: int, end: int, x: Floats, out: Floats, inject: Floats) -> None:
    """Items: tokens."""
    _, num_streams, size = x.shape
    compile_small()
    for token in range(begin, end):
        for s in range(num_streams):
            weight = F32(2.0) * sigmoid32(inject[token, s] / F32(num_streams))
            add_scaled_row(x, (token * num_streams + s) * size, weight, out, token * size, size)


def stream_norm_reference(x: Floats, weight: Floats, eps: float) -> Floats:
    """stream_norm in plain numpy: x [T, S, D], weight [S * D] -> [T, S * D]."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    result: Floats = (normed.reshape(len(x), -1) * weight).astype(F32)
    return result


def lowrank_silu_reference(low: Floats, num_streams: int) -> Floats:
    """lowrank_silu in plain numpy: low [T, R] -> [T, R]."""
    scaled = low.astype(np.float64) / num_streams
    result: Floats = (scaled / (1.0 + np.exp(-scaled))).astype(F32)
    return result


def stream_mix_reference(gate: Floats, normed: Floats, num_streams: int) -> Floats:
    """stream_mix in plain numpy: gate and normed [T, S * D] -> [T, D]."""
    weighted = normed / (1.0 + np.exp(-gate.astype(np.float64)))
    result: Floats = (weighted.reshape(len(gate), num_streams, -1).mean(axis=1)).astype(F32)
    return result


def stream_write_reference(x: Floats, out: Floats, inject: Floats) -> Floats:
    """stream_write in plain numpy: the new x [T, S, D]."""
    weight = 2.0 / (1.0 + np.exp(-inject.astype(np.float64) / x.shape[1]))
    result: Floats = (x + weight[:, :, None] * out[:, None, :]).astype(F32)
    return result


SOURCE = "hyper.cu"
STREAM_NORM = Kernel("stream_norm", _stream_norm, stream_norm_reference, SOURCE)
LOWRANK_SILU = Kernel("lowrank_silu", _lowrank_silu, lowrank_silu_reference, SOURCE)
STREAM_MIX = Kernel("stream_mix", _stream_mix, stream_mix_reference, SOURCE)
STREAM_WRITE = Kernel("stream_write", _stream_write, stream_write_reference, SOURCE)
