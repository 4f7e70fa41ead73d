"""Streamed blobs that stay in lent slots for the chunks to come, as long as the slots are lent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.experts.entries import EntryList

U8 = np.dtype(np.uint8)
EMPTY = -1
DECAY = 0.7  # of what a chunk used, with every chunk behind it
MOST_SHARE = 4  # a layer that was in the ring may have this part of the slots for a chunk


class KeptBlobs:
    """The slots behind a chunk's ring, shared out evenly among the layers.

    In each chunk a layer keeps those of its streamed experts, and of those that it has, which
    tokens wanted most lately; what is kept is resident for the next chunk. What the ring held at a
    chunk's end is kept too, until another ring needs the slots. Used on the compute thread, in one
    chunk after the other: begin(), choose() and keep() for each layer, leave().

    Args:
        reads: the stream whose kernels read the slots. Copies run on it.
        slots: uint8 [num_slots, slot_bytes], device memory; not owned. Rings are the first ones.
        blob_bytes: per layer.
        num_experts: of a layer.

    Attributes:
        slots: see above.
        wanted: what keep() would take of the layer that choose() was asked for.
        addresses: of each kept blob, int64 [L, E], by expert id; 0: not kept.
    """

    def __init__(
        self, reads: Stream, slots: Tensor, blob_bytes: Sequence[int], num_experts: int
    ) -> None:
        num_layers = len(blob_bytes)
        self._reads = reads
        self.slots = slots
        self._blob_bytes = blob_bytes
        self.addresses = np.zeros((num_layers, num_experts), np.int64)
        self._scores = np.zeros((num_layers, num_experts))
        self._pair_in = np.full(slots.shape[0], EMPTY, np.int64)
        self._ring_slots = 0
        self._free: list[int] = []
        self.wanted: frozenset[int] = frozenset()

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """Which experts are here, [L, E]; not to be asked between a chunk's begin and end."""
        is_kept: NDArray[np.bool_] = self.addresses != 0
        return is_kept

    def begin(self, ring_slots: int) -> None:
        """The first slots are a chunk's ring from now on: what was there is kept no longer."""
        self._ring_slots = ring_slots
        self._forget(np.arange(ring_slots))
        for layer in np.flatnonzero(self.addresses.any(axis=1)).tolist():
            experts = np.flatnonzero(self.addresses[layer])
            most = max(self._share(layer), (self.slots.shape[0] - ring_slots) // MOST_SHARE)
            if len(experts) > most:
                self._drop(layer, experts, most_used(self._scores[layer], experts, most))
        empty = np.flatnonzero(self._pair_in[ring_slots:] == EMPTY)
        self._free = (ring_slots + empty).tolist()

    def choose(self, layer: int, use: NDArray[np.int64], experts: Sequence[int]) -> None:
        """Decide what to keep of a layer. What it had and does not keep is free from here on.

        Args:
            layer: the one that is worked on; the reads of what it had are enqueued.
            use: tokens of each of its experts in this chunk, [E].
            experts: those that are streamed and routed.
        """
        scores, had = self._scores[layer], np.flatnonzero(self.addresses[layer])
        scores *= DECAY
        scores += use / max(use.sum(), 1)
        num_slots = self._share(layer)
        if not num_slots and not had.size:
            self.wanted = frozenset()
            return
        best = most_used(scores, [*had.tolist(), *experts], num_slots)
        self._free += self._drop(layer, had, best)
        new = best[self.addresses[layer, best] == 0]
        self.wanted = frozenset(new[: len(self._free)].tolist())

    def keep(self, layer: int, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Enqueue copies of the blobs in ring slots, of those experts that were chosen.

        Later than the ring's copies before them, which may have been into slots that are free now.
        """
        copies = []
        for expert, slot in zip(experts, slots, strict=True):
            if expert in self.wanted:
                to = self._free.pop()
                copies.append((self._room(to, layer), self._room(slot, layer)))
                self._put(to, layer, expert)
        if copies:
            self._reads.copy_many(copies)

    def leave(self, entries: EntryList, use: NDArray[np.int64]) -> None:
        """A chunk is done: what its ring holds is kept, as far as its reads waited for it.

        Args:
            entries: all of the chunk's; each of the last ones is the last one in its slot.
            use: tokens of each expert in it, [L, E].
        """
        for k in range(max(entries.count - self._ring_slots, 0), entries.count):
            layer, expert = entries.layers[k], entries.experts[k]
            if use[layer, expert] and not self.addresses[layer, expert]:
                self._put(k % self._ring_slots, layer, expert)

    def _share(self, layer: int) -> int:
        """How many slots are a layer's."""
        num_slots, num_layers = self.slots.shape[0] - self._ring_slots, len(self._blob_bytes)
        return (layer + 1) * num_slots // num_layers - layer * num_slots // num_layers

    def _room(self, slot: int, layer: int) -> Tensor:
        offset = self.slots.offset_bytes + slot * self.slots.shape[1]
        return Tensor(self.slots.buffer, offset, (self._blob_bytes[layer],), U8)

    def _put(self, slot: int, layer: int, expert: int) -> None:
        self._pair_in[slot] = layer * self.addresses.shape[1] + expert
        self.addresses[layer, expert] = self._room(slot, layer).address

    def _drop(self, layer: int, experts: NDArray[np.int64], stay: NDArray[np.int64]) -> list[int]:
        """Those of a layer's experts that do not stay are kept no longer; returns their slots."""
        gone = np.setdiff1d(experts, stay) + layer * self.addresses.shape[1]
        return self._forget(np.flatnonzero(np.isin(self._pair_in, gone)))

    def _forget(self, slots: NDArray[np.int64]) -> list[int]:
        """Nothing is kept in these slots any more; returns them."""
        pairs = self._pair_in[slots]
        self.addresses.reshape(-1)[pairs[pairs != EMPTY]] = 0
        self._pair_in[slots] = EMPTY
        found: list[int] = slots.tolist()
        return found


def most_used(
    use: NDArray[np.number], experts: Sequence[int] | NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Of some experts, the given number with most use; equal ones by id.

    Args:
        use: of each expert, [E].
        experts: ids to choose from.
        count: how many at most.
    """
    found = np.sort(np.array(experts, np.int64))
    best: NDArray[np.int64] = found[np.argsort(-use[found], kind="stable")[:count]]
    return best
