"""Launches over the caches of all segments: each covers the rows that it is said to."""

from __future__ import annotations

from itertools import accumulate, count
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from strata_cli.engine.device.base import Home, Kernel, KernelArgument, Launch, Stream, Tensor
from strata_cli.engine.device.paper import PaperBuffer
from strata_cli.engine.kernels import cache_rows, indexer
from strata_cli.engine.kernels.cache_segments import (
    STORED_AT_ONCE,
    pool_segments,
    select_segments,
    store_segments,
)
from strata_cli.engine.kernels.products import WARP
from strata_cli.engine.kernels.segments import SEGMENT_WORDS, Segments

COUNTS = (3, 9, 40, 2, 5)
NUM = sum(COUNTS)
PARTS = ((3, 9), (40, 2), (5,))  # of at most 45 rows
HEADS, DIM, RATIO = 2, 32, 4


class Asked(NamedTuple):
    """A launch."""

    launch: Launch
    tensors: list[Tensor]


class PaperStream:
    """Keeps what is launched."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def launch(self, _kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        self.asked.append(Asked(launch, [each for each in args if isinstance(each, Tensor)]))


NUMBERS = count(1)


def paper(*shape: int, dtype: type = np.float32) -> Tensor:
    """Each lies elsewhere."""
    return Tensor.over(PaperBuffer(Home.DEVICE, 1 << 20, next(NUMBERS) << 40), shape, dtype)


@pytest.fixture
def segments() -> Segments:
    return Segments(paper(len(COUNTS), SEGMENT_WORDS, dtype=np.int64), COUNTS)


def test_selection_goes_through_all_segments_in_parts_that_fit(segments: Segments) -> None:
    stream = PaperStream()
    positions, num_selected = (paper(NUM, dtype=np.int32) for _ in range(2))
    selected, scores = paper(NUM, 8, dtype=np.int32), paper(45, 100)
    queries = paper(NUM, HEADS, DIM)
    chosen = (scores, selected, num_selected)
    select_segments(cast(Stream, stream), queries, segments, positions, RATIO, *chosen)
    assert len(stream.asked) == 2 * len(PARTS)
    stops = [*accumulate(map(sum, PARTS))]
    for number, (part, stop) in enumerate(zip(PARTS, stops, strict=True)):
        score, select = stream.asked[2 * number : 2 * number + 2]
        first, at = stop - sum(part), sum(map(len, PARTS[:number]))
        assert score.launch.extents == (first, 100, DIM)
        assert score.launch.grid[2] == len(part)
        assert score.launch.grid[1] * indexer.TILE_TOKENS >= max(part)
        own = segments.table.rows(at, at + len(part))
        assert places(score) == places_of(queries, own, positions, scores)
        rows = [each.rows(first, stop) for each in (positions, selected, num_selected)]
        assert places(select) == places_of(scores, *rows)
        assert select.launch.grid == (sum(part), 1, 1)


def test_rows_of_the_longest_segment_are_stored_and_pooled(segments: Segments) -> None:
    stream: Any = PaperStream()
    positions, k, v = paper(NUM, dtype=np.int32), paper(NUM, HEADS, DIM), paper(NUM, HEADS * DIM)
    width = STORED_AT_ONCE + 4
    store_segments(stream, k, v, paper(NUM, width), positions, segments)
    pool_segments(stream, segments, positions, RATIO, paper(DIM), paper(99, DIM // 2, 2), 1e-6)
    kv, keys, pool = (each.launch.grid for each in stream.asked)
    heads_per_block = cache_rows.THREADS // WARP
    assert 0 <= kv[0] * heads_per_block - 40 * HEADS < heads_per_block
    assert kv[1:] == (len(COUNTS), 1)
    assert keys == (40, 2, len(COUNTS))
    assert 0 <= pool[0] * (indexer.THREADS // 16) - 40 < indexer.THREADS // 16
    assert pool[1:] == (len(COUNTS), 1)


def places(asked: Asked) -> list[tuple[int, tuple[int, ...]]]:
    return places_of(*asked.tensors)


def places_of(*tensors: Tensor) -> list[tuple[int, tuple[int, ...]]]:
    return [(each.address, each.shape) for each in tensors]
