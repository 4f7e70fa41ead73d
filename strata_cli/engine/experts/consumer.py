"""The compute thread's side of a chunk: publish routing, wait for copies, give slots back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Event
from strata_cli.engine.experts.entries import EntryList, Ranking
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.issuer import Issuer
from strata_cli.engine.experts.keeping import KeptBlobs
from strata_cli.engine.experts.ring import Ring
from strata_cli.engine.experts.tracing import ReadTrace
from strata_cli.errors import ShapeError

GROUP_EXPERTS = 16
GROUPS_AHEAD = 2  # enqueued and unread: the device never waits for us, and we not for it too soon


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerRules:
    """How a layer's experts are grouped.

    Attributes:
        group: experts of a group that waits for copies.
        takes_landed: make a group longer by what has landed already, up to half of the ring, and
            begin none while two are enqueued and unread: until then more will have landed.
        kept: where blobs are kept for the next chunk; None: nowhere.
        completes: what is routed and not listed is added to a layer's list when it is published.
    """

    group: int = GROUP_EXPERTS
    takes_landed: bool = True
    kept: KeptBlobs | None = None
    completes: bool = False


class Consumer:
    """Walks through the layers of one chunk, one after the other.

    For each layer: publish() once its routing is known, then all groups(). Group boundaries may
    depend on timing; that each expert's rows are computed once, from its own bytes, does not.

    Args:
        ranking: of the experts.
        entries: the chunk's list. If it is not begun, each layer's routed entries are added as
            its routing becomes known; if it is begun, a layer is added before it is published.
        ring: where the entries' bytes arrive.
        issuer: drives the walk over the entries.
        gate: where the walk looks for routing; None if it does not.
        rules: how experts are grouped.
        staged: experts that come through a stager, [L, E], for entries added here.

    Attributes:
        use: tokens of each expert in the layers published so far, int64 [L, E], by id.
        lists_routed: routed entries are added here.
    """

    def __init__(
        self,
        ranking: Ranking,
        entries: EntryList,
        ring: Ring,
        issuer: Issuer,
        gate: Gate | None,
        rules: ConsumerRules,
        staged: NDArray[np.bool_] | None = None,
    ) -> None:
        self._ranking = ranking
        self._entries = entries
        self._ring = ring
        self._issuer = issuer
        self._gate = gate
        self._rules = rules
        self._staged = staged
        self._trace = ReadTrace(ring)
        self.lists_routed = not (entries.is_begun or entries.is_complete)
        self._row = np.zeros(ranking.num_experts, np.bool_)
        self._elsewhere: NDArray[np.integer] | None = None
        self.use = np.zeros((ranking.num_layers, ranking.num_experts), np.int64)

    def await_event(self, event: Event, what: str) -> None:
        """See Issuer.await_event; the device may run dry meanwhile."""
        self._trace.pause()
        self._issuer.await_event(event, what)

    def publish(
        self,
        layer: int,
        expert_start: NDArray[np.integer],
        elsewhere: NDArray[np.integer] | None = None,
    ) -> None:
        """Tell the issuer which of the layer's experts any token wants.

        Args:
            layer: the next one.
            expert_start: where each rank's pairs begin, and the end of the last, [E + 1].
            elsewhere: ranks that others compute: no group has them, and with a list of routed
                experts nobody copies them. Not of residents; None: there are none.

        Raises:
            ShapeError: expert_start has another shape.
            StateError: the layer was published before.
        """
        if expert_start.shape != (self._ranking.num_experts + 1,):
            raise ShapeError(
                f"pairs of {self._ranking.num_experts} experts cannot be {expert_start.shape}"
            )
        counts = np.diff(expert_start)
        self._row = counts > 0
        self.use[layer, self._ranking.expert_at[layer]] = counts
        self._trace_routing(layer, int(expert_start[-1]))
        self._elsewhere = elsewhere
        if elsewhere is not None:
            self._row[elsewhere] = False
        if self.lists_routed:
            ranks = self._routed_from(self._ranking.num_resident[layer])
            self._entries.add_layer(self._ranking, ranks, self._staged_of(layer))
        elif self._rules.completes:
            num_listed = self._ranking.num_resident[layer] + len(self._entries.of_layer(layer))
            ranks = self._routed_from(num_listed)
            self._entries.grow_layer(self._ranking, ranks, self._staged_of(layer))
        if self._gate is not None:
            self._gate.publish(layer, self._row)
        self._issuer.nudge()

    def _routed_from(self, first: int) -> NDArray[np.int64]:
        """Routed ranks of the layer from the first given one on."""
        return first + np.flatnonzero(self._row[first:])

    def _staged_of(self, layer: int) -> NDArray[np.bool_] | None:
        return None if self._staged is None else self._staged[layer]

    def groups(self, layer: int) -> Iterator[range]:
        """The layer's experts as ranges of ranks, each once, when their bytes are or will be there.

        Whoever iterates enqueues the products of a range on the ring's reading stream before
        asking for the next one. Ranges cover every routed rank; ranks inside them that no token
        wants have no bytes. Blocks while entries are not issued.

        Raises:
            StrataError: a copy failed, or nothing moved; see Issuer.require.
        """
        num_resident = self._ranking.num_resident[layer]
        if self._row[:num_resident].any():
            group = range(num_resident)
            start = self._trace.resume(layer)
            yield group
            if start is not None:
                count = int(self._row[:num_resident].sum())
                self._trace.computed(start, layer, group, count, is_resident=True)
            self._trace.pause()
        ranks, entries = self._entries.ranks, self._entries.of_layer(layer)
        routed = [k for k in entries if self._row[ranks[k]]]
        self._choose_kept(layer, routed)
        stretches = self._stretches(routed)
        enqueued: deque[Event] = deque()
        at = 0
        while at < len(routed):
            self._give_back(routed[at])
            if len(enqueued) == GROUPS_AHEAD and self._rules.takes_landed:
                self._issuer.await_event(enqueued.popleft(), f"experts of layer {layer}")
            stop = self._group_end(routed, at)
            if stretches is not None:
                stop = min(stop, bisect_right(stretches, stretches[at]))
            first, last = routed[at], routed[stop - 1]
            self._issuer.require(last)
            start = self._trace.resume(layer)
            self._ring.await_copy(last)
            start = self._trace.awaited(start, layer, last)
            group = range(ranks[first], ranks[last] + 1)
            yield group
            self._trace.computed(start, layer, group, stop - at, is_resident=False)
            self._keep(layer, routed[at:stop])
            enqueued.append(self._ring.release(routed[at:stop]))
            self._give_back(last + 1)
            self._trace.pause()
            at = stop
        self._give_back(entries.stop)
        self._trace.leave()

    def _stretches(self, routed: Sequence[int]) -> list[int] | None:
        """For each entry, a number that those of one group share: none computed elsewhere between.

        None: all may be in one group.
        """
        if self._elsewhere is None:
            return None
        ranks = self._entries.ranks
        numbers: list[int] = np.searchsorted(self._elsewhere, [ranks[k] for k in routed]).tolist()
        return numbers

    def _trace_routing(self, layer: int, pairs: int) -> None:
        if not self._ring.trace.is_on:
            return
        first = self._ranking.num_resident[layer]
        self._ring.trace.event(
            "layer.routed",
            layer=layer,
            routed=int(self._row.sum()),
            routed_resident=int(self._row[:first].sum()),
            entries=self._ranking.num_experts - first,
            pairs=pairs,
        )

    def _choose_kept(self, layer: int, routed: Sequence[int]) -> None:
        if self._rules.kept is not None:
            experts = list(map(self._entries.experts.__getitem__, routed))
            self._rules.kept.choose(layer, self.use[layer], experts)

    def _keep(self, layer: int, routed: Sequence[int]) -> None:
        """Their reads are enqueued and their slots not yet given back: the moment to copy them."""
        kept = self._rules.kept
        if kept is not None and kept.wanted:
            experts = [self._entries.experts[k] for k in routed]
            kept.keep(layer, experts, [k % self._ring.num_slots for k in routed])

    def _give_back(self, k: int) -> None:
        """Every entry before k is done with: read and released, or never to be read."""
        count = k - self._issuer.walk.consumed
        if count:
            self._issuer.walk.consume(count)
            self._issuer.nudge()

    def _group_end(self, routed: Sequence[int], at: int) -> int:
        """End of the group that begins here. It keeps at most half of the ring from the issuer."""
        first = routed[at]
        bound = bisect_left(routed, first + max(self._ring.num_slots // 2, 1))
        stop = min(at + self._rules.group, bound)
        if not self._rules.takes_landed or stop == bound:
            return stop
        issued = bisect_left(routed, self._issuer.walk.issued, stop, bound)
        return self._landed_end(routed, stop, issued)

    def _landed_end(self, routed: Sequence[int], start: int, stop: int) -> int:
        """End of what has landed of routed[start:stop], which is issued. Copies land in order."""
        while start < stop:
            middle = (start + stop + 1) // 2
            if self._ring.has_landed(routed[middle - 1]):
                start = middle
            else:
                stop = middle - 1
        return start
