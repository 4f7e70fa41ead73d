"""QSA's block indexer: pooled keys of complete blocks, and the best blocks for each query.

Source: qwen4exp QSA. A block is ratio consecutive positions and competes once all of them exist;
its key is the mean of their raw keys, normalised, then turned to the block's first position.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import inline_jit, nogil_jit
from strata_cli.engine.kernels.math32 import float_from_bits
from strata_cli.engine.kernels.reduce import dot16, rms_scale
from strata_cli.engine.kernels.rope import turn_reference, turn_row
from strata_cli.engine.kernels.rows import (
    add_row,
    clear_row,
    compile_small,
    multiply_row,
    scale_row,
)
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.errors import ShapeError

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
F32 = np.float32
SOURCE = "indexer.cu"
THREADS = 128  # per block on a GPU
SCORED_PER_BLOCK = 32  # index blocks that a GPU's thread block scores, where tokens are few
TILED_TOKENS = 16  # at least so many share the loads of keys
TILED_DIM = 128  # at most so wide
TILE_TOKENS, TILE_KEYS = 8, 64  # of a thread block that does
THREAD_BLOCKS = 512  # enough to fill a GPU
STAGED_SCORES = 9_500  # of a token, that fit a GPU's shared memory everywhere


def pool_index_blocks(
    stream: Stream,
    raw_keys: Tensor,
    positions: Tensor,
    ratio: int,
    weight: Tensor,
    rope: Tensor,
    eps: float,
    pooled: Tensor,
) -> None:
    """Compute the key of every block that one of T tokens completes. Other blocks stay.

    Args:
        stream: enqueues here.
        raw_keys: index keys of all positions so far, float32 [context, dim].
        positions: int32 [T].
        ratio: positions per block, at least 1.
        weight: norm weight, float32 [dim].
        rope: rope_table, float32 [>= context, rotary_dim / 2, 2].
        eps: added to the mean square.
        pooled: float32 [context / ratio, dim], the completed blocks' rows are overwritten.

    Raises:
        ShapeError: an argument has another shape or type, or ratio is not positive.
    """
    expect_rank("pool_index_blocks raw_keys", raw_keys, 2)
    expect_rank("pool_index_blocks positions", positions, 1)
    expect_rank("pool_index_blocks rope", rope, 3)
    _expect_positive("pool_index_blocks ratio", ratio)
    context, dim = raw_keys.shape
    expect("pool_index_blocks raw_keys", raw_keys, (context, dim))
    expect("pool_index_blocks positions", positions, positions.shape, np.int32)
    expect("pool_index_blocks weight", weight, (dim,))
    expect("pool_index_blocks rope", rope, (rope.shape[0], min(dim // 2, rope.shape[1]), 2))
    expect("pool_index_blocks pooled", pooled, (context // ratio, dim))
    num_tokens = positions.shape[0]
    launch = Launch(
        items=num_tokens,
        grain=grain(dim),
        grid=(blocks(num_tokens, THREADS // 16), 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=4 * dim * (THREADS // 16),
        extents=(num_tokens, dim, rope.shape[1]),
        early=True,
    )
    stream.launch(POOL_INDEX_BLOCKS, launch, raw_keys, positions, ratio, weight, rope, eps, pooled)


def select_blocks(
    stream: Stream,
    queries: Tensor,
    pooled: Tensor,
    positions: Tensor,
    ratio: int,
    scores: Tensor,
    selected: Tensor,
    num_selected: Tensor,
) -> None:
    """Choose the best complete blocks for each token's query; equal scores: the lower block.

    A block's score is the sum over heads, in order, of relu(query . key).

    Args:
        stream: enqueues here.
        queries: float32 [T, heads, dim].
        pooled: keys of complete blocks, float32 [blocks, dim].
        positions: int32 [T]; (position + 1) // ratio blocks compete.
        ratio: positions per block, at least 1.
        scores: scratch, float32 [rows, blocks]; so many tokens are scored at a time.
        selected: int32 [T, budget], overwritten: ascending block ids, the rest -1. At most budget
            blocks are kept per token.
        num_selected: int32 [T], overwritten.

    Raises:
        ShapeError: an argument has another shape or type, or ratio, budget or rows is not positive.
    """
    expect_rank("select_blocks queries", queries, 3)
    expect_rank("select_blocks pooled", pooled, 2)
    _expect_positive("select_blocks ratio", ratio)
    expect_rank("select_blocks scores", scores, 2)
    expect_rank("select_blocks selected", selected, 2)
    num_tokens, num_heads, dim = queries.shape
    _expect_positive("select_blocks budget", selected.shape[1])
    _expect_positive("select_blocks rows of scores", scores.shape[0])
    expect("select_blocks queries", queries, (num_tokens, num_heads, dim))
    expect("select_blocks pooled", pooled, (pooled.shape[0], dim))
    expect("select_blocks positions", positions, (num_tokens,), np.int32)
    expect("select_blocks scores", scores, (scores.shape[0], pooled.shape[0]))
    expect("select_blocks selected", selected, (num_tokens, selected.shape[1]), np.int32)
    expect("select_blocks num_selected", num_selected, (num_tokens,), np.int32)
    for first in range(0, num_tokens, scores.shape[0]):
        last = min(first + scores.shape[0], num_tokens)
        own = positions.rows(first, last)
        budget = selected.shape[1]
        _score(stream, queries.rows(first, last), pooled, own, ratio, budget, scores)
        select_scored(
            stream, scores, own, ratio, selected.rows(first, last), num_selected.rows(first, last)
        )


def _score(
    stream: Stream,
    queries: Tensor,
    pooled: Tensor,
    positions: Tensor,
    ratio: int,
    budget: int,
    scores: Tensor,
) -> None:
    num_tokens, num_heads, dim = queries.shape
    num_blocks = pooled.shape[0]
    arguments = (queries, pooled, positions, ratio, budget, scores)
    if stream.shared_bytes and num_tokens >= TILED_TOKENS and dim <= TILED_DIM:
        quads, tiles = blocks(dim, 64), blocks(num_tokens, TILE_TOKENS)
        share = min(blocks(num_blocks, TILE_KEYS), blocks(THREAD_BLOCKS, tiles))
        tiled = Launch(
            items=1,
            grid=(share, tiles, 1),
            block=(THREADS, 1, 1),
            shared_bytes=tile_shared_bytes(num_heads, quads),
            extents=(num_blocks, dim, num_tokens),
            early=True,
        )
        stream.launch(_score_tiles_kernel(num_heads, quads), tiled, *arguments)
        return
    share = min(blocks(num_blocks, SCORED_PER_BLOCK), blocks(THREAD_BLOCKS, num_tokens))
    launch = Launch(
        items=num_tokens,
        grain=grain(num_blocks * dim),
        grid=(share, num_tokens, 1),
        block=(THREADS, 1, 1),
        shared_bytes=4 * num_heads * dim,
        extents=(num_blocks, dim),
        early=True,
    )
    stream.launch(_score_blocks_kernel(num_heads), launch, *arguments)


def tile_shared_bytes(num_heads: int, quads: int) -> int:
    """Shared memory of a tile of queries and keys, of so many times 64 columns."""
    return 16 * (16 * quads + 1) * (num_heads * TILE_TOKENS + TILE_KEYS)


def select_scored(
    stream: Stream,
    scores: Tensor,
    positions: Tensor,
    ratio: int,
    selected: Tensor,
    num_selected: Tensor,
) -> None:
    """The second half of ``select_blocks``: tokens [T] whose scores are rows of [>= T, blocks]."""
    num_tokens, num_blocks = positions.shape[0], scores.shape[1]
    staged = min(num_blocks, STAGED_SCORES)
    launch = Launch(
        items=num_tokens,
        grain=grain(num_blocks),
        grid=(num_tokens, 1, 1),
        block=(1024 if num_tokens < 64 else 256, 1, 1),
        shared_bytes=4 * staged,
        extents=(num_blocks, selected.shape[1], staged),
        early=True,
    )
    stream.launch(SELECT_BLOCKS, launch, scores, positions, ratio, selected, num_selected)


def _expect_positive(name: str, value: int) -> None:
    if value < 1:
        raise ShapeError(f"{name}: expected at least 1, got {value}")


@nogil_jit
def _pool_index_blocks(
    begin: int,
    end: int,
    raw_keys: Floats,
    positions: Ints,
    ratio: int,
    weight: Floats,
    rope: Floats,
    eps: float,
    pooled: Floats,
) -> None:
    """Items: tokens. A block is completed by one token, so no two items write the same row."""
    dim = raw_keys.shape[1]
    mean = np.empty(dim, F32)
    compile_small()
    for token in range(begin, end):
        past_end = positions[token] + 1
        if past_end % ratio == 0:
            block = past_end // ratio - 1
            clear_row(mean, 0, dim)
            for position in range(block * ratio, past_end):
                add_row(mean, 0, raw_keys, position * dim, dim)
            scale_row(mean, 0, mean, 0, F32(1.0) / F32(ratio), dim)
            scale_row(pooled, block * dim, mean, 0, rms_scale(mean, 0, dim, eps), dim)
            multiply_row(pooled, block * dim, weight, 0, dim)
            turn_row(pooled, block, rope, block * ratio)


@inline_jit
def _kth_largest(scores: Floats, row: int, count: int, k: int) -> np.float32:
    """The k-th largest of a row's first count scores, none negative, found bit by bit.

    The bits of floats that are not negative order as the floats do.
    """
    compile_small()
    bits = np.int32(0)
    for digit in range(30, -1, -1):
        candidate = np.int32(bits | np.int32(1 << digit))
        threshold = float_from_bits(candidate)
        at_least = np.int32(0)
        for index in range(count):
            at_least += np.int32(scores[row, index] >= threshold)
        if at_least >= k:
            bits = candidate
    return F32(float_from_bits(bits))


@nogil_jit
def _score_blocks(
    begin: int,
    end: int,
    queries: Floats,
    pooled: Floats,
    positions: Ints,
    ratio: int,
    budget: int,
    scores: Floats,
) -> None:
    """Items: tokens. Where all blocks fit the budget they get the same score."""
    num_heads, dim = queries.shape[1], queries.shape[2]
    compile_small()
    for token in range(begin, end):
        complete = (positions[token] + 1) // ratio
        clear_row(scores, token * scores.shape[1], complete)
        for block in range(complete if complete > budget else 0):
            for head in range(token * num_heads, (token + 1) * num_heads):
                product = dot16(queries, head * dim, pooled, block * dim, dim)
                if product > F32(0.0):
                    scores[token, block] += product


@nogil_jit
def _select_blocks(
    begin: int,
    end: int,
    scores: Floats,
    positions: Ints,
    ratio: int,
    selected: Ints,
    num_selected: Ints,
) -> None:
    """Items: tokens. Where all blocks fit they have the same score, and are all kept as ties."""
    budget = selected.shape[1]
    compile_small()
    for token in range(begin, end):
        complete = (positions[token] + 1) // ratio
        threshold, ties = F32(0.0), budget
        if complete > budget:
            threshold = _kth_largest(scores, token, complete, budget)
            for block in range(complete):
                ties -= scores[token, block] > threshold
        kept = 0
        for block in range(complete):
            is_tie = scores[token, block] == threshold
            if scores[token, block] > threshold or (is_tie and ties > 0):
                ties -= is_tie
                selected[token, kept] = block
                kept += 1
        num_selected[token] = kept
        for rest in range(kept, budget):
            selected[token, rest] = -1


def pool_index_blocks_reference(
    raw_keys: Floats,
    positions: Ints,
    ratio: int,
    weight: Floats,
    rope: Floats,
    eps: float,
    pooled: Floats,
) -> Floats:
    """pool_index_blocks in plain numpy: the new pooled."""
    new = pooled.copy()
    for last in positions[(positions + 1) % ratio == 0]:
        first = last + 1 - ratio
        mean = raw_keys[first : last + 1].astype(np.float64).mean(axis=0)
        normed = mean / np.sqrt(np.mean(mean**2) + eps) * weight
        new[first // ratio] = turn_reference(normed[None], rope, np.array([first], np.int32))[0]
    return new


def select_blocks_reference(
    queries: Floats, pooled: Floats, positions: Ints, ratio: int, budget_blocks: int
) -> tuple[Ints, Ints]:
    """select_blocks in plain numpy: (selected, num_selected)."""
    selected = np.full((len(queries), budget_blocks), -1, np.int32)
    num_selected = np.zeros(len(queries), np.int32)
    for token, position in enumerate(positions):
        keys = pooled[: (position + 1) // ratio].astype(np.float64)
        scores = np.maximum(queries[token].astype(np.float64) @ keys.T, 0.0).sum(axis=0)
        best = np.sort(np.argsort(-scores, kind="stable")[:budget_blocks])
        selected[token, : len(best)] = best
        num_selected[token] = len(best)
    return selected, num_selected


@cache
def _score_blocks_kernel(num_heads: int) -> Kernel:
    function = f"score_blocks<{num_heads}>"
    return Kernel(function, _score_blocks, select_blocks_reference, SOURCE, function)


@cache
def _score_tiles_kernel(num_heads: int, quads: int) -> Kernel:
    function = f"score_tiles<{num_heads}, {quads}>"
    return Kernel(function, _score_blocks, select_blocks_reference, SOURCE, function)


POOL_INDEX_BLOCKS = Kernel(
    "pool_index_blocks", _pool_index_blocks, pool_index_blocks_reference, SOURCE
)
SELECT_BLOCKS = Kernel("select_blocks", _select_blocks, select_blocks_reference, SOURCE)
