"""How many slots an expert cache and a ring get. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.experts.streaming import SMALL_RING_SLOTS

GRANULE_BYTES = 512  # what device memory is handed out in
ADDRESS_BYTES = 8  # of a pair, in the table that kernels read

STREAM_MIN_TOKENS = 512  # 955 tokens took twice as long through the small ring as 1,046 ahead
LEAST_RING_SLOTS, MOST_RING_SLOTS = 16, 512  # of a ring that is ahead of the routing
SELECTED_RING_SLOTS = 64  # a layer of few tokens that is computed, and what comes meanwhile
SPARE_RING_SLOTS = 128  # 2 ms of 42 less, where so many are lent anyway; more are 3 ms to fill
PINNED_RING_SLOTS, STAGED_RING_SLOTS = 384, 96
PINNED_SHARE = 0.9  # with less, most copies wait for the stager, and a long ring is of no use
RING_BYTES = PINNED_RING_SLOTS * 1_382_400  # so many Q2_0 blobs of a full model
STAGED_RING_DIVISOR = PINNED_RING_SLOTS // STAGED_RING_SLOTS
MIDDLE_CHUNK_TOKENS = 768  # from here on a layer is not routed before the link has filled a ring
MIDDLE_RING_FACTOR = 2  # of 530 MB; behind 18,763 tokens that takes 8 ms
LONG_CHUNK_TOKENS = 3072  # from here on a layer computes about as long as its experts' copies take
LONG_RING_FACTOR = 4  # the link then needs room for most of the next layer's


def cache_bytes(num_slots: int, slot_bytes: int, num_pairs: int) -> int:
    """Device memory that an expert cache takes: slots, kernels' tail, address table.

    Args:
        num_slots: of the cache.
        slot_bytes: of each.
        num_pairs: (layer, expert) pairs of the model.
    """
    return _granules(num_slots * slot_bytes + TAIL_BYTES) + _granules(num_pairs * ADDRESS_BYTES)


def slots_that_fit(budget_bytes: int, slot_bytes: int, num_pairs: int) -> int:
    """Most slots of an expert cache in so much device memory; never more than there are pairs."""
    room = budget_bytes - cache_bytes(0, slot_bytes, num_pairs) - GRANULE_BYTES
    return min(max(room // slot_bytes, 0), num_pairs)


@dataclass(frozen=True, slots=True)
class RingRules:
    """What is wanted of the ring.

    Attributes:
        stream_min: tokens from which on all of a chunk's experts are streamed ahead of their
            routing, as far as the link has time.
        slots: of the ring; 0: automatic; up to SMALL_RING_SLOTS: a small ring for every chunk.
        budget_bytes: of an automatic ring, a quarter of it where much is staged, two and four
            times as much for longer chunks where little is; 0: by count.
    """

    stream_min: int = STREAM_MIN_TOKENS
    slots: int = 0
    budget_bytes: int = RING_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RingNeeds:
    """What a ring is for.

    Attributes:
        chunk_tokens: of the chunk.
        slot_bytes: of a slot.
        pinned_share: of the experts that are copied straight from pinned memory, 0..1.
        num_entries: copies of the chunk; more slots are of no use.
        room_bytes: that the ring may take.
        selects: what is copied ahead of its routing, of a short chunk, was foreseen.
    """

    chunk_tokens: int
    slot_bytes: int
    pinned_share: float
    num_entries: int
    room_bytes: int
    selects: bool = False


def ring_slots(rules: RingRules, needs: RingNeeds) -> int:
    """Slots of a chunk's ring: SMALL_RING_SLOTS, or LEAST_RING_SLOTS to MOST_RING_SLOTS.

    A small ring takes routed experts alone. It is the answer for short chunks unless they foresee
    what they copy, where it is asked for, and where the room does not hold a longer one; that the
    room holds it is not checked.
    """
    most = min(MOST_RING_SLOTS, needs.room_bytes // needs.slot_bytes)
    is_short = needs.chunk_tokens < rules.stream_min
    is_small = (is_short and not needs.selects) or 0 < rules.slots <= SMALL_RING_SLOTS
    if is_small or most < LEAST_RING_SLOTS:
        return SMALL_RING_SLOTS
    wanted = rules.slots or min(_automatic_slots(rules, needs), needs.num_entries)
    if is_short and not rules.slots:
        wanted = min(wanted, SELECTED_RING_SLOTS)
    return min(max(wanted, LEAST_RING_SLOTS), most)


def _automatic_slots(rules: RingRules, needs: RingNeeds) -> int:
    is_pinned = needs.pinned_share >= PINNED_SHARE
    if not rules.budget_bytes:
        return PINNED_RING_SLOTS if is_pinned else STAGED_RING_SLOTS
    if not is_pinned:
        return rules.budget_bytes // STAGED_RING_DIVISOR // needs.slot_bytes
    return rules.budget_bytes * _factor(needs.chunk_tokens) // needs.slot_bytes


def _factor(chunk_tokens: int) -> int:
    if chunk_tokens >= LONG_CHUNK_TOKENS:
        return LONG_RING_FACTOR
    return MIDDLE_RING_FACTOR if chunk_tokens >= MIDDLE_CHUNK_TOKENS else 1


def _granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES
