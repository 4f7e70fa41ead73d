"""The issuer's decisions: which entry is copied or skipped next, and why nothing can be now.

No device, thread or clock in here: the caller takes turns, and the same walk runs under the
engine's issuer and under the tests' simulator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from strata_cli.engine.experts.depth import DepthRule
from strata_cli.engine.experts.entries import EntryList
from strata_cli.engine.experts.gate import Gate

ANY_NUMBER = 1 << 60
LEAST_BATCHES = 2  # unfinished, or the link runs dry as one lands


class Turn(Enum):
    """Why a turn ended."""

    DONE = "done"
    STOPPED = "stopped"
    RING_FULL = "ring room: the consumer has not given back enough entries"
    LINK_FULL = "link room: as many copies as the depth allows are unfinished"
    UNLIKELY = "routing: what is next will probably not be wanted, and the link has enough to do"
    UNROUTED = "routing: the next layer's entries are not listed yet"
    UNSTAGED = "the stager: the next blob is not in pinned memory yet"


class Link(Protocol):
    """What carries the copies, in the order in which it is given them."""

    def copy(self, batch: Sequence[int]) -> None:
        """Queue the copies of these entries, ascending, each into its ring slot."""
        ...

    def has_landed(self, k: int) -> bool:
        """Whether the batch that ended with entry k is finished; raises if the link failed."""
        ...

    def is_staged(self, k: int) -> bool:
        """Whether an entry with a staging job can be copied; raises if staging failed."""
        ...


@dataclass(frozen=True, slots=True)
class WalkRules:
    """What bounds a walk.

    Attributes:
        ring_slots: slots of the ring.
        depth: copies that may be unfinished; None: any number.
        together: most entries handed to the link at once; never more than a quarter of the depth,
            since they land together and the link must not run dry meanwhile.
        ahead: copies that may be unfinished when one joins them that will probably turn out to be
            unneeded, see Walk.num_likely; they only keep the link from running dry. At least 1.
    """

    ring_slots: int
    depth: DepthRule | None
    together: int = 1
    ahead: int = ANY_NUMBER


class _Batch(NamedTuple):
    last: int
    entries: int


class Walk:
    """One chunk's entries, each copied or skipped, in order.

    ``consumed`` and the stop flag are written by the consumer's thread, everything else by the
    issuer's; each reads the other's. Entry k goes to slot k mod ring_slots.

    Args:
        entries: the list; may still grow.
        link: takes the copies.
        rules: bounds.
        gate: where routing is published; None: every entry is copied.
        num_likely: per layer, how many of its first entries will probably be routed; the others
            are copied `ahead` of their routing by rules of their own. None: all are likely.

    Attributes:
        issued: entries copied or skipped so far.
        copied, skipped: of those.
        copied_of_layer: the copied ones of each layer.
        unfinished: copies not known to have landed.
        consumed: entries that the consumer has given back.
    """

    def __init__(
        self,
        entries: EntryList,
        link: Link,
        rules: WalkRules,
        gate: Gate | None = None,
        num_likely: Sequence[int] | None = None,
    ) -> None:
        self.entries = entries
        self.rules = rules
        self.issued = 0
        self.copied = 0
        self.skipped = 0
        self.copied_of_layer = [0] * entries.num_layers
        self.unfinished = 0
        self.consumed = 0
        self._link = link
        self._rows = gate.rows if gate is not None else None
        self._num_likely = num_likely
        self._batches: deque[_Batch] = deque()
        self._was_full = False
        self._is_stopped = False
        self._last_turn = Turn.RING_FULL

    @property
    def is_stopped(self) -> bool:
        """Whether somebody asked for the end."""
        return self._is_stopped

    @property
    def landed(self) -> int:
        """Copies known to have landed."""
        return self.copied - self.unfinished

    def consume(self, count: int) -> None:
        """The consumer gives back its next entries; their slots have been released."""
        self.consumed += count

    def stop(self) -> None:
        """Ends the walk at its next turn. Any thread may call it."""
        self._is_stopped = True

    def turn(self) -> Turn:
        """Copy and skip all that can be now.

        Raises:
            StrataError: the link failed.
        """
        while (reason := self._advance()) is None:
            pass
        self._last_turn = reason
        return reason

    @property
    def spare(self) -> int:
        """Copies that may land before another turn: the link is never to run dry.

        A third of what may be queued, so that a turn finds work for several copies at once.
        """
        if self._last_turn is Turn.UNLIKELY and self._batches:
            return (self.unfinished - self._batches[-1].entries) // 3  # the last one is in reserve
        return self.unfinished // 3

    def report(self) -> str:
        """Where the walk is and what its last turn ended on, for messages."""
        k, depth = self.issued, self.rules.depth
        at = "end"
        if k < self.entries.count:
            entry = self.entries[k]
            at = f"layer {entry.layer} expert {entry.expert} job {entry.job}"
            row = None if self._rows is None else self._rows[entry.layer]
            at += ", layer published" if row is not None else ", layer not published"
        return (
            f"last turn: {self._last_turn.value}; entry {k} of {self.entries.count} ({at}); "
            f"consumed {self.consumed}, ring {self.rules.ring_slots}, copied {self.copied}, "
            f"skipped {self.skipped}, unfinished {self.unfinished}, ahead {self.rules.ahead}, "
            f"depth {depth.depth if depth is not None else 'any'}"
        )

    def _advance(self) -> Turn | None:
        """Drop entries and copy one batch; returns None if there may be more to do at once."""
        if self._is_stopped:
            return Turn.STOPPED
        is_complete = self.entries.is_complete  # before the count: see EntryList
        count, jobs, first = self.entries.count, self.entries.jobs, self.issued
        ring_end, together = self._ring_end(), self._together()
        room = self._link_room(together)
        most = min(room, together)
        batch: list[int] = []
        k = first
        while True:
            k = self._drop(k, count)
            if k == count:
                reason: Turn | None = Turn.DONE if is_complete else Turn.UNROUTED
            elif k >= ring_end:
                reason = Turn.RING_FULL
            elif len(batch) >= most:
                reason = Turn.LINK_FULL if room <= together else None
            elif batch and k - batch[0] >= self.rules.ring_slots:
                reason = None  # its slot is the batch's already, whose copies come in any order
            elif self._is_unlikely(k) and not self._has_room_ahead(len(batch)):
                reason = None if batch else Turn.UNLIKELY  # behind the batch there may be room
            elif jobs[k] >= 0 and not self._link.is_staged(k):
                reason = Turn.UNSTAGED
            else:
                batch.append(k)
                k += 1
                continue
            break
        if batch:
            self._copy(batch)
        self.skipped += k - first - len(batch)
        self.issued = k
        self._was_full = reason is Turn.LINK_FULL
        return reason

    def _copy(self, batch: list[int]) -> None:
        self._link.copy(batch)
        self.copied += len(batch)
        for k in batch:
            self.copied_of_layer[self.entries.layers[k]] += 1
        if self.rules.depth is not None:
            self._batches.append(_Batch(batch[-1], len(batch)))
            self.unfinished += len(batch)

    def _drop(self, k: int, count: int) -> int:
        """The first entry from k on that has to be copied, or count."""
        rows = self._rows
        if rows is None:
            return k
        layers, ranks, jobs = self.entries.layers, self.entries.ranks, self.entries.jobs
        while k < count:
            row = rows[layers[k]]
            if row is None or row[ranks[k]] or jobs[k] >= 0:
                break
            k += 1
        return k

    def _is_unlikely(self, k: int) -> bool:
        """Whether the routing of this entry is unknown and it will probably not be wanted."""
        if self._num_likely is None or self._rows is None:
            return False
        layer = self.entries.layers[k]
        is_behind = k - self.entries.starts[layer] >= self._num_likely[layer]
        return is_behind and self._rows[layer] is None

    def _has_room_ahead(self, more: int) -> bool:
        """Whether fewer copies than `ahead` would be unfinished behind so many more.

        A batch lands together, and the link must not run dry then: it is at most half of what may
        be ahead, and there is always room for one behind the last.
        """
        if 2 * more >= self.rules.ahead and more:
            return False
        if self.unfinished + more >= self.rules.ahead:
            self._count_landed()
        return self.unfinished + more < self.rules.ahead or len(self._batches) < LEAST_BATCHES

    def _ring_end(self) -> int:
        """Entries below this one have a slot that was given back."""
        return self.consumed + self.rules.ring_slots

    def _together(self) -> int:
        """Most entries of a batch."""
        rule, together = self.rules.depth, self.rules.together
        return together if rule is None else min(together, max(rule.depth // 4, 1))

    def _link_room(self, wanted: int) -> int:
        """How many more copies may be queued. Asks the link only if fewer than wanted may be."""
        rule = self.rules.depth
        if rule is None:
            return ANY_NUMBER
        if rule.depth - self.unfinished < wanted:
            self._count_landed()
            rule.polled(self.unfinished, was_full=self._was_full)
        return max(rule.depth - self.unfinished, 0)

    def _count_landed(self) -> None:
        while self._batches and self._link.has_landed(self._batches[0].last):
            self.unfinished -= self._batches.popleft().entries
