"""Rows of a K/V cache: each token's keys and values, and its index keys, at its position.

A GPU keeps keys and values as float16, for its tensor cores; the host as float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.rows import copy_rows
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
SOURCE = "cache_rows.cu"
THREADS = 256  # per block on a GPU


def cache_type(stream: Stream) -> np.dtype[Any]:
    """What a stream's device keeps keys and values in: float16 for tensor cores, else float32."""
    return np.dtype(np.float16 if stream.shared_bytes else np.float32)


def store_kv(
    stream: Stream, k: Tensor, v: Tensor, positions: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Write each token's keys and values at its position of a cache.

    On a GPU a row whose values are not all numbers gets keys that are none.

    Args:
        stream: enqueues here.
        k: float32 [T, KV, dim].
        v: float32 [T, KV * dim].
        positions: int32 [T], each below context, all different.
        keys: cache_type [context, KV * dim]; other rows stay.
        values: cache_type [context, KV * dim]; other rows stay.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("store_kv k", k, 3)
    expect_rank("store_kv keys", keys, 2)
    num_tokens, num_kv_heads, dim = k.shape
    width, dtype = num_kv_heads * dim, cache_type(stream)
    expect("store_kv k", k, k.shape)
    expect("store_kv v", v, (num_tokens, width))
    expect("store_kv positions", positions, (num_tokens,), np.int32)
    expect("store_kv keys", keys, (keys.shape[0], width), dtype)
    expect("store_kv values", values, keys.shape, dtype)
    launch = Launch(
        items=num_tokens,
        grain=grain(2 * width),
        grid=(blocks(num_tokens * num_kv_heads, THREADS // 32), 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_tokens, num_kv_heads, dim),
        early=True,
    )
    stream.launch(STORE_KV, launch, k, v, positions, keys, values)


def store_rows(stream: Stream, src: Tensor, positions: Tensor, cache: Tensor) -> None:
    """Write each token's row at its position of a cache.

    Args:
        stream: enqueues here.
        src: float32 [T, width].
        positions: int32 [T], each below context, all different.
        cache: float32 [context, width]; other rows stay.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("store_rows src", src, 2)
    expect_rank("store_rows cache", cache, 2)
    expect("store_rows src", src, src.shape)
    expect("store_rows positions", positions, src.shape[:1], np.int32)
    expect("store_rows cache", cache, (cache.shape[0], src.shape[1]))
    num_tokens, width = src.shape
    launch = Launch(
        items=num_tokens,
        grain=grain(width),
        grid=(num_tokens, blocks(width, 4 * THREADS), 1),
        block=(THREADS, 1, 1),
        extents=(width,),
        early=True,
    )
    stream.launch(STORE_ROWS, launch, src, positions, cache)


@nogil_jit
def _store_rows(begin: int, end: int, src: Floats, positions: Ints, cache: Floats) -> None:
    """Items: tokens."""
    width = src.shape[1]
    for token in range(begin, end):
        copy_rows(cache, positions[token] * width, width, src, token * width, width, 1, width)


@nogil_jit
def _store_kv(
    begin: int, end: int, k: Floats, v: Floats, positions: Ints, keys: Floats, values: Floats
) -> None:
    """Items: tokens."""
    width = v.shape[1]
    for token in range(begin, end):
        at = positions[token] * width
        copy_rows(keys, at, width, k, token * width, width, 1, width)
        copy_rows(values, at, width, v, token * width, width, 1, width)


def store_rows_reference(src: Floats, positions: Ints, cache: Floats) -> Floats:
    """store_rows in plain numpy: the new cache."""
    new = cache.copy()
    new[positions] = src
    return new


def store_kv_reference(
    k: Floats, v: Floats, positions: Ints, keys: Floats, values: Floats
) -> tuple[Floats, Floats]:
    """store_kv in plain numpy: the new keys and values."""
    new_keys, new_values = keys.copy(), values.copy()
    new_keys[positions] = k.reshape(len(k), -1)
    new_values[positions] = v
    return new_keys, new_values


STORE_ROWS = Kernel("store_rows", _store_rows, store_rows_reference, SOURCE)
STORE_KV = Kernel("store_kv", _store_kv, store_kv_reference, SOURCE)
