"""How many slots of device memory cached experts get, and prompts to stream the others through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.experts.blobs import arena_bytes, blob_layouts, slot_bytes
from strata_cli.engine.experts.cache import LEAST_SLOTS
from strata_cli.engine.experts.sizing import (
    ADDRESS_BYTES,
    GRANULE_BYTES,
    LEAST_RING_SLOTS,
    RingNeeds,
    RingRules,
    cache_bytes,
    ring_slots,
    slots_that_fit,
)
from strata_cli.engine.experts.streaming import SMALL_RING_SLOTS
from strata_cli.engine.forward.fetching import NO_FETCHING, FetchSizes
from strata_cli.engine.model.tensors import ModelFile

DEFAULT_RING = RingRules()
RANK_BYTES = 4  # of a pair, in the table that pairs are sorted by


class CacheShape(NamedTuple):
    """What a model's experts take.

    Attributes:
        slot_bytes: of a slot for any of them.
        num_pairs: (layer, expert) pairs.
        arena_bytes: of all in host memory.
        num_layers: that these pairs are of.
    """

    slot_bytes: int
    num_pairs: int
    arena_bytes: int
    num_layers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWishes:
    """What is wanted of an expert cache.

    Attributes:
        num_slots: of the cache; None: as many as fit.
        least_slots: of those that no prompt may borrow.
        kept_slots: for what a prompt keeps between its chunks.
        ring: that prompts stream experts through.
        pinned_bytes: see StoreOptions.
        fetch_slots: for experts that steps miss; None: automatic.
        ahead_slots: for those that the next layer will probably miss; None: automatic.
    """

    num_slots: int | None = None
    least_slots: int = LEAST_SLOTS
    kept_slots: int = 0
    ring: RingRules = DEFAULT_RING
    pinned_bytes: int | None = None
    fetch_slots: int | None = None
    ahead_slots: int | None = None


class CachePlan(NamedTuple):
    """Slots for experts in the device's memory.

    Attributes:
        shape: of the model's experts.
        num_slots: of the expert cache.
        least_slots: of those that no prompt may borrow.
        ring_slots: for ring and kept experts beside the cache, where it has too few to lend, or
            where steps stream experts too; else 0.
        pinned_bytes: most bytes of experts in page-locked memory.
        fetching: slots that steps fetch experts into which they miss.
    """

    shape: CacheShape
    num_slots: int
    least_slots: int
    ring_slots: int
    pinned_bytes: int
    fetching: FetchSizes = NO_FETCHING

    @property
    def ring_bytes(self) -> int:
        """Of the ring beside the cache."""
        return self.ring_slots * self.shape.slot_bytes + TAIL_BYTES

    @property
    def nbytes(self) -> int:
        """Of cache, ring and tables, in the device's memory."""
        slot_bytes, num_pairs = self.shape.slot_bytes, self.shape.num_pairs
        tables = (ADDRESS_BYTES + RANK_BYTES) * num_pairs
        cache = cache_bytes(self.num_slots, slot_bytes, num_pairs)
        fetched = self.fetching.nbytes(slot_bytes, self.shape.num_layers, num_pairs)
        return cache + self.ring_bytes + fetched + tables + 4 * GRANULE_BYTES


def cache_shape(model: ModelFile) -> CacheShape:
    """The shape of a model's experts."""
    layouts, num_experts = blob_layouts(model), model.spec.num_experts
    num_pairs, nbytes = len(layouts) * num_experts, arena_bytes(layouts, num_experts)
    return CacheShape(slot_bytes(layouts), num_pairs, nbytes, len(layouts))


def plan_cache(
    shape: CacheShape, wishes: CacheWishes, room_bytes: int, chunk_tokens: int
) -> CachePlan:
    """Slots as wished for, or as many as fit; a ring of its own where they are too few to lend.

    Args:
        shape: of the model's experts.
        wishes: what is wanted.
        room_bytes: that all of it may take, where the number of slots is automatic.
        chunk_tokens: of prompts.
    """
    whole, wanted = shape.arena_bytes, wishes.pinned_bytes
    pinned_bytes = whole if wanted is None else min(wanted, whole)
    step_slots = SMALL_RING_SLOTS if pinned_bytes < whole else 0
    num_slots = wishes.num_slots
    fetching = FetchSizes(wishes.fetch_slots or 0, wishes.ahead_slots or 0)
    if num_slots is None:
        tables_bytes = CachePlan(shape, 0, 0, step_slots, 0, fetching).nbytes
        num_slots = slots_that_fit(room_bytes - tables_bytes, shape.slot_bytes, shape.num_pairs)
    num_slots = min(num_slots, shape.num_pairs)
    least_slots = min(wishes.least_slots, num_slots // 2)
    if num_slots == shape.num_pairs:
        step_slots, fetching = 0, NO_FETCHING
    plan = CachePlan(shape, num_slots, least_slots, step_slots, pinned_bytes, fetching)
    if num_slots == shape.num_pairs or num_slots - least_slots >= LEAST_RING_SLOTS:
        return plan
    needs = RingNeeds(
        chunk_tokens=chunk_tokens,
        slot_bytes=shape.slot_bytes,
        pinned_share=pinned_bytes / whole,
        num_entries=shape.num_pairs - num_slots,
        room_bytes=shape.num_pairs * shape.slot_bytes,
    )
    return plan._replace(ring_slots=ring_slots(wishes.ring, needs) + wishes.kept_slots)
