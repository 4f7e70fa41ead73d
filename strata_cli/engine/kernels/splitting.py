"""Which pairs of a window the device computes, which the host's processor, and which nobody.

T tokens, E experts, k experts per token, P = T * k pairs. An expert is a hit if its blob lies in a
slot of the device's memory, else a miss. Source of the rules: Strata's plan of a decode window.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import inline_jit, nogil_jit
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.errors import ShapeError

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
I32 = np.int32

SHARES = 1024  # a share of misses is a whole number of such parts
EXTRA_PLACES = 2  # behind the experts: pairs of the host's processor, then those left out
MOST_PAIRS = 1024
THREADS = 128


class SlotRange(NamedTuple):
    """Where slots are: addresses from first up to, not including, end."""

    first: int
    end: int


class PlaceCounts(NamedTuple):
    """Distinct experts that the host's processor computes, and that are left out."""

    hosts: int
    dropped: int


def split_pairs(
    stream: Stream,
    ids: Tensor,
    blobs: Tensor,
    link_share: Tensor,
    slots: SlotRange,
    least_dropped: int,
    places: Tensor,
) -> None:
    """Give each pair of a token and an expert its place among those sorted by who computes them.

    A miss that every token ranks at ``least_dropped`` or later is left out. Of the other distinct
    misses, in the order in which tokens and ranks first name them, the first ones, as many as the
    share says, are read by the device, and the last ones go to the host's processor. What ranks
    first is what is foreseen best: much of it is on its way already.

    Args:
        stream: enqueues here.
        ids: experts of each token, best first, int32 [T, k], each in 0..E-1.
        blobs: where the device finds each expert, int64 [E].
        link_share: parts, of SHARES, of the misses that the device reads: int32 [1].
        slots: where hits are.
        least_dropped: a rank, from 0; k: nothing is left out.
        places: int32 [T, k], overwritten: an id where the device computes the pair, E where the
            host's processor does, E + 1 where nobody does.

    Raises:
        ShapeError: an argument has another shape or type, or there are more than MOST_PAIRS pairs.
    """
    expect_rank("split_pairs ids", ids, 2)
    expect_rank("split_pairs blobs", blobs, 1)
    expect("split_pairs ids", ids, ids.shape, I32)
    expect("split_pairs blobs", blobs, blobs.shape, np.int64)
    expect("split_pairs link_share", link_share, (1,), I32)
    expect("split_pairs places", places, ids.shape, I32)
    if ids.size > MOST_PAIRS:
        raise ShapeError(f"split_pairs: {ids.size} pairs, at most {MOST_PAIRS}")
    launch = Launch(
        items=1 if ids.size else 0,
        grid=(1, 1, 1),
        block=(32 * blocks(ids.size, 32), 1, 1),
        shared_bytes=8 * ids.size,
        extents=(ids.size, ids.shape[1], blobs.size),
        early=True,
    )
    stream.launch(
        SPLIT_PAIRS, launch, ids, blobs, link_share, slots.first, slots.end, least_dropped, places
    )


def count_places(
    ids: Ints, blobs: Longs, link_share: int, slots: SlotRange, least_dropped: int
) -> PlaceCounts:
    """Distinct experts that split_pairs places elsewhere in the layers of a window, on the host.

    Args:
        ids: experts of each layer's tokens, [L, T, k].
        blobs: where the device finds each layer's experts, [L, E].
        link_share: as of split_pairs.
        slots: as of split_pairs.
        least_dropped: as of split_pairs.
    """
    counts, share = np.zeros(2, np.int64), np.array([link_share], I32)
    places = np.empty(ids.shape[1:], I32)
    _count_places(ids, blobs, share, slots.first, slots.end, least_dropped, places, counts)
    return PlaceCounts(int(counts[0]), int(counts[1]))


def clear_rows(stream: Stream, bounds: Tensor, rows: Tensor) -> None:
    """Make rows zero.

    Args:
        stream: enqueues here.
        bounds: first of them and end, at most P: int32 [2].
        rows: float32 [P, D], overwritten there.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("clear_rows rows", rows, 2)
    expect("clear_rows rows", rows, rows.shape)
    expect("clear_rows bounds", bounds, (2,), I32)
    count, size = rows.shape
    launch = Launch(
        items=count,
        grain=grain(size),
        grid=(count, blocks(size, 4 * THREADS), 1),
        block=(THREADS, 1, 1),
        extents=(size,),
        early=True,
    )
    stream.launch(CLEAR_ROWS, launch, bounds, rows)


@inline_jit
def _best_rank(ids: Ints, expert: int) -> int:
    best: int = ids.shape[1]
    for token in range(ids.shape[0]):
        for rank in range(best):
            if ids[token, rank] == expert:
                best = rank
                break
    return best


@inline_jit
def _is_first(ids: Ints, token: int, rank: int) -> bool:
    """Whether no token before this one has the pair's expert."""
    for other in range(token):
        for at in range(ids.shape[1]):
            if ids[other, at] == ids[token, rank]:
                return False
    return True


@inline_jit
def _place(ids: Ints, expert: int, place: int, places: Ints) -> bool:
    """Give all pairs of an expert their place; False where they had it."""
    is_new = False
    for token in range(ids.shape[0]):
        for rank in range(ids.shape[1]):
            if ids[token, rank] == expert and places[token, rank] != place:
                places[token, rank] = place
                is_new = True
    return is_new


@nogil_jit
def _split_pairs(
    begin: int,
    end: int,
    ids: Ints,
    blobs: Longs,
    link_share: Ints,
    first_slot: int,
    end_slots: int,
    least_dropped: int,
    places: Ints,
) -> None:
    """One item: all pairs. Kept misses are counted first, at a place of their own."""
    (num_tokens, top_k), num_experts = ids.shape, blobs.size
    for _ in range(begin, end):
        places[:] = -1
        misses = 0
        for token in range(num_tokens):
            for rank in range(top_k):
                expert = ids[token, rank]
                if first_slot <= blobs[expert] < end_slots:
                    places[token, rank] = expert
                elif _best_rank(ids, expert) >= least_dropped:
                    places[token, rank] = num_experts + 1
                else:
                    misses += _place(ids, expert, num_experts, places)
        left = (misses * link_share[0] + SHARES // 2) // SHARES
        for token in range(num_tokens):
            for rank in range(top_k):
                expert = ids[token, rank]
                if places[token, rank] == num_experts and _is_first(ids, token, rank):
                    left -= 1
                    if left >= 0:
                        _place(ids, expert, expert, places)


@nogil_jit
def _count_places(
    ids: Ints,
    blobs: Longs,
    link_share: Ints,
    first_slot: int,
    end_slots: int,
    least_dropped: int,
    places: Ints,
    counts: Longs,
) -> None:
    num_experts = blobs.shape[1]
    for layer in range(ids.shape[0]):
        own = ids[layer]
        _split_pairs(
            0, 1, own, blobs[layer], link_share, first_slot, end_slots, least_dropped, places
        )
        for token in range(own.shape[0]):
            for rank in range(own.shape[1]):
                place = places[token, rank] - num_experts
                if place >= 0 and _is_first(own, token, rank):
                    counts[place] += 1


@nogil_jit
def _clear_rows(begin: int, end: int, bounds: Ints, rows: Floats) -> None:
    """Items: rows."""
    for row in range(max(begin, bounds[0]), min(end, bounds[1])):
        for column in range(rows.shape[1]):
            rows[row, column] = 0.0


def split_pairs_reference(
    ids: Ints, blobs: Longs, link_share: int, slots: SlotRange, least_dropped: int
) -> Ints:
    """split_pairs in plain Python: ids [T, k] -> places [T, k]."""
    num_experts = blobs.size
    best: dict[int, int] = {}
    for row in ids.tolist():
        for rank, expert in enumerate(row):
            best[expert] = min(rank, best.get(expert, rank))
    place_of = {expert: expert for expert in best}
    misses = [expert for expert in best if not slots.first <= blobs[expert] < slots.end]
    kept = [expert for expert in misses if best[expert] < least_dropped]
    place_of |= {expert: num_experts + 1 for expert in misses if expert not in kept}
    by_device = (len(kept) * link_share + SHARES // 2) // SHARES
    place_of |= dict.fromkeys(kept[by_device:], num_experts)
    return np.array([[place_of[expert] for expert in row] for row in ids.tolist()], I32)


def clear_rows_reference(bounds: Ints, rows: Floats) -> Floats:
    """clear_rows in plain numpy."""
    rows = rows.copy()
    rows[bounds[0] : bounds[1]] = 0
    return rows


SOURCE = "splitting.cu"
SPLIT_PAIRS = Kernel("split_pairs", _split_pairs, split_pairs_reference, SOURCE)
CLEAR_ROWS = Kernel("clear_rows", _clear_rows, clear_rows_reference, SOURCE)
