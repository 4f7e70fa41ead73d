"""Which pairs of a window the device computes, which the host's processor, and which nobody.

T tokens, E experts, k experts per token, P = T * k pairs. An expert is a hit if its blob lies in a
slot of the device's memory, else a miss. Source of the rules: Strata's plan of a decode window.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Coming(NamedTuple):
    """Experts that are on their way to the device before they are routed to; more may follow.

    Attributes:
        claimed: parts of them that are there or come, in the order of the list, int32 [1].
        listed: how many, int32 [1].
        experts: the list, int32 [n].
        parts: of each.
    """

    claimed: Tensor
    listed: Tensor
    experts: Tensor
    parts: int


def split_pairs(
    stream: Stream,
    ids: Tensor,
    blobs: Tensor,
    link_share: Tensor,
    slots: SlotRange,
    least_dropped: int,
    places: Tensor,
    coming: Coming | None = None,
) -> None:
    """Give each pair of a token and an expert its place among those sorted by who computes them.

    A miss that every token ranks at ``least_dropped`` or later is left out. Of the other distinct
    misses those that come already are the device's. Of the rest, in the order in which tokens and
    ranks first name them, the first ones, as many as the share says, are read by the device, and
    the last ones go to the host's processor: what ranks first is what may come next.

    Args:
        stream: enqueues here.
        ids: experts of each token, best first, int32 [T, k], each in 0..E-1.
        blobs: where the device finds each expert, int64 [E].
        link_share: parts, of SHARES, of the misses that the device reads, but for those that come:
            int32 [1].
        slots: where hits are.
        least_dropped: a rank, from 0; k: nothing is left out.
        places: int32 [T, k], overwritten: an id where the device computes the pair, E where the
            host's processor does, E + 1 where nobody does.
        coming: which come; None: none does.

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
    room = 0 if coming is None else coming.experts.size
    claimed, listed, experts, parts = coming or Coming(link_share, link_share, link_share, 1)
    expect("split_pairs claimed", claimed, (1,), I32)
    expect("split_pairs listed", listed, (1,), I32)
    expect("split_pairs experts", experts, experts.shape, I32)
    launch = Launch(
        items=1 if ids.size else 0,
        grid=(1, 1, 1),
        block=(32 * blocks(ids.size, 32), 1, 1),
        shared_bytes=8 * ids.size,
        extents=(ids.size, ids.shape[1], blobs.size),
        early=True,
    )
    numbers = slots.first, slots.end, least_dropped, parts, room
    tensors = ids, blobs, link_share, claimed, listed, experts
    stream.launch(SPLIT_PAIRS, launch, *tensors, *numbers, places)


def count_dropped(ids: Ints, blobs: Longs, slots: SlotRange, least_dropped: int) -> int:
    """How many distinct experts split_pairs leaves out in the layers of a window, on the host.

    Args:
        ids: experts of each layer's tokens, [L, T, k].
        blobs: where the device finds each layer's experts, [L, E].
        slots: as of split_pairs.
        least_dropped: as of split_pairs.
    """
    return _count_dropped(ids, blobs, slots.first, slots.end, least_dropped)


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
def _sure_place(
    ids: Ints,
    expert: int,
    address: int,
    slots: tuple[int, int],
    least_dropped: int,
    left_out: int,
    coming: Ints,
) -> int:
    """Where an expert's pairs go whoever shares the misses; -1: it is one of these."""
    if slots[0] <= address < slots[1]:
        return expert
    if _best_rank(ids, expert) >= least_dropped:
        return left_out
    for other in coming:
        if other == expert:
            return expert
    return -1


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
    claimed: Ints,
    count: Ints,
    coming: Ints,
    first_slot: int,
    end_slots: int,
    least_dropped: int,
    parts: int,
    room: int,
    places: Ints,
) -> None:
    """One item: all pairs. Kept misses are counted first, at a place of their own."""
    (num_tokens, top_k), num_experts = ids.shape, blobs.size
    slots = first_slot, end_slots
    come = coming[: min(count[0], (claimed[0] + parts - 1) // parts) if room else 0]
    for _ in range(begin, end):
        places[:] = -1
        misses = 0
        for token in range(num_tokens):
            for rank in range(top_k):
                expert = ids[token, rank]
                sure = _sure_place(
                    ids, expert, blobs[expert], slots, least_dropped, num_experts + 1, come
                )
                if sure >= 0:
                    places[token, rank] = sure
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
def _count_dropped(
    ids: Ints, blobs: Longs, first_slot: int, end_slots: int, least_dropped: int
) -> int:
    dropped = 0
    for layer in range(ids.shape[0]):
        own = ids[layer]
        for token in range(own.shape[0]):
            for rank in range(own.shape[1]):
                expert = own[token, rank]
                is_hit = first_slot <= blobs[layer, expert] < end_slots
                if not is_hit and _best_rank(own, expert) >= least_dropped:
                    dropped += _is_first(own, token, rank)
    return dropped


@nogil_jit
def _clear_rows(begin: int, end: int, bounds: Ints, rows: Floats) -> None:
    """Items: rows."""
    for row in range(max(begin, bounds[0]), min(end, bounds[1])):
        for column in range(rows.shape[1]):
            rows[row, column] = 0.0


def split_pairs_reference(
    ids: Ints,
    blobs: Longs,
    link_share: int,
    slots: SlotRange,
    least_dropped: int,
    coming: Sequence[int] = (),
) -> Ints:
    """split_pairs in plain Python: ids [T, k] -> places [T, k]; coming are experts that come."""
    num_experts = blobs.size
    best: dict[int, int] = {}
    for row in ids.tolist():
        for rank, expert in enumerate(row):
            best[expert] = min(rank, best.get(expert, rank))
    place_of = {expert: expert for expert in best}
    misses = [expert for expert in best if not slots.first <= blobs[expert] < slots.end]
    kept = [expert for expert in misses if best[expert] < least_dropped]
    place_of |= {expert: num_experts + 1 for expert in misses if expert not in kept}
    shared = [expert for expert in kept if expert not in coming]
    by_device = (len(shared) * link_share + SHARES // 2) // SHARES
    place_of |= dict.fromkeys(shared[by_device:], num_experts)
    return np.array([[place_of[expert] for expert in row] for row in ids.tolist()], I32)


def clear_rows_reference(bounds: Ints, rows: Floats) -> Floats:
    """clear_rows in plain numpy."""
    rows = rows.copy()
    rows[bounds[0] : bounds[1]] = 0
    return rows


SOURCE = "splitting.cu"
SPLIT_PAIRS = Kernel("split_pairs", _split_pairs, split_pairs_reference, SOURCE)
CLEAR_ROWS = Kernel("clear_rows", _clear_rows, clear_rows_reference, SOURCE)
