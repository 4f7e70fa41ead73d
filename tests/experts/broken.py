"""Deliberately broken parts. The checker must catch every one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Event, Tensor
from strata_cli.engine.experts.consumer import Consumer
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.ring import BlobRows, Pair, Queued, Ring, RingLink
from strata_cli.engine.experts.walk import ANY_NUMBER, Walk
from tests.experts.simulator import Parts


class SkipsARoutedEntry(Walk):
    def _drop(self, k: int, count: int) -> int:
        k = super()._drop(k, count)
        return super()._drop(k + 1, count) if k < count and k % 7 == 3 else k


class SkipsUnpublishedLayers(Walk):
    def _drop(self, k: int, count: int) -> int:
        k = super()._drop(k, count)
        while self._rows is not None and k < count and self._rows[self.entries.layers[k]] is None:
            k += 1
        return k


class SkipsStagedEntries(Walk):
    def _drop(self, k: int, count: int) -> int:
        k = super()._drop(k, count)
        while k < count and self._rows is not None:
            row = self._rows[self.entries.layers[k]]
            if row is None or row[self.entries.ranks[k]]:
                break
            k += 1
        return k


class IgnoresTheRing(Walk):
    def _ring_end(self) -> int:
        return ANY_NUMBER


class OneSlotTooMany(Walk):
    def _ring_end(self) -> int:
        return super()._ring_end() + 1


class IgnoresTheDepth(Walk):
    def _link_room(self, wanted: int) -> int:  # noqa: ARG002  the walk's signature
        return ANY_NUMBER


class OneCopyTooDeep(Walk):
    def _link_room(self, wanted: int) -> int:
        return super()._link_room(wanted) + 1


class IgnoresWhatIsLikely(Walk):
    def _has_room_ahead(self, more: int) -> bool:  # noqa: ARG002  the walk's signature
        return True


class CopiesTwice(Walk):
    def _copy(self, batch: list[int]) -> None:
        super()._copy(batch)
        if batch[-1] == 5:
            super()._copy(batch)


class ForgetsUsedEvents(Ring):
    def _await_reads(self, slots: Sequence[int]) -> None:
        pass


class AwaitsTheFirstSlotOnly(Ring):
    def _await_reads(self, slots: Sequence[int]) -> None:
        super()._await_reads(slots[:1])


class ReleasesTheLastSlotOnly(Ring):
    def release(self, entries: Sequence[int]) -> Event:
        return super().release(entries[-1:])


class WritesTheNextSlot(Ring):
    def room(self, slot: int, nbytes: int) -> Tensor:
        return super().room((slot + 1) % self.num_slots, nbytes)

    def _rows_of(self, entries: Sequence[int]) -> list[int]:
        return [(row + 1) % self.num_slots for row in super()._rows_of(entries)]


class RecordsCopiedTooEarly(Ring):
    def copy_in(
        self, batch: Sequence[int], rows: Sequence[BlobRows], staged: Sequence[Pair]
    ) -> Queued:
        early = type(self._copied_events[0])()
        self.copies.record(early)
        queued = super().copy_in(batch, rows, staged)
        for k in batch:
            self.copied[k % self.num_slots] = early
        return Queued(early, queued.pieces)


class ForgetsToAwaitCopies(Ring):
    def await_copy(self, k: int) -> None:
        pass


class ForgetsTheLayer(RingLink):
    def _blob_rows(self, batch: Sequence[int]) -> list[BlobRows]:
        if not batch:
            return []
        layer = self._entries.layers[batch[0]]
        return [BlobRows(batch, self._blobs[layer], self._experts(batch))]


class CopiesTheNeighbour(RingLink):
    def _experts(self, part: Sequence[int]) -> list[int]:
        return [0] * len(part)


class FlagBeforeRow(Gate):
    """A layer looks published, with an empty row, until the next layer is published."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        super().__init__(num_layers, num_experts)
        self._late: list[tuple[int, bytes]] = []

    def publish(self, layer: int, routed: NDArray[np.bool_]) -> None:
        for late_layer, row in self._late:
            self._rows[late_layer] = row
        self._late = [(layer, routed.astype(np.uint8).tobytes())]
        self._rows[layer] = bytes(len(routed))


class PublishesAnotherLayer(Gate):
    def publish(self, layer: int, routed: NDArray[np.bool_]) -> None:
        super().publish((layer + 1) % len(self._rows), routed)


class ReleasesBeforeReading(Consumer):
    def groups(self, layer: int) -> Iterator[range]:
        for group in super().groups(layer):
            entries = [k for k in self._entries.of_layer(layer) if self._entries.ranks[k] in group]
            if entries:
                self._give_back(entries[-1] + 1)
                self._ring.release(entries)
            yield group


class GivesBackWithoutRelease(Consumer):
    def groups(self, layer: int) -> Iterator[range]:
        self._ring.release = self._event_of  # type: ignore[method-assign]
        yield from super().groups(layer)

    def _event_of(self, entries: Sequence[int]) -> Event:
        return self._ring._used_events[entries[-1] % self._ring.num_slots]


class LeavesOutTheLastGroup(Consumer):
    def groups(self, layer: int) -> Iterator[range]:
        groups = list(super().groups(layer))
        yield from groups[:-1]


BROKEN = {
    "skips a routed entry": (Parts(walk=SkipsARoutedEntry), "R3"),
    "skips what is not published": (Parts(walk=SkipsUnpublishedLayers), "R3"),
    "skips staged entries": (Parts(walk=SkipsStagedEntries), "R3"),
    "ignores the ring rule": (Parts(walk=IgnoresTheRing), "R6"),
    "one slot too many": (Parts(walk=OneSlotTooMany), "R6"),
    "ignores the depth rule": (Parts(walk=IgnoresTheDepth), "R5"),
    "one copy too deep": (Parts(walk=OneCopyTooDeep), "R5"),
    "ignores what is likely": (Parts(walk=IgnoresWhatIsLikely), "R18"),
    "copies an entry twice": (Parts(walk=CopiesTwice), "R1"),
    "forgets used events": (Parts(ring=ForgetsUsedEvents), "R9"),
    "awaits the first slot only": (Parts(ring=AwaitsTheFirstSlotOnly), "R9"),
    "releases the last slot only": (Parts(ring=ReleasesTheLastSlotOnly), "R9"),
    "writes the next slot": (Parts(ring=WritesTheNextSlot), "R2"),
    "records copied events too early": (Parts(ring=RecordsCopiedTooEarly), "R2"),
    "forgets to await copies": (Parts(ring=ForgetsToAwaitCopies), "R2"),
    "forgets where a layer ends": (Parts(link=ForgetsTheLayer), "R2"),
    "copies a neighbour's bytes": (Parts(link=CopiesTheNeighbour), "R2"),
    "raises the flag before the row": (Parts(gate=FlagBeforeRow), "R3"),
    "publishes another layer": (Parts(gate=PublishesAnotherLayer), "R3"),
    "releases before reading": (Parts(consumer=ReleasesBeforeReading), "R9"),
    "gives back without release": (Parts(consumer=GivesBackWithoutRelease), "R9"),
    "leaves out the last group": (Parts(consumer=LeavesOutTheLastGroup), "R1"),
}
