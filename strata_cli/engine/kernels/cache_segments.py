"""Kernels of attention that go through the caches of all segments in one launch, on a GPU.

They store rows, pool and select index blocks, and attend, with the bits of one segment at a time.
"""

from __future__ import annotations

import numpy as np

from strata_cli.engine.device.base import Launch, Stream, Tensor
from strata_cli.engine.kernels import cache_rows, indexer
from strata_cli.engine.kernels.attention import SOURCE as ATTENTION_SOURCE
from strata_cli.engine.kernels.attention_plan import ENOUGH_BLOCKS, PART_POSITIONS, AttendPlan
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import WARP, Unit
from strata_cli.engine.kernels.segments import Segments
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank

# Measured on an H200 (benchmarks/results/short_passes.md); they only steer.
PART_US = 6.0  # of a tile's walk through its positions, by 64
SEGMENT_US = 80.0  # of a segment by itself, which is at least seven launches
STORED_AT_ONCE = 4 * cache_rows.THREADS  # floats of a row that a thread block stores


def store_segments(
    stream: Stream,
    k: Tensor,
    v: Tensor,
    index_keys: Tensor | None,
    positions: Tensor,
    segments: Segments,
) -> None:
    """Enqueue ``store_kv``, and ``store_rows`` of index keys, of every segment to its cache.

    Args:
        stream: enqueues here.
        k: float32 [T, KV, dim].
        v: float32 [T, KV * dim].
        index_keys: float32 [T, width], or None where the layer has no index.
        positions: int32 [T].
        segments: of a layer with a cache.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("store_segments k", k, 3)
    num_tokens, num_kv_heads, dim = k.shape
    expect("store_segments v", v, (num_tokens, num_kv_heads * dim))
    expect("store_segments positions", positions, (num_tokens,), np.int32)
    segments.check("store_segments", num_tokens)
    longest, count = segments.longest, len(segments.counts)
    launch = Launch(
        items=1,
        grid=(blocks(longest * num_kv_heads, cache_rows.THREADS // WARP), count, 1),
        block=(cache_rows.THREADS, 1, 1),
        extents=(num_kv_heads, dim),
        early=True,
    )
    kernel = gpu_kernel(Unit(cache_rows.SOURCE, "store_kv_segments", ()))
    stream.launch(kernel, launch, k, v, positions, segments.table)
    if index_keys is None:
        return
    expect("store_segments index_keys", index_keys, (num_tokens, index_keys.shape[1]))
    width = index_keys.shape[1]
    launch = Launch(
        items=1,
        grid=(longest, blocks(width, STORED_AT_ONCE), count),
        block=(cache_rows.THREADS, 1, 1),
        extents=(width,),
        early=True,
    )
    kernel = gpu_kernel(Unit(cache_rows.SOURCE, "store_rows_segments", ()))
    stream.launch(kernel, launch, index_keys, positions, segments.table)


def pool_segments(
    stream: Stream,
    segments: Segments,
    positions: Tensor,
    ratio: int,
    weight: Tensor,
    rope: Tensor,
    eps: float,
) -> None:
    """Enqueue ``pool_index_blocks`` of every segment in its cache.

    Args:
        stream: enqueues here.
        segments: of a layer with a cache.
        positions: int32 [T].
        ratio: positions per block, at least 1.
        weight: norm weight, float32 [dim].
        rope: rope_table, float32 [>= context, rotary_dim / 2, 2].
        eps: added to the mean square.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    dim = weight.size
    expect("pool_segments positions", positions, (positions.size,), np.int32)
    expect("pool_segments rope", rope, (rope.shape[0], min(dim // 2, rope.shape[1]), 2))
    segments.check("pool_segments", positions.size)
    per_block = indexer.THREADS // 16
    launch = Launch(
        items=1,
        grid=(blocks(segments.longest, per_block), len(segments.counts), 1),
        block=(indexer.THREADS, 1, 1),
        shared_bytes=4 * dim * per_block,
        extents=(dim, rope.shape[1]),
        early=True,
    )
    kernel = gpu_kernel(Unit(indexer.SOURCE, "pool_index_blocks_segments", ()))
    stream.launch(kernel, launch, segments.table, positions, ratio, weight, rope, eps)


def select_segments(
    stream: Stream,
    queries: Tensor,
    segments: Segments,
    positions: Tensor,
    ratio: int,
    scores: Tensor,
    selected: Tensor,
    num_selected: Tensor,
) -> None:
    """Enqueue ``select_blocks`` of every segment from its cache.

    Args:
        stream: enqueues here.
        queries: float32 [T, heads, dim], dim at most 128.
        segments: of a layer with a cache; each has no more rows than scores.
        positions: int32 [T].
        ratio: positions per block, at least 1.
        scores: scratch, float32 [rows, blocks]; blocks of every position must fit.
        selected: int32 [T, budget], overwritten.
        num_selected: int32 [T], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("select_segments queries", queries, 3)
    expect_rank("select_segments scores", scores, 2)
    expect_rank("select_segments selected", selected, 2)
    num_tokens, num_heads, dim = queries.shape
    (rows, num_blocks), budget = scores.shape, selected.shape[1]
    expect("select_segments positions", positions, (num_tokens,), np.int32)
    expect("select_segments selected", selected, (num_tokens, budget), np.int32)
    expect("select_segments num_selected", num_selected, (num_tokens,), np.int32)
    segments.check("select_segments", num_tokens)
    quads, first = blocks(dim, 64), 0
    kernel = gpu_kernel(Unit(indexer.SOURCE, f"score_tiles_segments<{num_heads}, {quads}>", ()))
    for part in _parts(segments, rows):
        tiles, last = blocks(part.longest, indexer.TILE_TOKENS), first + sum(part.counts)
        wanted = blocks(indexer.THREAD_BLOCKS, tiles * len(part.counts))
        launch = Launch(
            items=1,
            grid=(min(blocks(num_blocks, indexer.TILE_KEYS), wanted), tiles, len(part.counts)),
            block=(indexer.THREADS, 1, 1),
            shared_bytes=indexer.tile_shared_bytes(num_heads, quads),
            extents=(first, num_blocks, dim),
            early=True,
        )
        stream.launch(kernel, launch, queries, part.table, positions, ratio, budget, scores)
        indexer.select_scored(
            stream,
            scores,
            positions.rows(first, last),
            ratio,
            selected.rows(first, last),
            num_selected.rows(first, last),
        )
        first = last


def can_select_segments(dim: int, rows: int, segments: Segments) -> bool:
    """Whether ``select_segments`` takes index heads so wide, and so many rows of scores."""
    return dim <= indexer.TILED_DIM and segments.longest <= rows


def _parts(segments: Segments, most_rows: int) -> list[Segments]:
    """Runs of segments of at most so many rows together."""
    parts, start, rows = [], 0, 0
    for index, count in enumerate(segments.counts):
        if index > start and rows + count > most_rows:
            parts.append((start, index))
            start, rows = index, 0
        rows += count
    parts.append((start, len(segments.counts)))
    return [Segments(segments.table.rows(a, b), segments.counts[a:b]) for a, b in parts]


def can_attend_segments(plan: AttendPlan, counts: tuple[int, ...], reach: int) -> bool:
    """Whether tiles of all segments are done before the segments one after the other would be.

    They are where they fill a GPU without being cut, and where one of them, which goes through all
    positions, takes less time than that many launches.

    Args:
        plan: of all rows.
        counts: rows of each segment.
        reach: positions, at most, that a row sees.
    """
    is_short = PART_US * blocks(reach, PART_POSITIONS) <= SEGMENT_US * len(counts)
    return is_short or plan.num_tile_blocks(counts) >= ENOUGH_BLOCKS


def attend_segments(
    stream: Stream,
    q: Tensor,
    gate_src: Tensor,
    segments: Segments,
    positions: Tensor,
    selected: Tensor,
    num_selected: Tensor,
    plan: AttendPlan,
    out: Tensor,
) -> None:
    """Enqueue ``attend`` of every segment over its cache.

    Args:
        stream: enqueues here.
        q: float32 [T, H, dim].
        gate_src: float32 [T, H, 2 * dim].
        segments: of a layer with a cache.
        positions: int32 [T].
        selected: int32 [T, budget]; not read when the ratio is 0.
        num_selected: int32 [T]; not read when the ratio is 0.
        plan: of all rows.
        out: float32 [T, H * dim], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("attend_segments q", q, 3)
    num_tokens, num_heads, dim = q.shape
    expect("attend_segments gate_src", gate_src, (num_tokens, num_heads, 2 * dim))
    expect("attend_segments positions", positions, (num_tokens,), np.int32)
    expect("attend_segments selected", selected, (num_tokens, plan.budget), np.int32)
    expect("attend_segments num_selected", num_selected, (num_tokens,), np.int32)
    expect("attend_segments out", out, (num_tokens, num_heads * dim))
    segments.check("attend_segments", num_tokens)
    tile = plan.tile
    function = f"attend_segments<{plan.padded_dim}, {tile.warps}, {tile.stages}>"
    stream.launch(
        gpu_kernel(Unit(ATTENTION_SOURCE, function, ())),
        plan.segments(segments.counts),
        q,
        gate_src,
        segments.table,
        positions,
        selected,
        num_selected,
        plan.ratio,
        out,
    )
