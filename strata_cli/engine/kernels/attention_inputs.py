"""What attention needs of few tokens, on a GPU: one launch for up to six."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Launch, Stream, Tensor
from strata_cli.engine.kernels.cache_rows import cache_type
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import WARP, Unit
from strata_cli.engine.kernels.shapes import blocks, expect

UNIT = Unit("attention_inputs.cu", "attention_inputs", ())
MOST_DIM = 256
WARPS = 2  # of a block


class HeadRows(NamedTuple):
    """Heads to be normalised and turned: src, weight and out of ``head_norm_rope``."""

    src: Tensor
    weight: Tensor
    out: Tensor


class KeyRows(NamedTuple):
    """Keys and values of a layer: before their norm [T, KV, dim], the norm, [T, KV * dim], caches.

    The last two as of ``store_kv``.
    """

    src: Tensor
    weight: Tensor
    v: Tensor
    keys: Tensor
    values: Tensor


class IndexRows(NamedTuple):
    """The indexer's: its queries, keys [T, dim], the caches of ``pool_index_blocks`` and its norm.

    Attributes:
        ratio: positions of a block.
    """

    queries: HeadRows
    src: Tensor
    weight: Tensor
    raw_keys: Tensor
    pooled: Tensor
    ratio: int


def can_take_inputs(stream: Stream, num_tokens: int, *dims: int) -> bool:
    """Whether ``attention_inputs`` takes so many tokens, and heads of these widths."""
    is_few = stream.shared_bytes > 0 and 0 < num_tokens <= FEW_TOKENS
    return is_few and max(dims) <= MOST_DIM


def attention_inputs(
    stream: Stream,
    queries: HeadRows,
    own: KeyRows,
    index: IndexRows | None,
    table: Tensor,
    positions: Tensor,
    eps: float,
) -> None:
    """Enqueue ``head_norm_rope``, ``store_kv``, ``store_rows`` and ``pool_index_blocks``.

    The bits are theirs. Positions and the table must have been there before the launch ahead of
    this one was enqueued.

    Args:
        stream: where it runs; ``can_take_inputs`` said yes.
        queries: of the layer.
        own: keys and values of the layer.
        index: of its indexer; None: it has none.
        table: of ``head_norm_rope``.
        positions: int32 [T], consecutive: of one sequence.
        eps: added to the mean squares.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    tokens, heads, stride = queries.src.shape
    kv_heads, dim = own.src.shape[1:]
    width, halves = kv_heads * dim, cache_type(stream)
    _expect_heads("attention_inputs queries", queries, tokens)
    expect("attention_inputs keys", own.src, (tokens, kv_heads, queries.weight.size))
    expect("attention_inputs key norm", own.weight, (dim,))
    expect("attention_inputs values", own.v, (tokens, width))
    for cache in (own.keys, own.values):
        expect("attention_inputs cache", cache, (own.keys.shape[0], width), halves)
    least_dim = dim if index is None else min(dim, index.weight.size)
    half = min(table.shape[1], least_dim // 2)
    expect("attention_inputs table", table, (table.shape[0], half, 2))
    expect("attention_inputs positions", positions, (tokens,), np.int32)
    warps = blocks(tokens * heads, 2) + blocks(tokens * kv_heads, 2)
    extents = (tokens, heads, stride, kv_heads, dim, half)
    if index is None:
        of_index, more = (*queries, *own[:2], queries.out, queries.out), (0, dim, 0)
    else:
        index_heads, index_dim = index.queries.src.shape[1], index.weight.size
        _expect_heads("attention_inputs index queries", index.queries, tokens)
        expect("attention_inputs index", index.queries.src, (tokens, index_heads, index_dim))
        expect("attention_inputs index keys", index.src, (tokens, index_dim))
        for cache in (index.raw_keys, index.pooled):
            expect("attention_inputs index cache", cache, (cache.shape[0], index_dim))
        of_index = (*index.queries, index.src, index.weight, index.raw_keys, index.pooled)
        more = (index_heads, index_dim, index.ratio)
        warps += blocks(tokens * index_heads, 2) + tokens
    launch = Launch(
        items=1,
        grid=(blocks(warps, WARPS), 1, 1),
        block=(WARP * WARPS, 1, 1),
        extents=extents + more,
        early=True,
    )
    stream.launch(gpu_kernel(UNIT), launch, *queries, *own, *of_index, table, positions, eps)


def _expect_heads(name: str, rows: HeadRows, tokens: int) -> None:
    heads, dim = rows.src.shape[1], rows.weight.size
    expect(name, rows.src, (tokens, heads, max(dim, rows.src.shape[2])))
    expect(f"{name}' norm", rows.weight, (dim,))
    expect(f"{name}' result", rows.out, (tokens, heads, dim))
