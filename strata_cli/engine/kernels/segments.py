"""Kernels that take all segments of a pass in one launch, for a GPU. Bits are those of one by one.

A segment is consecutive rows of one sequence, or of a branch of it. What differs from segment to
segment, its rows and where its state lies, is in a table in device memory: segments.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Launch, Stream, Tensor
from strata_cli.engine.kernels import delta_rule, gdn, indexer, ngram
from strata_cli.engine.kernels.attention import THREADS as STORE_THREADS
from strata_cli.engine.kernels.attention_plan import ENOUGH_BLOCKS, AttendPlan
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import WARP, Unit
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank

SEGMENT_WORDS = 12  # int64 each, of a segment in a layer's table
STORED_AT_ONCE = 4 * STORE_THREADS  # floats of a row that a thread block stores


class Segments(NamedTuple):
    """The segments of a pass, as one layer sees them.

    Attributes:
        table: int64 [S, SEGMENT_WORDS].
        counts: rows of each segment; together all rows of the pass, in order.
        are_steps: each segment is one token of a sequence that goes on by it.
    """

    table: Tensor
    counts: tuple[int, ...]
    are_steps: bool = False

    @property
    def longest(self) -> int:
        """Most rows of a segment."""
        return max(self.counts)

    def check(self, name: str, num_rows: int) -> None:
        """Refuse a table of other segments, or rows that are not theirs.

        Raises:
            ShapeError: it is, or they are.
        """
        expect(f"{name} segments", self.table, (len(self.counts), SEGMENT_WORDS), np.int64)
        assert sum(self.counts) == num_rows, f"{name}: {num_rows} rows of {sum(self.counts)}"


def conv_segments(
    stream: Stream, u: Tensor, segments: Segments, weight: Tensor, out: Tensor
) -> None:
    """Enqueue ``causal_conv_silu`` of every segment, with its running state's first part.

    Args:
        stream: enqueues here.
        u: float32 [T, channels].
        segments: of a layer with a running state.
        weight: taps, oldest first, float32 [channels, K].
        out: float32 [T, channels], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("conv_segments u", u, 2)
    expect_rank("conv_segments weight", weight, 2)
    (num_tokens, channels), num_taps = u.shape, weight.shape[1]
    expect("conv_segments weight", weight, (channels, num_taps))
    expect("conv_segments out", out, u.shape)
    segments.check("conv_segments", num_tokens)
    run = max(gdn.RUN_TOKENS, num_taps - 1)
    launch = Launch(
        items=1,
        grid=(blocks(channels, gdn.THREADS), blocks(segments.longest, run), len(segments.counts)),
        block=(gdn.THREADS, 1, 1),
        extents=(channels, run),
        early=True,
    )
    kernel = gpu_kernel(Unit(gdn.SOURCE, f"causal_conv_silu_segments<{num_taps}>", ()))
    stream.launch(kernel, launch, u, segments.table, weight, out)


def delta_rule_segments(
    stream: Stream,
    c: Tensor,
    alpha: Tensor,
    beta: Tensor,
    a: Tensor,
    dt: Tensor,
    segments: Segments,
    out: Tensor,
    num_key_heads: int,
    eps: float,
) -> None:
    """Enqueue ``delta_rule`` of every segment, with its running state's second part.

    Running states of steps begin at multiples of 16 bytes.

    Args:
        stream: enqueues here.
        c: float32 [T, 2 kd + vd]; used up.
        alpha: float32 [T, nv]; used up.
        beta: float32 [T, nv]; used up.
        a: float32 [nv].
        dt: float32 [nv].
        segments: of a layer with a running state.
        out: float32 [T, nv * dim], overwritten.
        num_key_heads: nk.
        eps: added to the sum of squares.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("delta_rule_segments alpha", alpha, 2)
    expect_rank("delta_rule_segments out", out, 2)
    num_tokens, num_values = alpha.shape
    dim = out.shape[1] // num_values
    expect("delta_rule_segments out", out, (num_tokens, num_values * dim))
    expect("delta_rule_segments c", c, (num_tokens, (2 * num_key_heads + num_values) * dim))
    expect("delta_rule_segments beta", beta, alpha.shape)
    expect("delta_rule_segments a", a, (num_values,))
    expect("delta_rule_segments dt", dt, (num_values,))
    segments.check("delta_rule_segments", num_tokens)
    rows = (c, alpha, beta, a, dt, segments.table, out)
    if segments.are_steps and delta_rule.can_step(dim, c, out):
        launch = Launch(
            items=1,
            grid=(dim // delta_rule.STEP_COLUMNS, num_values, num_tokens),
            block=(delta_rule.STEP_THREADS, 1, 1),
            extents=(num_key_heads, num_values),
            early=True,
        )
        kernel = gpu_kernel(
            Unit(delta_rule.SOURCE, f"delta_step_segments<{dim // delta_rule.SLICES}>", ())
        )
        stream.launch(kernel, launch, *rows, eps)
        return
    delta_rule.prepare_delta_rule(stream, c, alpha, beta, a, dt, num_key_heads, dim, eps)
    shape = delta_rule.DeltaRuleShape.of(delta_rule.STEPS, dim)
    launch = Launch(
        items=1,
        grid=(blocks(dim, shape.block_columns), num_values, len(segments.counts)),
        block=(WARP * shape.warps, 1, 1),
        shared_bytes=shape.shared_bytes,
        extents=(num_key_heads, num_values, dim),
        early=True,
    )
    function = f"delta_rule_segments<{shape.keys}, {shape.warps}>"
    kernel = gpu_kernel(Unit(delta_rule.SOURCE, function, ()))
    stream.launch(kernel, launch, c, alpha, beta, segments.table, out)


def ngram_rows_segments(
    stream: Stream,
    ids: Tensor,
    segments: Segments,
    multipliers: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    eos_token_id: int,
    rows_out: Tensor,
) -> None:
    """Enqueue ``ngram_rows`` of every segment, with its running state's first part.

    Args:
        stream: enqueues here.
        ids: int32 [T].
        segments: of the n-gram embedding.
        multipliers: int64 [max_n].
        offsets: int64 [H].
        sizes: int64 [H].
        eos_token_id: the id that cuts n-grams.
        rows_out: int64 [T, H], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    look_back, num_heads = multipliers.size - 1, offsets.size
    expect("ngram_rows_segments ids", ids, (ids.size,), np.int32)
    for name, numbers in (("offsets", offsets), ("sizes", sizes)):
        expect(f"ngram_rows_segments {name}", numbers, (num_heads,), np.int64)
    expect("ngram_rows_segments multipliers", multipliers, (look_back + 1,), np.int64)
    expect("ngram_rows_segments rows_out", rows_out, (ids.size, num_heads), np.int64)
    segments.check("ngram_rows_segments", ids.size)
    launch = Launch(
        items=1,
        grid=(blocks(segments.longest, ngram.THREADS), len(segments.counts), 1),
        block=(ngram.THREADS, 1, 1),
        extents=(look_back, num_heads),
        early=True,
    )
    hashes = (multipliers, offsets, sizes, eos_token_id)
    kernel = gpu_kernel(Unit(ngram.SOURCE, "ngram_rows_segments", ()))
    stream.launch(kernel, launch, ids, segments.table, *hashes, rows_out)


def ngram_conv_segments(
    stream: Stream,
    gated: Tensor,
    w_conv: Tensor,
    segments: Segments,
    weight: Tensor,
    dilation: int,
    eps: float,
    x: Tensor,
) -> None:
    """Enqueue ``ngram_conv`` of every segment, with its running state's second part.

    Args:
        stream: enqueues here.
        gated: float32 [T, S * D].
        w_conv: norm weight, float32 [S * D].
        segments: of the n-gram embedding.
        weight: taps, oldest first, float32 [S * D, K].
        dilation: tokens from one tap to the next, at least 1.
        eps: added to the mean square.
        x: residual streams, float32 [T, S, D], in place.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("ngram_conv_segments x", x, 3)
    expect_rank("ngram_conv_segments weight", weight, 2)
    num_tokens, num_streams, size = x.shape
    channels, num_taps = num_streams * size, weight.shape[1]
    expect("ngram_conv_segments gated", gated, (num_tokens, channels))
    expect("ngram_conv_segments w_conv", w_conv, (channels,))
    expect("ngram_conv_segments weight", weight, (channels, num_taps))
    segments.check("ngram_conv_segments", num_tokens)
    past = (num_taps - 1) * dilation
    run = max(ngram.RUN_TOKENS, past)
    launch = Launch(
        items=1,
        grid=(num_streams, blocks(segments.longest, run), len(segments.counts)),
        block=(ngram.THREADS, 1, 1),
        shared_bytes=4 * (run + past),
        extents=(num_streams, size, num_taps, run),
        early=True,
    )
    kernel = gpu_kernel(Unit(ngram.SOURCE, "ngram_conv_segments", ()))
    stream.launch(kernel, launch, gated, w_conv, segments.table, weight, dilation, eps, x)


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
        grid=(blocks(longest * num_kv_heads, STORE_THREADS // WARP), count, 1),
        block=(STORE_THREADS, 1, 1),
        extents=(num_kv_heads, dim),
        early=True,
    )
    kernel = gpu_kernel(Unit("attention.cu", "store_kv_segments", ()))
    stream.launch(kernel, launch, k, v, positions, segments.table)
    if index_keys is None:
        return
    expect("store_segments index_keys", index_keys, (num_tokens, index_keys.shape[1]))
    width = index_keys.shape[1]
    launch = Launch(
        items=1,
        grid=(longest, blocks(width, STORED_AT_ONCE), count),
        block=(STORE_THREADS, 1, 1),
        extents=(width,),
        early=True,
    )
    kernel = gpu_kernel(Unit("attention.cu", "store_rows_segments", ()))
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


def can_attend_segments(plan: AttendPlan, counts: tuple[int, ...]) -> bool:
    """Whether the tiles of so many rows fill a GPU without being cut.

    Args:
        plan: of all rows.
        counts: rows of each segment.
    """
    return plan.num_tile_blocks(counts) >= ENOUGH_BLOCKS


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
        gpu_kernel(Unit("attention.cu", function, ())),
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
