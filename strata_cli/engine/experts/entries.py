"""The ordered list of a chunk's copies, and the ranks of a layer's experts that it follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.errors import ShapeError

FROM_ARENA = -1  # the job of an entry whose bytes a device can copy from where they are


class Entry(NamedTuple):
    """One copy of a chunk's list.

    Attributes:
        layer: of the expert.
        expert: id within the layer.
        rank: the expert's place among all experts of its layer.
        job: staging ticket, numbered in list order, or FROM_ARENA.
    """

    layer: int
    expert: int
    rank: int
    job: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """Per layer, the order in which experts are worked on: residents by id, then the others.

    A layer may be ranked anew until its entries are listed.

    Attributes:
        rank_of: rank of each expert, int32 [L, E].
        expert_at: the expert of each rank, int32 [L, E].
        num_resident: per layer; the lower ranks.
    """

    rank_of: NDArray[np.int32]
    expert_at: NDArray[np.int32]
    num_resident: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Layers that have experts."""
        return len(self.num_resident)

    @property
    def num_experts(self) -> int:
        """Experts of each layer."""
        return int(self.rank_of.shape[1])

    def reorder(self, layer: int, scores: NDArray[np.float32]) -> None:
        """Rank a layer's experts that are not resident by falling score [E]; equal ones by id."""
        first = self.num_resident[layer]
        streamed = np.sort(self.expert_at[layer, first:])
        streamed = streamed[np.argsort(-scores[streamed], kind="stable")]
        self.expert_at[layer, first:] = streamed
        self.rank_of[layer, streamed] = np.arange(first, self.num_experts)


def rank_experts(resident: NDArray[np.bool_], order: NDArray[np.integer] | None = None) -> Ranking:
    """Rank every layer's experts.

    Args:
        resident: whose weights are where kernels read them already, [L, E].
        order: per layer, all expert ids in the order in which to copy them, [L, E]; None: by id.

    Raises:
        ShapeError: order has another shape, or a row that is no permutation.
    """
    num_experts = resident.shape[1]
    ids = np.arange(num_experts)
    if order is None:
        places = np.broadcast_to(ids, resident.shape)
    else:
        if order.shape != resident.shape or not _permutes(order):
            raise ShapeError(
                f"a copy order must permute {num_experts} experts in each of {len(resident)} layers"
            )
        places = _inverse(order)
    expert_at = ascending(np.where(resident, ids, num_experts + places)).astype(np.int32)
    rank_of = _inverse(expert_at).astype(np.int32)
    return Ranking(rank_of, expert_at, tuple(resident.sum(axis=1).tolist()))


def ascending(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Per row, the places of its keys from the least one up; equal ones as they stand.

    A sort of numbers that hold key and place: several times faster than an argsort.

    Args:
        keys: at least 0, below 2^43, [L, E] with E below 2^20.
    """
    places = np.int64(1) << 20
    both = keys * places + np.arange(keys.shape[1])
    both.sort(axis=1)
    found: NDArray[np.int64] = both & (places - 1)
    return found


def _inverse(order: NDArray[np.integer]) -> NDArray[np.int64]:
    """Per row, the place of each number."""
    places = np.empty(order.shape, np.int64)
    np.put_along_axis(places, order, np.arange(order.shape[1])[None], axis=1)
    return places


def _permutes(order: NDArray[np.integer]) -> bool:
    """Whether every row has each number below its length once."""
    if ((order < 0) | (order >= order.shape[1])).any():
        return False
    is_there = np.zeros(order.shape, np.bool_)
    np.put_along_axis(is_there, order, True, axis=1)
    return bool(is_there.all())


class EntryList:
    """A chunk's copies in order; layers are added one after the other, before or during the walk.

    One thread adds, others may read meanwhile: whoever has seen ``count`` finds the columns filled
    and ``starts`` right up to there, and whoever has seen ``is_complete`` finds the last count.

    Attributes:
        layers, experts, ranks, jobs: the columns, each [count]; see Entry.
        starts: first entry of each layer added so far, and the end of the last one.
        count: entries so far.
        num_jobs: of those, how many come through a stager.
        is_complete: no entry will be added.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.layers: list[int] = []
        self.experts: list[int] = []
        self.ranks: list[int] = []
        self.jobs: list[int] = []
        self.starts = [0]
        self.count = 0
        self.num_jobs = 0
        self.is_complete = num_layers == 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> Entry:
        return Entry(self.layers[k], self.experts[k], self.ranks[k], self.jobs[k])

    @property
    def is_begun(self) -> bool:
        """Whether any layer was added."""
        return len(self.starts) > 1

    def of_layer(self, layer: int) -> range:
        """The entries of a layer that was added."""
        return range(self.starts[layer], self.starts[layer + 1])

    def add_layer(
        self,
        ranking: Ranking,
        ranks: NDArray[np.integer],
        staged: NDArray[np.bool_] | None = None,
        *,
        may_grow: bool = False,
    ) -> range:
        """Append entries of the next layer.

        Args:
            ranking: of the experts.
            ranks: ascending; which of the layer's experts are to be copied.
            staged: experts whose bytes come through a stager, [E]; None: no expert's do.
            may_grow: grow_layer() will follow, before the layer behind it.

        Returns:
            the new entries.
        """
        start = self.starts[-1]
        self.starts.append(start)
        self._append(ranking, ranks, staged)
        self.is_complete = len(self.starts) > self.num_layers and not may_grow
        return range(start, self.count)

    def grow_layer(
        self,
        ranking: Ranking,
        ranks: NDArray[np.integer],
        staged: NDArray[np.bool_] | None = None,
    ) -> None:
        """Append more entries of the layer that was added last, once.

        Args:
            ranking: of the experts.
            ranks: ascending, behind those that are listed.
            staged: see add_layer().
        """
        self._append(ranking, ranks, staged)
        self.is_complete = len(self.starts) > self.num_layers

    def _append(
        self,
        ranking: Ranking,
        ranks: NDArray[np.integer],
        staged: NDArray[np.bool_] | None,
    ) -> None:
        """Append entries of the last layer."""
        layer = len(self.starts) - 2
        experts = ranking.expert_at[layer, ranks]
        jobs = np.full(len(ranks), FROM_ARENA)
        if staged is not None:
            needs_job = staged[experts]
            jobs[needs_job] = self.num_jobs + np.arange(needs_job.sum())
            self.num_jobs += int(needs_job.sum())
        self.layers += [layer] * len(ranks)
        self.experts += experts.tolist()
        self.ranks += ranks.tolist()
        self.jobs += jobs.tolist()
        self.starts[-1] = self.count = len(self.jobs)

    def add_streamed(self, ranking: Ranking, staged: NDArray[np.bool_] | None) -> None:
        """Append every layer's experts that are not resident, to an empty list."""
        ids = np.arange(ranking.num_experts)
        is_streamed = ids >= np.array(ranking.num_resident).reshape(-1, 1)
        layers, ranks = np.nonzero(is_streamed)
        experts = ranking.expert_at[is_streamed]
        self.layers, self.ranks, self.experts = layers.tolist(), ranks.tolist(), experts.tolist()
        if staged is None:
            self.jobs = [FROM_ARENA] * len(ranks)
        else:
            needs_job = staged[layers, experts]
            self.num_jobs = int(needs_job.sum())
            self.jobs = np.where(needs_job, np.cumsum(needs_job) - 1, FROM_ARENA).tolist()
        counts = ranking.num_experts - np.array(ranking.num_resident)
        self.starts = [0, *np.cumsum(counts).tolist()]
        self.count = len(ranks)
        self.is_complete = True


def list_entries(ranking: Ranking, staged: NDArray[np.bool_] | None = None) -> EntryList:
    """The copies of every expert that is not resident, layers ascending, ranks ascending.

    Args:
        ranking: of the experts.
        staged: experts whose bytes come through a stager, [L, E]; None: no expert's do.
    """
    entries = EntryList(ranking.num_layers)
    entries.add_streamed(ranking, staged)
    return entries


class RingShape(NamedTuple):
    """Where the slots of a ring are: slot s begins at address + s * slot_bytes."""

    address: int
    slot_bytes: int
    num_slots: int


def address_row(
    ranking: Ranking, entries: EntryList, layer: int, resident: NDArray[np.int64], ring: RingShape
) -> NDArray[np.int64]:
    """Where kernels find the experts of a layer that is listed, by rank: int64 [E].

    Args:
        ranking: of the experts.
        entries: the layer's listed experts get the addresses of their ring slots.
        layer: which one.
        resident: address of every resident expert, by id, [E]; others that no entry lists keep
            what is there.
        ring: where the slots are.
    """
    row: NDArray[np.int64] = resident[ranking.expert_at[layer]]
    of_layer = entries.of_layer(layer)
    slots = np.arange(of_layer.start, of_layer.stop) % ring.num_slots
    row[entries.ranks[of_layer.start : of_layer.stop]] = ring.address + slots * ring.slot_bytes
    return row


def address_table(
    ranking: Ranking, entries: EntryList, resident: NDArray[np.int64], ring: RingShape
) -> NDArray[np.int64]:
    """address_row() of every layer of a list that list_entries() made: int64 [L, E]."""
    ranks = np.arange(ranking.num_experts)
    num_resident = np.array(ranking.num_resident, np.int64).reshape(-1, 1)
    firsts = np.array(entries.starts[:-1], np.int64).reshape(-1, 1)
    slots = (firsts + ranks - num_resident) % ring.num_slots
    in_place = np.take_along_axis(resident, ranking.expert_at, axis=1)
    table: NDArray[np.int64] = np.where(
        ranks < num_resident, in_place, ring.address + slots * ring.slot_bytes
    )
    return table
