"""What attention needs of few tokens, made by one launch: the bits of the launches it replaces."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels.attention_inputs import (
    HeadRows,
    IndexRows,
    KeyRows,
    attention_inputs,
    can_take_inputs,
)
from strata_cli.engine.kernels.cache_rows import store_kv, store_rows
from strata_cli.engine.kernels.indexer import pool_index_blocks
from strata_cli.engine.kernels.rope import head_norm_rope, rope_table
from tests.kernels.lab import Lab, normal

CONTEXT, EPS = 64, 1e-6


class Sizes(NamedTuple):
    """Of tokens, heads and the index; ratio 0: there is none."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    index_heads: int
    index_dim: int
    ratio: int
    first: int


def inputs(lab: Lab, sizes: Sizes, *, has_gap: bool) -> tuple[HeadRows, KeyRows, IndexRows]:
    """The same values each time, with results and caches of their own."""
    tokens, dim, index_dim = sizes.tokens, sizes.dim, sizes.index_dim
    v = normal(3, tokens, sizes.kv_heads * dim)
    if has_gap:
        v[0, dim // 2] = np.nan
    cache = normal(11, CONTEXT, sizes.kv_heads * dim).astype(np.float16)
    queries = HeadRows(
        lab.put(normal(1, tokens, sizes.heads, 2 * dim)),
        lab.put(normal(4, dim)),
        lab.empty((tokens, sizes.heads, dim)),
    )
    keys = KeyRows(
        lab.put(normal(2, tokens, sizes.kv_heads, dim)),
        lab.put(normal(5, dim)),
        *(lab.put(v), lab.put(cache), lab.put(cache)),
    )
    of_index = HeadRows(
        lab.put(normal(6, tokens, sizes.index_heads, index_dim)),
        lab.put(normal(8, index_dim)),
        lab.empty((tokens, sizes.index_heads, index_dim)),
    )
    index = IndexRows(
        of_index,
        lab.put(normal(7, tokens, index_dim)),
        lab.put(normal(9, index_dim)),
        lab.put(normal(10, CONTEXT, index_dim)),
        lab.put(normal(12, CONTEXT // max(sizes.ratio, 1), index_dim)),
        sizes.ratio,
    )
    return queries, keys, index


def one_by_one(
    lab: Lab,
    queries: HeadRows,
    own: KeyRows,
    index: IndexRows | None,
    table: Tensor,
    positions: Tensor,
) -> None:
    stream = lab.stream
    head_norm_rope(stream, queries.src, queries.weight, table, positions, EPS, queries.out)
    turned = lab.empty(own.src.shape)
    head_norm_rope(stream, own.src, own.weight, table, positions, EPS, turned)
    store_kv(stream, turned, own.v, positions, own.keys, own.values)
    if index is None:
        return
    src, weight, out = index.queries
    head_norm_rope(stream, src, weight, table, positions, EPS, out)
    store_rows(stream, index.src, positions, index.raw_keys)
    ratio, norm = index.ratio, index.weight
    pool_index_blocks(stream, index.raw_keys, positions, ratio, norm, table, EPS, index.pooled)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 24, 2, 256, 64, 4, 128, 16, 40),
        Sizes(1, 24, 2, 256, 64, 4, 128, 16, 47),  # completes a block
        Sizes(9, 3, 3, 48, 40, 1, 40, 4, 6),
        Sizes(2, 4, 2, 32, 32, 1, 32, 0, 5),
    ],
)
@pytest.mark.parametrize("has_gap", [False, True])
def test_one_launch_has_the_bits_of_six(gpu_lab: Lab, sizes: Sizes, has_gap: bool) -> None:
    table = gpu_lab.put(rope_table(CONTEXT, sizes.rotary, 1e4))
    positions = gpu_lab.put(np.arange(sizes.tokens, dtype=np.int32) + np.int32(sizes.first))
    assert can_take_inputs(gpu_lab.stream, sizes.tokens, sizes.dim, sizes.index_dim)
    results: list[list[NDArray[Any]]] = []
    for is_together in (False, True):
        queries, own, every = inputs(gpu_lab, sizes, has_gap=has_gap)
        index = every if sizes.ratio else None
        if is_together:
            attention_inputs(gpu_lab.stream, queries, own, index, table, positions, EPS)
        else:
            one_by_one(gpu_lab, queries, own, index, table, positions)
        outputs = [queries.out, own.keys, own.values, every.raw_keys, every.pooled]
        outputs += [every.queries.out] if index else []
        results.append([gpu_lab.get(each) for each in outputs])
    for alone, together in zip(*results, strict=True):
        np.testing.assert_array_equal(together, alone)
