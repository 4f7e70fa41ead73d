"""Streamed blobs that stay in device memory for the next chunks of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.experts.ring import U8, Ring


class KeptBlobs:
    """Slots beside the ring, shared out evenly among the layers.

    In each chunk a layer keeps those of its streamed experts that most tokens wanted, as long as
    it has slots left; what is kept is resident for the next chunk. Nothing is replaced: a prompt's
    chunks want much the same experts. Used by the consumer, on the compute thread.

    Args:
        ring: what the blobs come from. Copies run on its reading stream.
        slots: uint8 [num_slots, slot_bytes], device memory; not owned.
        blob_bytes: per layer.
        num_experts: of a layer.

    Attributes:
        addresses: of each kept blob, int64 [L, E], by expert id; 0: not kept.
    """

    def __init__(
        self, ring: Ring, slots: Tensor, blob_bytes: Sequence[int], num_experts: int
    ) -> None:
        num_layers = len(blob_bytes)
        self._ring = ring
        self._slots = slots
        self._blob_bytes = blob_bytes
        self.addresses = np.zeros((num_layers, num_experts), np.int64)
        self._bounds = [layer * slots.shape[0] // num_layers for layer in range(num_layers + 1)]
        self._next = self._bounds[:-1]
        self._wanted: frozenset[int] = frozenset()

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """Which experts are here, [L, E]; not to be asked between a chunk's begin and end."""
        is_kept: NDArray[np.bool_] = self.addresses != 0
        return is_kept

    def choose(self, layer: int, use: NDArray[np.int64], experts: Sequence[int]) -> None:
        """Decide what to keep of the layer that is worked on next.

        Args:
            layer: which one.
            use: tokens of each of its experts in this chunk, [E].
            experts: those that are streamed and routed.
        """
        room = self._bounds[layer + 1] - self._next[layer]
        self._wanted = frozenset(most_used(use, experts, room))

    def keep(self, layer: int, expert: int, slot: int) -> None:
        """Enqueue a copy of the blob in a ring slot, if it was chosen."""
        if expert not in self._wanted:
            return
        offset = self._slots.offset_bytes + self._next[layer] * self._slots.shape[1]
        to = Tensor(self._slots.buffer, offset, (self._blob_bytes[layer],), U8)
        self._ring.reads.copy(to, self._ring.room(slot, self._blob_bytes[layer]))
        self._next[layer] += 1
        self.addresses[layer, expert] = to.address


def most_used(use: NDArray[np.int64], experts: Sequence[int], count: int) -> list[int]:
    """Of some experts, the given number with most tokens; equal ones by id.

    Args:
        use: tokens of each expert, [E].
        experts: ids to choose from.
        count: how many at most.
    """
    return sorted(experts, key=lambda expert: (-int(use[expert]), expert))[:count]
