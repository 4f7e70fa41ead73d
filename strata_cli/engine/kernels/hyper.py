"""Hyper-connections: the residual streams' norm, low-rank mixer read, and write.

Source: qwen4exp stream read and write. T tokens, S streams, D hidden size, R stream rank; a vector
over all streams is stream-major, element s * D + d. Every kernel here reads and writes each element
about once, so memory bandwidth is its limit. Where a result goes on to products of many rows, a
GPU also writes it as round_rows would; the host, whose products need no such copy, does not.
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
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain, halves_of
from strata_cli.errors import ShapeError

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
F32 = np.float32
THREADS = 128  # per block on a GPU
COLUMNS = 4 * THREADS  # of a row, that such a block treats
PARTS_GAIN = 64  # of the parts of an inject: the gain of float32 weights in products


def stream_norm(
    stream: Stream,
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """RMS-normalise each residual stream on its own.

    Args:
        stream: enqueues here.
        x: residual streams, float32 [T, S, D].
        weight: float32 [S * D].
        eps: added to the mean square.
        out: float32 [T, S * D], overwritten.
        rounded: float16 [T, S * D], overwritten on a GPU, or None.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("stream_norm x", x, 3)
    num_tokens, num_streams, size = x.shape
    expect("stream_norm x", x, x.shape)
    expect("stream_norm weight", weight, (num_streams * size,))
    expect("stream_norm out", out, (num_tokens, num_streams * size))
    halves = halves_of("stream_norm", rounded, out)
    launch = _by_rows(x.shape, rounded)
    stream.launch(STREAM_NORM, launch, x, weight, eps, out, halves)


def stream_write_norm(
    stream: Stream,
    x: Tensor,
    out: Tensor,
    inject: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """stream_write, then stream_norm of the streams it wrote: the same bits, in one pass.

    Args:
        stream: enqueues here.
        x: residual streams, float32 [T, S, D], in place.
        out: the layer's output, float32 [T, D].
        inject: as of stream_write.
        weight: norm weight, float32 [S * D].
        eps: added to the mean square.
        normed: float32 [T, S * D], overwritten.
        rounded: float16 [T, S * D], overwritten on a GPU, or None.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("stream_write_norm x", x, 3)
    num_tokens, num_streams, size = x.shape
    expect("stream_write_norm x", x, x.shape)
    expect("stream_write_norm out", out, (num_tokens, size))
    parts = expect_inject("stream_write_norm inject", inject, num_tokens, num_streams)
    expect("stream_write_norm weight", weight, (num_streams * size,))
    expect("stream_write_norm normed", normed, (num_tokens, num_streams * size))
    halves = halves_of("stream_write_norm", rounded, normed)
    launch = _by_rows(x.shape, rounded, *parts)
    stream.launch(STREAM_WRITE_NORM, launch, x, out, inject, weight, eps, normed, halves)


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
        early=True,
    )
    stream.launch(LOWRANK_SILU, launch, low, num_streams)


def stream_mix(
    stream: Stream, gate: Tensor, normed: Tensor, out: Tensor, rounded: Tensor | None = None
) -> None:
    """Mix the normalised streams into a layer's input: the mean over s of sigmoid(gate) * normed.

    Args:
        stream: enqueues here.
        gate: float32 [T, S * D], before the sigmoid.
        normed: float32 [T, S * D], from stream_norm.
        out: float32 [T, D], overwritten.
        rounded: float16 [T, D], overwritten on a GPU, or None.

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
    halves = halves_of("stream_mix", rounded, out)
    launch = _by_columns(shape, rounded is not None)
    stream.launch(STREAM_MIX, launch, gate.reshape(*shape), normed.reshape(*shape), out, halves)


def stream_write(stream: Stream, x: Tensor, out: Tensor, inject: Tensor) -> None:
    """Add a layer's output to every stream: x[s] += 2 sigmoid(inject[s] / S) * out.

    Args:
        stream: enqueues here.
        x: residual streams, float32 [T, S, D], in place.
        out: the layer's output, float32 [T, D].
        inject: float32 [T, S], before the sigmoid; or its parts [P, T, S], on a GPU, as
            stream_mix_inject leaves them.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("stream_write x", x, 3)
    num_tokens, num_streams, size = x.shape
    expect("stream_write x", x, x.shape)
    expect("stream_write out", out, (num_tokens, size))
    parts = expect_inject("stream_write inject", inject, num_tokens, num_streams)
    launch = _by_columns(x.shape, *parts)
    stream.launch(STREAM_WRITE, launch, x, out, inject)


def expect_inject(name: str, inject: Tensor, num_tokens: int, num_streams: int) -> tuple[int, int]:
    """Check an inject; returns how many parts it has, and what their sum is divided by."""
    parts = inject.shape[:-2]
    expect(name, inject, (*parts, num_tokens, num_streams))
    return (parts[0], PARTS_GAIN) if parts else (1, 1)


def _by_rows(shape: tuple[int, ...], rounded: Tensor | None, *more: int) -> Launch:
    """A launch over the rows of all streams of [T, S, D]; more: further extents."""
    num_tokens, num_streams, size = shape
    return Launch(
        items=num_tokens * num_streams,
        grain=grain(size),
        grid=(num_tokens * num_streams, 1, 1),
        block=(2 * THREADS, 1, 1),
        shared_bytes=4 * size,
        extents=(num_streams, size, rounded is not None, *more),
        early=True,
    )


def _by_columns(shape: tuple[int, ...], *more: int) -> Launch:
    """A launch over tokens, on a GPU also over columns, of [T, S, D]."""
    num_tokens, num_streams, size = shape
    return Launch(
        items=num_tokens,
        grain=grain(num_streams * size),
        grid=(num_tokens, blocks(size, COLUMNS), 1),
        block=(THREADS, 1, 1),
        extents=(num_streams, size, *more),
        early=True,
    )


@nogil_jit
def _stream_norm(
    begin: int, end: int, x: Floats, weight: Floats, eps: float, out: Floats, _rounded: Halves
) -> None:
    """Items: rows of all streams of x [T, S, D]."""
    _, num_streams, size = x.shape
    compile_small()
    for row in range(begin, end):
        at = row * size
        scale_row(out, at, x, at, rms_scale(x, at, size, eps), size)
        multiply_row(out, at, weight, row % num_streams * size, size)


@nogil_jit
def _stream_write_norm(
    begin: int,
    end: int,
    x: Floats,
    out: Floats,
    inject: Floats,
    weight: Floats,
    eps: float,
    normed: Floats,
    _rounded: Halves,
) -> None:
    """Items: rows of all streams of x [T, S, D]."""
    _, num_streams, size = x.shape
    compile_small()
    for row in range(begin, end):
        at, token, s = row * size, row // num_streams, row % num_streams
        share = F32(2.0) * sigmoid32(inject[token, s] / F32(num_streams))
        add_scaled_row(x, at, share, out, token * size, size)
        scale_row(normed, at, x, at, rms_scale(x, at, size, eps), size)
        multiply_row(normed, at, weight, s * size, size)


@nogil_jit
def _lowrank_silu(begin: int, end: int, low: Floats, num_streams: int) -> None:
    """Items: tokens."""
    rank = low.shape[1]
    compile_small()
    for token in range(begin, end):
        divide_row(low, token * rank, F32(num_streams), rank)
        silu_row(low, token * rank, rank)


@nogil_jit
def _stream_mix(
    begin: int, end: int, gate: Floats, normed: Floats, out: Floats, _rounded: Halves
) -> None:
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


def stream_write_norm_reference(
    x: Floats, out: Floats, inject: Floats, weight: Floats, eps: float
) -> tuple[Floats, Floats]:
    """stream_write_norm in plain numpy: (the new x, normed)."""
    written = stream_write_reference(x, out, inject)
    return written, stream_norm_reference(written, weight, eps)


SOURCE = "hyper.cu"
STREAM_NORM = Kernel("stream_norm", _stream_norm, stream_norm_reference, SOURCE)
LOWRANK_SILU = Kernel("lowrank_silu", _lowrank_silu, lowrank_silu_reference, SOURCE)
STREAM_MIX = Kernel("stream_mix", _stream_mix, stream_mix_reference, SOURCE)
STREAM_WRITE = Kernel("stream_write", _stream_write, stream_write_reference, SOURCE)
STREAM_WRITE_NORM = Kernel(
    "stream_write_norm", _stream_write_norm, stream_write_norm_reference, SOURCE
)
