"""One chunk's stream of experts, put together: list, gate, walk, issuer and consumer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Event, Tensor
from strata_cli.engine.experts.consumer import GROUP_EXPERTS, Consumer, ConsumerRules
from strata_cli.engine.experts.depth import MOST_DEPTH, AutoDepth, DepthRule, FixedDepth
from strata_cli.engine.experts.entries import EntryList, Ranking, list_entries
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.issuer import InlineIssuer, Issuer, ThreadIssuer
from strata_cli.engine.experts.keeping import KeptBlobs
from strata_cli.engine.experts.ring import Ring, RingLink, StagedBlobs
from strata_cli.engine.experts.walk import Turn, Walk, WalkRules
from strata_cli.errors import StallError

logger = logging.getLogger(__name__)

SMALL_RING_SLOTS = 8  # a ring of at most so many is for routed experts only
TOGETHER = 16
AHEAD = 16  # copies: what the link carries while the issuer's thread wakes up


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How a chunk's experts are streamed. No result depends on it.

    Attributes:
        skips_unrouted: do not copy what routing has shown to be unneeded.
        depth: copies that may be queued and unfinished, 1..256; 0: as many as the link turns out
            to need. Unlimited without skips_unrouted.
        ahead: the same where the next one will perhaps turn out to be unneeded: its routing is
            not known, and it is not among the likely ones; 0: few with an automatic depth, else
            the depth.
        has_thread: a thread issues the copies, else the compute thread between its launches.
        together: most entries per call of the device; 1: each by itself.
        group: experts of a group that waits for copies.
        takes_landed: groups grow by what has landed already.
        watchdog_s: seconds without progress that end a wait; 0: none do.
    """

    skips_unrouted: bool = True
    depth: int = 0
    ahead: int = 0
    has_thread: bool = True
    together: int = TOGETHER
    group: int = GROUP_EXPERTS
    takes_landed: bool = True
    watchdog_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Blobs:
    """Where the experts' bytes are.

    Attributes:
        layers: per layer, all experts' blobs side by side, uint8 [E, blob_bytes].
        needs_stager: experts whose blobs cannot be copied from there, [L, E]; None: none.
        stager: brings those into pinned memory.
    """

    layers: Sequence[Tensor]
    needs_stager: NDArray[np.bool_] | None = None
    stager: StagedBlobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of a chunk before it begins. No result depends on it.

    Attributes:
        learnt: what earlier chunks found out about the depth that the link needs, for an automatic
            depth; None: nothing.
        num_likely: per layer, how many of the first entries will probably be routed; None: none.
        foresees: the first layer alone is listed as the chunk begins, every other one by expect().
            Not with a small ring.
        selects: so few experts are routed that only likely ones are listed ahead of the routing,
            each layer's num_likely, and the others when it is known. For a stream that foresees and
            skips.
    """

    learnt: AutoDepth | None = None
    num_likely: Sequence[int] | None = None
    foresees: bool = False
    selects: bool = False


UNKNOWN = Outlook()


class StreamCounts(NamedTuple):
    """What a chunk's stream did.

    Attributes:
        copied, skipped: entries.
        copied_bytes: handed to the device.
        num_waits: how often the compute thread waited for an entry to be issued.
        waited_us: for how long.
        num_copies: pieces that they were copied in; neighbouring blobs are one.
        copied_of_layer: entries of each layer.
        turns: of the issuer, by what ended them.
    """

    copied: int
    skipped: int
    copied_bytes: int
    num_waits: int
    waited_us: int
    num_copies: int
    copied_of_layer: tuple[int, ...]
    turns: Mapping[Turn, int]


class ChunkStream:
    """The experts of one chunk on their way to the device; a context manager.

    Use from the compute thread: await_event(), publish() and groups() for each layer in turn, then
    finish(). Leaving early stops the issuer; copies that are queued then still run: Ring.drain().

    Args:
        ranking: of the experts.
        ring: of at most SMALL_RING_SLOTS slots: only routed experts are copied, when routing is
            known; with more, every expert that is not resident, ahead of it.
        blobs: where the bytes are.
        options: see StreamOptions.
        kept: where blobs are kept for the next chunk; None: nowhere. What is kept already is
            resident in the ranking.
        outlook: see Outlook.

    Attributes:
        entries: the chunk's list. For a small ring it grows with publish().
        foresees: whether it grows with expect().
        selects: whether that adds likely entries alone, and publish() those that it missed.

    Raises:
        ConfigError: the depth is out of range.
        ShapeError: a blob is larger than a slot.
    """

    def __init__(
        self,
        ranking: Ranking,
        ring: Ring,
        blobs: Blobs,
        options: StreamOptions,
        kept: KeptBlobs | None = None,
        outlook: Outlook = UNKNOWN,
    ) -> None:
        is_small = ring.num_slots <= SMALL_RING_SLOTS
        skips = options.skips_unrouted and not is_small
        self._ranking, self._staged = ranking, blobs.needs_stager
        self.foresees = outlook.foresees and not is_small and ranking.num_layers > 0
        self.selects = outlook.selects and self.foresees and skips
        nobody = [0] * ranking.num_layers
        num_likely = outlook.num_likely or nobody
        self._num_likely = [*(nobody if self.selects else num_likely)]
        if is_small or self.foresees:
            self.entries = EntryList(ranking.num_layers)
            if self.foresees:
                self._list(0, num_likely[0])
        else:
            self.entries = list_entries(ranking, blobs.needs_stager)
        gate = Gate(ranking.num_layers, ranking.num_experts) if skips else None
        self._link = RingLink(ring, self.entries, blobs.layers, blobs.stager)
        learnt = outlook.learnt
        if self.selects:  # next to nothing is listed in vain
            learnt = AutoDepth(min(ring.num_slots, MOST_DEPTH))
        depth = _depth_rule(options.depth, learnt) if skips else None
        ahead = options.ahead or options.depth or AHEAD
        rules = WalkRules(ring.num_slots, depth, options.together, ahead)
        self._walk = Walk(self.entries, self._link, rules, gate, self._num_likely)
        issues = ThreadIssuer if options.has_thread else InlineIssuer
        self._issuer: Issuer = issues(self._walk, options.watchdog_s, ring.trace)
        self._ring = ring
        grouping = ConsumerRules(
            group=options.group,
            takes_landed=options.takes_landed,
            kept=kept,
            completes=self.selects,
        )
        self._consumer = Consumer(
            ranking, self.entries, ring, self._issuer, gate, grouping, blobs.needs_stager
        )

    @property
    def counts(self) -> StreamCounts:
        """What was done so far."""
        walk, issuer, link = self._walk, self._issuer, self._link
        waited_us = round(issuer.waited_s * 1e6)
        return StreamCounts(
            walk.copied,
            walk.skipped,
            link.copied_bytes,
            issuer.num_waits,
            waited_us,
            link.num_copies,
            tuple(walk.copied_of_layer),
            dict(issuer.turns),
        )

    @property
    def use(self) -> NDArray[np.int64]:
        """Tokens of each expert in the layers published so far, [L, E], by id."""
        return self._consumer.use

    def publish(
        self,
        layer: int,
        expert_start: NDArray[np.integer],
        elsewhere: NDArray[np.integer] | None = None,
    ) -> None:
        """See Consumer.publish."""
        self._consumer.publish(layer, expert_start, elsewhere)

    @property
    def lists_routed(self) -> bool:
        """Whether a layer's entries are known only when it is published."""
        return self._consumer.lists_routed

    def expect(self, layer: int, scores: NDArray[np.float32], num_likely: int) -> None:
        """List the entries of the next layer, before it is published, if the stream foresees.

        Args:
            layer: the next one.
            scores: how much each expert is expected to be used, [E]; the ranking changes with it.
            num_likely: how many of the first entries will probably be routed; if the stream
                selects, no others are listed.
        """
        self._ranking.reorder(layer, scores)
        self._list(layer, num_likely)
        self._issuer.nudge()

    def _list(self, layer: int, num_likely: int) -> None:
        first, stop = self._ranking.num_resident[layer], self._ranking.num_experts
        if self.selects:
            stop = first + num_likely
        else:
            self._num_likely[layer] = num_likely
        staged = None if self._staged is None else self._staged[layer]
        ranks = np.arange(first, stop)
        self.entries.add_layer(self._ranking, ranks, staged, may_grow=self.selects)

    def groups(self, layer: int) -> Iterator[range]:
        """See Consumer.groups."""
        return self._consumer.groups(layer)

    def await_event(self, event: Event, what: str) -> None:
        """Wait for the device; see Issuer.await_event."""
        self._consumer.await_event(event, what)

    def finish(self) -> None:
        """Blocks until every entry is copied or skipped; the last copies may still be under way.

        Raises:
            StrataError: a copy failed, or nothing moved.
        """
        self._issuer.finish()
        if self._ring.trace.is_on:
            self._trace_end()

    def stop(self) -> None:
        """Ends the stream and whoever waits for it. Any thread may call it."""
        self._issuer.stop()

    def report(self) -> str:
        """Where the stream is, for messages."""
        return self._walk.report()

    def _trace_end(self) -> None:
        trace, walk = self._ring.trace, self._walk
        for layer, copied in enumerate(walk.copied_of_layer):
            entries = self.entries.of_layer(layer)
            trace.event(
                "layer.entries",
                layer=layer,
                first=entries.start,
                entries=len(entries),
                copied=copied,
                skipped=len(entries) - copied,
            )
        counts = self.counts
        trace.event(
            "stream.end",
            copied=counts.copied,
            skipped=counts.skipped,
            bytes=counts.copied_bytes,
            pieces=counts.num_copies,
        )
        self._ring.flush_trace()

    def __enter__(self) -> Self:
        self._issuer.start()
        return self

    def close(self) -> None:
        """End the issuer. Safe to call twice.

        Raises:
            StallError: the device hangs.
        """
        self._issuer.close()

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        except StallError as error:
            if exc[0] is None:
                raise
            logger.warning("%s", error)  # the first exception says more


def _depth_rule(depth: int, learnt: AutoDepth | None) -> DepthRule:
    return FixedDepth(depth) if depth else learnt or AutoDepth()
