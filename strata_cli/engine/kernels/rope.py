"""Rotary positions: the cosine table, and the norm-then-rotate step of query and key heads.

Source: qwen4exp QSA. The first rotary_dim columns of a head turn in pairs (j, j + rotary_dim / 2)
by the angle position * theta ** (-2 j / rotary_dim); the others stay.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import inline_jit, nogil_jit
from strata_cli.engine.kernels.reduce import rms_scale
from strata_cli.engine.kernels.rows import compile_small, multiply_row, scale_row
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
THREADS = 128  # per block on a GPU, 16 for each head
_STEP = 256  # positions between the angles that libm is asked for


def rope_table(context: int, rotary_dim: int, theta: float) -> Floats:
    """Cosine and sine of every position and pair.

    A row is the same whatever the table's length: libm gives the angles of multiples of 256 and of
    the remainders below 256, and the angle addition theorem joins the two in float64.

    Args:
        context: number of positions.
        rotary_dim: columns of a head that turn, even.
        theta: base of the frequencies.

    Returns:
        float32 [context, rotary_dim / 2, 2], cosine first.
    """
    frequencies = [math.pow(theta, -2.0 * j / rotary_dim) for j in range(rotary_dim // 2)]
    coarse = _turns(range(0, context, _STEP), frequencies)[:, None]
    fine = _turns(range(min(_STEP, context)), frequencies)[None]
    table = np.empty((coarse.shape[0], fine.shape[1], len(frequencies), 2), np.float32)
    table[..., 0] = coarse[..., 0] * fine[..., 0] - coarse[..., 1] * fine[..., 1]
    table[..., 1] = coarse[..., 1] * fine[..., 0] + coarse[..., 0] * fine[..., 1]
    return table.reshape(coarse.shape[0] * fine.shape[1], len(frequencies), 2)[:context]


def _turns(positions: range, frequencies: list[float]) -> NDArray[np.float64]:
    """[positions, frequencies, 2]: cosine and sine."""
    angles = [position * frequency for position in positions for frequency in frequencies]
    turns = np.array([(math.cos(angle), math.sin(angle)) for angle in angles], np.float64)
    return turns.reshape(len(positions), len(frequencies), 2)


def head_norm_rope(
    stream: Stream,
    src: Tensor,
    weight: Tensor,
    rope: Tensor,
    positions: Tensor,
    eps: float,
    out: Tensor,
) -> None:
    """RMS-normalise each head, then turn it to its token's position.

    Args:
        stream: enqueues here.
        src: float32 [T, heads, stride], of which the first dim columns of a head are read.
        weight: float32 [dim].
        rope: rope_table of at least every position, float32 [context, rotary_dim / 2, 2].
        positions: int32 [T].
        eps: added to the mean square.
        out: float32 [T, heads, dim], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("head_norm_rope src", src, 3)
    expect_rank("head_norm_rope rope", rope, 3)
    num_tokens, num_heads, _ = src.shape
    dim = weight.size
    expect("head_norm_rope src", src, (num_tokens, num_heads, max(dim, src.shape[2])))
    expect("head_norm_rope weight", weight, (dim,))
    expect("head_norm_rope rope", rope, (rope.shape[0], min(dim // 2, rope.shape[1]), 2))
    expect("head_norm_rope positions", positions, (num_tokens,), np.int32)
    expect("head_norm_rope out", out, (num_tokens, num_heads, dim))
    rows = num_tokens * num_heads
    launch = Launch(
        items=rows,
        grain=grain(dim),
        grid=(blocks(rows, THREADS // 16), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=4 * dim * (THREADS // 16),
        extents=(rows, num_heads, src.shape[2], dim, rope.shape[1]),
        early=True,
    )
    out = out.reshape(num_tokens * num_heads, dim)
    stream.launch(HEAD_NORM_ROPE, launch, src, weight, rope, positions, eps, out)


@inline_jit
def turn_row(x: Floats, row: int, rope: Floats, position: int | np.int64) -> None:
    """Turn one row of x [rows, dim] to a position, in place."""
    compile_small()
    half = rope.shape[1]
    for j in range(half):
        first, second = x[row, j], x[row, half + j]
        cosine, sine = rope[position, j, 0], rope[position, j, 1]
        x[row, j] = first * cosine - second * sine
        x[row, half + j] = second * cosine + first * sine


@nogil_jit
def _head_norm_rope(
    begin: int,
    end: int,
    src: Floats,
    weight: Floats,
    rope: Floats,
    positions: Ints,
    eps: float,
    out: Floats,
) -> None:
    """Items: (token, head), the rows of out [T * heads, dim]."""
    num_heads, stride, dim = src.shape[1], src.shape[2], weight.size
    compile_small()
    for item in range(begin, end):
        scale = rms_scale(src, item * stride, dim, eps)
        scale_row(out, item * dim, src, item * stride, scale, dim)
        multiply_row(out, item * dim, weight, 0, dim)
        turn_row(out, item, rope, np.int64(positions[item // num_heads]))


def turn_reference(x: NDArray[np.float64], rope: Floats, positions: Ints) -> NDArray[np.float64]:
    """The rotation in plain numpy: x [T, ..., dim] turned to positions [T]."""
    half = rope.shape[1]
    table = rope[positions].astype(np.float64).reshape(len(x), *[1] * (x.ndim - 2), half, 2)
    cosine, sine = table[..., 0], table[..., 1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cosine - second * sine, second * cosine + first * sine, x[..., 2 * half :]]
    return np.concatenate(turned, axis=-1)


def head_norm_rope_reference(
    src: Floats, weight: Floats, rope: Floats, positions: Ints, eps: float
) -> Floats:
    """head_norm_rope in plain numpy: [T, heads, dim]."""
    heads = src[..., : len(weight)].astype(np.float64)
    normed = heads / np.sqrt(np.mean(heads**2, axis=-1, keepdims=True) + eps) * weight
    return turn_reference(normed, rope, positions).astype(np.float32)


HEAD_NORM_ROPE = Kernel("head_norm_rope", _head_norm_rope, head_norm_rope_reference, "rope.cu")
