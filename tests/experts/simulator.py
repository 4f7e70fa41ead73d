"""A simulated link, ring, compute stream and stager under the engine's own walk and consumer.

One thread. Whenever the consumer waits, and now and then when it does not, a seeded choice lets the
issuer take a turn, a stream run one operation or the stager fetch one blob, so copies are early or
late against routing and reads as the case's weights have it. The checker raises Broken, naming the
invariant, as soon as one does not hold:

R1 each routed entry is copied exactly once
R2 it lands in slot k mod ring, and the consumer reads its own bytes there
R3 a skipped entry is unrouted, needs no stager, and its layer was published before
R4 no entry is both copied and skipped; copied + skipped = length of the list
R5 never more than `depth` copies queued and unfinished
R6 no copy is issued with k >= consumed + ring
R7 the count of issued entries only grows, and ends at the length of the list
R8 copies are issued in increasing k
R9 a copy into a slot runs behind every read of the slot's last copied occupant
R10 a skip changes no slot's content, event or flag
R11 with nothing published nothing is skipped, and the copies are those of the plain walk
R12 with all routing published first, the copies are the routed entries and the staged ones
R13 stop ends the walk in every wait state, and the thread joins
R14 a chunk's gate starts unpublished; a layer is published at most once
R15 the consumer's waits, reads and releases are the same with skipping switched off
R16 every shape of chunk terminates
R17 one wait covers a group, and one used event releases all its slots
R18 what is unlikely and not published joins fewer than `ahead` unfinished copies, or one batch, and
    fewer than half as many of its own batch

R11 to R15 compare runs or need threads: the tests of those names do that.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Event, Home, Stream, Tensor
from strata_cli.engine.device.host_arrays import resolve
from strata_cli.engine.device.host_memory import HostBuffer
from strata_cli.engine.device.row_copies import row_runs
from strata_cli.engine.experts.consumer import Consumer, ConsumerRules
from strata_cli.engine.experts.depth import DepthRule
from strata_cli.engine.experts.entries import EntryList, Ranking, list_entries, rank_experts
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.ring import Ring, RingLink
from strata_cli.engine.experts.walk import (
    ANY_NUMBER,
    LEAST_BATCHES,
    Link,
    Turn,
    Walk,
    WalkRules,
)

STAGING_PLACES = 2


class Broken(AssertionError):  # noqa: N818  it is the code under test that is
    """An invariant does not hold; the message begins with its number."""


def require(number: str, holds: bool, what: str) -> None:
    if not holds:
        raise Broken(f"{number}: {what}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One chunk, and how fast everything is.

    Attributes:
        resident, routed, staged: [L, E], by expert id.
        order: see rank_experts.
        blob_bytes: per layer; a slot is as large as the largest.
        ring_slots, depth, together, group, takes_landed: see the rules of walk and consumer.
        skips: with a gate and a depth; else the plain walk.
        ahead: see WalkRules.
        num_likely: see Walk.
        lists_routed: entries are listed when routing is known.
        lists_ahead: a layer's entries are listed, in another order, when the routing of the layer
            before is known.
        selects: of those, half; the others that are routed follow when that is known.
        weights: of the issuer, the link, the compute stream and the stager, in the choice of who
            moves next.
        seed: of that choice.
    """

    resident: NDArray[np.bool_]
    routed: NDArray[np.bool_]
    staged: NDArray[np.bool_]
    order: NDArray[np.int64] | None = None
    blob_bytes: tuple[int, ...]
    ring_slots: int
    depth: DepthRule
    together: int = 1
    group: int = 16
    takes_landed: bool = True
    skips: bool = True
    lists_routed: bool = False
    lists_ahead: bool = False
    selects: bool = False
    ahead: int = ANY_NUMBER
    num_likely: tuple[int, ...] | None = None
    weights: tuple[int, int, int, int] = (1, 1, 1, 1)
    seed: int = 0


@dataclass(frozen=True)
class Parts:
    """The classes under test; the tests of the checker put broken ones here."""

    walk: type[Walk] = Walk
    ring: type[Ring] = Ring
    gate: type[Gate] = Gate
    link: type[RingLink] = RingLink
    consumer: type[Consumer] = Consumer


class Outcome(NamedTuple):
    """What a chunk did: entries copied, in order; counts; the consumer's waits, reads, releases."""

    copies: list[int]
    num_copied: int
    num_skipped: int
    consumer_log: list[str]
    routed_entries: set[int]
    staged_entries: set[int]
    length: int


@dataclass
class Mark:
    """One record of an event."""

    is_reached: bool = False


class SimEvent:
    def __init__(self) -> None:
        self.mark: Mark | None = None

    def query(self) -> bool:
        return self.mark is None or self.mark.is_reached

    def close(self) -> None:
        self.mark = None


class Operation(NamedTuple):
    run: Callable[[], None]
    is_ready: Callable[[], bool]


class SimStream:
    """Operations in order; step() runs the first one, if nothing holds it up."""

    def __init__(self, on_write: Callable[[Tensor], None], log: list[str]) -> None:
        self.operations: deque[Operation] = deque()
        self._on_write = on_write
        self._log = log

    def step(self) -> bool:
        if not self.operations or not self.operations[0].is_ready():
            return False
        self.operations.popleft().run()
        return True

    def copy(self, dst: Tensor, src: Tensor) -> None:
        self.copy_many([(dst, src)])

    def copy_many(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        for dst, src in pairs:
            self._add(partial(self._copy, dst, src))

    def copy_rows(
        self, dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
    ) -> int:
        runs = row_runs(dst, dst_rows, src, src_rows)
        self.copy_many(runs.pairs(dst, src))
        return len(runs.rows)

    def call(self, function: Callable[[], None]) -> None:
        self._add(function)

    def record(self, event: SimEvent) -> None:
        self._log.append("record")
        mark = Mark()
        self._add(partial(setattr, mark, "is_reached", True))
        event.mark = mark

    def wait(self, event: SimEvent) -> None:
        self._log.append("wait")
        mark = event.mark
        if mark is not None:
            self._add(lambda: None, lambda: mark.is_reached)

    def _copy(self, dst: Tensor, src: Tensor) -> None:
        self._on_write(dst)
        np.copyto(resolve(dst), resolve(src))

    def _add(self, run: Callable[[], None], is_ready: Callable[[], bool] = lambda: True) -> None:
        self.operations.append(Operation(run, is_ready))


class SimDevice:
    def event(self) -> SimEvent:
        return SimEvent()


class SimStager:
    """Fetches the blobs of jobs, in order, into a few places that copies must first leave."""

    def __init__(self, sources: Callable[[int], NDArray[np.uint8]], place_bytes: int) -> None:
        self._sources = sources
        self._buffer = HostBuffer(np.zeros(STAGING_PLACES * place_bytes, np.uint8), Home.PINNED)
        self._place_bytes = place_bytes
        self._sizes: list[int] = []
        self._sent: list[Event] = []
        self.num_jobs = 0

    def step(self) -> bool:
        job = len(self._sizes)
        last = job - STAGING_PLACES
        if job == self.num_jobs or (last >= 0 and not self._is_free(last)):
            return False
        source = self._sources(job)
        self._sizes.append(source.size)
        resolve(self.blob(job))[:] = source
        return True

    def _is_free(self, job: int) -> bool:
        return job < len(self._sent) and self._sent[job].query()

    def is_ready(self, job: int) -> bool:
        return job < len(self._sizes)

    def blob(self, job: int) -> Tensor:
        at = job % STAGING_PLACES * self._place_bytes
        return Tensor(self._buffer, at, (self._sizes[job],), np.dtype(np.uint8))

    def sent(self, job: int, copied: Event) -> None:
        require("R8", job == len(self._sent), f"staged blob {job} is sent after {len(self._sent)}")
        self._sent.append(copied)


@dataclass
class Books:
    """What the checker remembers of a chunk."""

    copied: list[int] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    was_copied: set[int] = field(default_factory=set)
    num_landed: int = 0
    batch_ends: list[int] = field(default_factory=list)
    queued: dict[int, deque[int]] = field(default_factory=dict)
    occupant: dict[int, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    issued: int = 0


class World:
    """One chunk of one case. Also the issuer of its consumer, and the checker of its link."""

    def __init__(self, case: Case, parts: Parts) -> None:
        self.case = case
        self._random = random.Random(case.seed)
        self.log: list[str] = []
        self.books = Books()
        self.ranking = rank_experts(case.resident, case.order)
        self.routed = np.take_along_axis(case.routed, self.ranking.expert_at, axis=1)
        self.blobs = [stamped_blobs(case, layer) for layer in range(len(case.blob_bytes))]
        slot_bytes = max(case.blob_bytes)
        self.slots = Tensor.over(
            HostBuffer(np.zeros(case.ring_slots * slot_bytes, np.uint8), Home.DEVICE),
            (case.ring_slots, slot_bytes),
            np.uint8,
        )
        self.copies = SimStream(self._before_write, [])
        self.reads = SimStream(lambda _dst: None, self.log)
        self.entries = self._entries(self.ranking)
        self.stager = SimStager(self._staged_source, slot_bytes)
        self.stager.num_jobs = self.entries.num_jobs
        self.ring = parts.ring(
            cast(Device, SimDevice()),
            self.slots,
            cast(Stream, self.copies),
            cast(Stream, self.reads),
        )
        self.gate = parts.gate(*case.resident.shape) if case.skips else None
        self.published: set[int] = set()
        self._link: Link = parts.link(self.ring, self.entries, self.blobs, self.stager)
        depth = case.depth if case.skips else None
        rules = WalkRules(case.ring_slots, depth, case.together, case.ahead)
        self.walk = parts.walk(self.entries, self, rules, self.gate, case.num_likely)
        grouping = ConsumerRules(
            group=case.group,
            takes_landed=case.takes_landed,
            completes=case.lists_ahead and case.selects,
        )
        self.consumer = parts.consumer(
            self.ranking, self.entries, self.ring, self, self.gate, grouping, case.staged
        )
        self.num_waits = 0
        self.waited_s = 0.0
        self.turns: Counter[Turn] = Counter()

    def _entries(self, ranking: Ranking) -> EntryList:
        if self.case.lists_ahead:
            entries = EntryList(ranking.num_layers)
            self._list(entries, 0)
            return entries
        if self.case.lists_routed:
            return EntryList(ranking.num_layers)
        return list_entries(ranking, self.case.staged)

    def _list(self, entries: EntryList, layer: int) -> None:
        ranks = np.arange(self.ranking.num_resident[layer], self.ranking.num_experts)
        selects = self.case.selects
        if selects:
            ranks = ranks[: len(ranks) // 2]
        entries.add_layer(self.ranking, ranks, self.case.staged[layer], may_grow=selects)

    def _expect(self, layer: int) -> None:
        """The order of the layer turns out to be another one."""
        scores = np.random.default_rng(self.case.seed + layer).random(self.ranking.num_experts)
        self.ranking.reorder(layer, scores.astype(np.float32))
        self.routed[layer] = self.case.routed[layer, self.ranking.expert_at[layer]]
        self._list(self.entries, layer)

    def _staged_source(self, job: int) -> NDArray[np.uint8]:
        k = self.entries.jobs.index(job)
        blob: NDArray[np.uint8] = resolve(self._blob(k))
        return blob

    def _blob(self, k: int) -> Tensor:
        expert = self.entries.experts[k]
        blob = self.blobs[self.entries.layers[k]].rows(expert, expert + 1)
        return blob.reshape(blob.size)

    # The chunk, as the engine's compute thread works through it.

    def run(self, publish_first: bool = False) -> Outcome:
        num_layers = self.ranking.num_layers
        if publish_first:
            assert self.gate is not None
            for layer in range(num_layers):
                self.gate.publish(layer, self.routed[layer])
                self.published.add(layer)
        else:
            self.steps()
        for layer in range(num_layers):
            self.steps()
            self._publish(layer, to_gate=not publish_first)
            self._read_layer(layer)
        self.finish()
        return self._outcome()

    def _publish(self, layer: int, *, to_gate: bool) -> None:
        start = np.concatenate([[0], np.cumsum(self.routed[layer])])
        gate = self.consumer._gate
        if not to_gate:
            self.consumer._gate = None
        self.published.add(layer)
        self.consumer.publish(layer, start)
        self.consumer._gate = gate
        if self.case.lists_ahead and layer + 1 < self.ranking.num_layers:
            self._expect(layer + 1)
        self.stager.num_jobs = self.entries.num_jobs

    def _read_layer(self, layer: int) -> None:
        entry_of = {self.entries.ranks[k]: k for k in self.entries.of_layer(layer)}
        seen: list[int] = []
        for group in self.consumer.groups(layer):
            ranks = [rank for rank in group if self.routed[layer, rank]]
            seen += ranks
            entries = [entry_of[rank] for rank in ranks if rank in entry_of]
            self.steps()
            for k in entries:
                self.log.append(f"read {k}")
                self.reads.call(partial(self._read, k))
            if entries:
                self.log.append(f"group {entries}")
            self.steps()
        wanted = np.flatnonzero(self.routed[layer]).tolist()
        require("R1", seen == wanted, f"layer {layer}: groups cover {seen}, routed are {wanted}")

    def finish(self) -> None:
        self._until(lambda: self.walk.issued == len(self.entries), "the end of the walk")
        self._until(lambda: not self.copies.operations and not self.reads.operations, "streams")

    def _outcome(self) -> Outcome:
        books, walk = self.books, self.walk
        layers, ranks = self.entries.layers, self.entries.ranks
        routed = {k for k in range(len(self.entries)) if self.routed[layers[k], ranks[k]]}
        staged = {k for k, job in enumerate(self.entries.jobs) if job >= 0}
        times = [books.copied.count(k) for k in sorted(routed)]
        require("R1", times == [1] * len(routed), f"routed entries were copied {times} times")
        require("R2", books.read == routed, f"read {books.read}, routed are {routed}")
        total = walk.copied + walk.skipped
        require("R4", total == len(self.entries), f"{total} of {len(self.entries)} accounted for")
        require("R4", walk.copied == len(books.copied), f"{walk.copied} counted as copied")
        of_layers = [
            sum(layers[k] == i for k in books.copied) for i in range(self.entries.num_layers)
        ]
        require("R4", walk.copied_of_layer == of_layers, f"counted {walk.copied_of_layer} by layer")
        require("R7", walk.issued == len(self.entries), f"issued ends at {walk.issued}")
        self._check_groups()
        return Outcome(
            books.copied, walk.copied, walk.skipped, self.log, routed, staged, len(self.entries)
        )

    # The issuer of the consumer.

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def nudge(self) -> None:
        self.steps()

    def require(self, k: int) -> None:
        self._until(lambda: self.walk.issued > k, f"entry {k}")

    def await_event(self, event: Event, what: str) -> None:
        self._until(event.query, what)

    # Who moves next.

    def steps(self) -> None:
        """Some moves, while the consumer does something else."""
        for _ in range(self._random.randrange(6)):
            self._move()

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        while not reached():
            if not self._move() and not any(move() for move in self._movers()):
                require(
                    "R16", reached(), f"nothing moves, waiting for {what}; {self.walk.report()}"
                )

    def _movers(self) -> list[Callable[[], bool]]:
        return [self.turn, self.copies.step, self.reads.step, self.stager.step]

    def _move(self) -> bool:
        return self._random.choices(self._movers(), self.case.weights)[0]()

    def turn(self) -> bool:
        """A turn of the walk; returns whether it issued anything."""
        books, walk = self.books, self.walk
        before, events = books.issued, list(self.ring.copied)
        flags = (list(self.ring._used), list(self.ring._released))
        queued, num_copied = len(self.copies.operations), len(books.copied)
        walk.turn()
        copied = books.copied[num_copied:]
        require("R7", walk.issued >= before, f"issued went from {before} to {walk.issued}")
        for k in sorted(set(range(before, walk.issued)) - set(copied)):
            self._check_skip(k)
        require(
            "R10", flags == (self.ring._used, self.ring._released), "a turn changed used events"
        )
        slots = {k % self.case.ring_slots for k in copied}
        changed = {s for s, event in enumerate(self.ring.copied) if event is not events[s]}
        require("R10", changed <= slots, f"copied events of {changed} changed, copies to {slots}")
        is_quiet = bool(copied) or len(self.copies.operations) == queued
        require("R10", is_quiet, "a turn without copies enqueued something")
        books.issued = walk.issued
        return walk.issued > before

    def _check_skip(self, k: int) -> None:
        entry = self.entries[k]
        is_known = entry.layer in self.published
        require("R3", is_known, f"entry {k} was skipped before layer {entry.layer} was published")
        is_routed = bool(self.routed[entry.layer, entry.rank])
        require("R3", not is_routed, f"routed entry {k} was skipped")
        require("R3", entry.job < 0, f"staged entry {k} was skipped")
        require("R4", k not in self.books.was_copied, f"entry {k} was copied and skipped")
        self.books.skipped.add(k)

    # The link of the walk.

    def copy(self, batch: Sequence[int]) -> None:
        books, walk = self.books, self.walk
        slots = {k % self.case.ring_slots for k in batch}
        require("R9", len(slots) == len(batch), f"{batch} go to the same slots, in any order")
        for k in batch:
            require("R1", k not in books.was_copied, f"entry {k} is copied again")
            require("R4", k not in books.skipped, f"entry {k} was skipped and is copied")
            require(
                "R8", not books.copied or k > books.copied[-1], f"{k} after {books.copied[-1:]}"
            )
            end = walk.consumed + self.case.ring_slots
            require("R6", k < end, f"entry {k} is issued, slots are free up to {end}")
            books.copied.append(k)
            books.was_copied.add(k)
            books.queued.setdefault(k % self.case.ring_slots, deque()).append(k)
        queued = len(books.copied) - books.num_landed
        if self.case.skips:
            depth = self.case.depth.depth
            require("R5", queued <= depth, f"{queued} copies unfinished at depth {depth}")
            self._check_ahead(batch, queued)
        books.batch_ends.append(len(books.copied))
        self._link.copy(batch)

    def _check_ahead(self, batch: Sequence[int], queued: int) -> None:
        if self.case.num_likely is None:
            return
        before = queued - len(batch)
        for unfinished, k in enumerate(batch, before):
            layer = self.entries.layers[k]
            at = k - self.entries.starts[layer]
            if layer not in self.published and at >= self.case.num_likely[layer]:
                what = f"entry {k} joins {unfinished} copies, ahead is {self.case.ahead}"
                more = unfinished - before
                is_half = not more or 2 * more < self.case.ahead
                landed = self.books.num_landed
                batches = sum(end > landed for end in self.books.batch_ends)
                has_room = unfinished < self.case.ahead or batches < LEAST_BATCHES
                require("R18", has_room and is_half, what)

    def has_landed(self, k: int) -> bool:
        return self._link.has_landed(k)

    def is_staged(self, k: int) -> bool:
        return self._link.is_staged(k)

    # What the streams do to the slots.

    def _before_write(self, dst: Tensor) -> None:
        slot_bytes = self.ring.slot_bytes
        first, last = (
            dst.offset_bytes // slot_bytes,
            (dst.offset_bytes + dst.nbytes - 1) // slot_bytes,
        )
        for slot in range(first, last + 1):
            books = self.books
            k = books.occupant.get(slot)
            if k is not None and self.routed[self.entries.layers[k], self.entries.ranks[k]]:
                require("R9", k in books.read, f"slot {slot} is written before entry {k} was read")
            queued = books.queued.get(slot)
            require("R2", bool(queued), f"slot {slot} is written by no entry of its own")
            assert queued is not None
            books.occupant[slot] = queued.popleft()
            books.num_landed += 1

    def _read(self, k: int) -> None:
        slot = k % self.case.ring_slots
        expected = resolve(self._blob(k))
        found = resolve(self.slots)[slot, : expected.size]
        require("R2", bool((found == expected).all()), f"entry {k} is not what slot {slot} holds")
        require("R2", k not in self.books.read, f"entry {k} is read twice")
        self.books.read.add(k)

    def _check_groups(self) -> None:
        """R17, from the compute stream: wait, reads of a group, record."""
        kinds = [line.split()[0] for line in self.log]
        waits, records, groups = (kinds.count(kind) for kind in ("wait", "record", "group"))
        require("R17", waits == groups, f"{waits} waits for {groups} groups")
        require("R17", records == groups, f"{records} used events for {groups} groups")


def stamped_blobs(case: Case, layer: int) -> Tensor:
    """All blobs of a layer; each one's bytes say whose they are."""
    num_experts, nbytes = case.resident.shape[1], case.blob_bytes[layer]
    stamps = 1 + layer * num_experts + np.arange(num_experts)
    data = (stamps[:, None] * 31 + np.arange(nbytes) * (stamps[:, None] % 7 + 1)).astype(np.uint8)
    return Tensor.over(HostBuffer(data.reshape(-1), Home.PINNED), data.shape, np.uint8)


def simulate(case: Case, parts: Parts | None = None, *, publish_first: bool = False) -> Outcome:
    """Work through one chunk, checking everything on the way."""
    return World(case, parts or Parts()).run(publish_first)
