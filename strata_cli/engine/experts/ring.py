"""The ring: slots in device memory that a prompt's copies pass through, and the events between.

Entry k uses slot k mod num_slots. A copied event says that a slot's bytes are there, a used event
that nobody reads them any more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from strata_cli.engine.device.base import Device, Event, Home, Stream, Tensor
from strata_cli.engine.device.timing import Spans
from strata_cli.engine.experts.entries import EntryList, RingShape
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.errors import DeviceError, ShapeError

U8 = np.dtype(np.uint8)

Pair: TypeAlias = tuple[Tensor, Tensor]


class BlobRows(NamedTuple):
    """Entries of one layer that come straight from its blobs.

    Attributes:
        entries: ascending.
        blobs: of all the layer's experts, uint8 [E, blob_bytes].
        experts: of each entry.
    """

    entries: Sequence[int]
    blobs: Tensor
    experts: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return len(self.entries) * self.blobs.shape[1]


class Queued(NamedTuple):
    """Copies on their way: the event behind them, and in how many pieces they are."""

    event: Event
    pieces: int


class Ring:
    """Slots and their events. It outlives chunks: what one leaves behind guards the next.

    ``copied`` and ``_waited`` are written by the issuer's thread; ``_used``, ``_released`` and
    ``_num_releases`` by the consumer's. Neither looks at a slot before the other is done with it:
    the issuer comes to it when its last entry was consumed, the consumer when its entry was issued.

    Args:
        device: makes the events.
        slots: uint8 [num_slots, slot_bytes], device memory; the ring does not own it.
        copies: the stream that carries the copies; owned by whoever issues.
        reads: the stream whose kernels read the slots; owned by the consumer.
        trace: told of every copy, and of every wait of one stream for the other.

    Attributes:
        copied: per slot, the event behind its latest copy.
        copy_spans, read_spans: what the two streams spent their time on; each is used by the
            thread that owns the stream.
    """

    def __init__(
        self, device: Device, slots: Tensor, copies: Stream, reads: Stream, trace: Trace = NO_TRACE
    ) -> None:
        num_slots, self.slot_bytes = slots.shape
        self.num_slots = num_slots
        self.copies = copies
        self.reads = reads
        self._slots = slots
        self._copied_events = [device.event() for _ in range(num_slots)]
        self._used_events = [device.event() for _ in range(num_slots)]
        self.copied: list[Event] = list(self._copied_events)
        self._used: list[Event] = list(self._used_events)
        self._released = [0] * num_slots
        self._num_releases = 0
        self._waited = 0
        self._rooms: dict[int, list[Tensor]] = {}
        self.trace = trace
        self.copy_spans, self.read_spans = Spans(device, trace), Spans(device, trace)

    @property
    def shape(self) -> RingShape:
        """Where the slots are."""
        return RingShape(self._slots.address, self.slot_bytes, self.num_slots)

    def room(self, slot: int, nbytes: int) -> Tensor:
        """The first bytes of a slot, and of those behind it where nbytes needs more than one."""
        rooms = self._rooms.get(nbytes)
        if rooms is None:
            rooms = self._rooms[nbytes] = [self._room(s, nbytes) for s in range(self.num_slots)]
        return rooms[slot]

    def _room(self, slot: int, nbytes: int) -> Tensor:
        offset = self._slots.offset_bytes + slot * self.slot_bytes
        return Tensor(self._slots.buffer, offset, (nbytes,), U8)

    def copy_in(
        self, batch: Sequence[int], rows: Sequence[BlobRows], staged: Sequence[Pair]
    ) -> Queued:
        """Queue the copies of these entries, behind the last reads of their slots.

        Args:
            batch: entries, ascending.
            rows: those that come straight from their layers' blobs.
            staged: where the bytes of the others go and come from.
        """
        slots = [k % self.num_slots for k in batch]
        self._await_reads(slots)
        start = self.copy_spans.mark(self.copies)
        pieces = len(staged)
        for part in rows:
            to = self._rows_of(part.entries)
            pieces += self.copies.copy_rows(self._slots, to, part.blobs, part.experts)
        if staged:
            self.copies.copy_many(staged)
        event = self._copied_events[slots[-1]]
        self.copies.record(event)
        for slot in slots:
            self.copied[slot] = event
        if start is not None:
            nbytes = sum(part.nbytes for part in rows) + sum(dst.nbytes for dst, _ in staged)
            self.copy_spans.span(
                "copy.run",
                start,
                self.copy_spans.mark(self.copies),
                first=batch[0],
                last=batch[-1],
                entries=len(batch),
                slot=slots[0],
                pieces=pieces,
                bytes=nbytes,
            )
        return Queued(event, pieces)

    def _rows_of(self, entries: Sequence[int]) -> list[int]:
        """The slots that the bytes of these entries go to."""
        return [k % self.num_slots for k in entries]

    def await_copy(self, k: int) -> None:
        """Later reads wait for entry k, which is issued, and for all copies queued before it."""
        self.reads.wait(self.copied[k % self.num_slots])

    def has_landed(self, k: int) -> bool:
        """Whether the copy of entry k, which is issued and not given back, is finished."""
        return self.copied[k % self.num_slots].query()

    def release(self, entries: Sequence[int]) -> Event:
        """The reads of these entries are enqueued: their slots may be written behind them.

        Returns:
            the event behind the reads, until one of the slots is released again.
        """
        slots = [k % self.num_slots for k in entries]
        event = self._used_events[slots[-1]]
        self.reads.record(event)
        self._num_releases += 1
        for slot in slots:
            self._used[slot] = event
            self._released[slot] = self._num_releases
        return event

    def drain(self) -> None:
        """Blocks until no copy is under way; with a trace, until no read is either.

        Raises what failed.
        """
        self.copies.synchronize()
        self.finish_trace()

    def finish_trace(self) -> None:
        """Blocks until all that the trace was told of both streams is over and written."""
        self.copy_spans.finish()
        self.read_spans.finish()

    def flush_trace(self) -> None:
        """Write what is over of both streams. For the consumer's thread, once the issuer ended."""
        self.copy_spans.flush()
        self.read_spans.flush()

    def close(self) -> None:
        """Gives the events back. Drain first."""
        for event in (*self._copied_events, *self._used_events):
            event.close()
        self.copy_spans.close()
        self.read_spans.close()

    def _await_reads(self, slots: Sequence[int]) -> None:
        """Later copies wait for the last release among the slots, unless they do already.

        Reads are in order too, so behind that release all earlier ones are past.
        """
        last = max(slots, key=self._released.__getitem__)
        release = self._released[last]
        if release > self._waited:
            start = self.copy_spans.mark(self.copies)
            self.copies.wait(self._used[last])
            self.copy_spans.span("ring.wait", start, self.copy_spans.mark(self.copies), slot=last)
            self._waited = release


class StagedBlobs(Protocol):
    """Blobs that helper threads bring into pinned memory, in the order of their jobs."""

    def is_ready(self, job: int) -> bool:
        """Whether the blob is there; raises what reading it failed with."""
        ...

    def blob(self, job: int) -> Tensor:
        """The blob of a job that is ready: uint8 [nbytes], pinned."""
        ...

    def sent(self, job: int, copied: Event) -> None:
        """The blob's copy is queued; its place is free again once the event is reached."""
        ...


class RingLink:
    """Carries one chunk's entries into the ring: neighbouring blobs as one copy.

    Args:
        ring: where to.
        entries: the chunk's list; may still grow.
        blobs: per layer, all experts' blobs side by side, uint8 [E, blob_bytes]; pinned, except
            for experts whose entries have a staging job.
        staged: where those come from; None if there are none.

    Attributes:
        copied_bytes: handed to the device so far.
        num_copies: in so many pieces; neighbours count as one.

    Raises:
        ShapeError: a blob is larger than a slot.
    """

    def __init__(
        self,
        ring: Ring,
        entries: EntryList,
        blobs: Sequence[Tensor],
        staged: StagedBlobs | None = None,
    ) -> None:
        largest = max((tensor.shape[1] for tensor in blobs), default=0)
        if largest > ring.slot_bytes:
            raise ShapeError(f"a blob of {largest} bytes does not fit a slot of {ring.slot_bytes}")
        self._ring = ring
        self._entries = entries
        self._blobs = blobs
        self._staged = staged
        self.copied_bytes = 0
        self.num_copies = 0

    def copy(self, batch: Sequence[int]) -> None:
        """See Link."""
        jobs = self._entries.jobs
        staged = [k for k in batch if jobs[k] >= 0]
        rows = self._blob_rows(batch if not staged else [k for k in batch if jobs[k] < 0])
        queued = self._ring.copy_in(batch, rows, [self._staged_pair(k) for k in staged])
        self.num_copies += queued.pieces
        self.copied_bytes += sum(part.nbytes for part in rows)
        for k in staged:
            self._stager.sent(jobs[k], queued.event)

    def has_landed(self, k: int) -> bool:
        """See Link."""
        return self._ring.has_landed(k)

    def is_staged(self, k: int) -> bool:
        """See Link."""
        return self._stager.is_ready(self._entries.jobs[k])

    @property
    def _stager(self) -> StagedBlobs:
        if self._staged is None:
            raise DeviceError("a chunk lists blobs outside pinned memory, and has no stager")
        return self._staged

    def _blob_rows(self, batch: Sequence[int]) -> list[BlobRows]:
        """The entries of a batch that need no stager, layer by layer."""
        layers, rows, at = self._entries.layers, [], 0
        while at < len(batch):
            layer = layers[batch[at]]
            end = self._entries.starts[layer + 1]
            stop = len(batch) if batch[-1] < end else bisect_left(batch, end, at)
            part = batch[at:stop]
            rows.append(BlobRows(part, self._blobs[layer], self._experts(part)))
            at = stop
        return rows

    def _experts(self, part: Sequence[int]) -> list[int]:
        experts = self._entries.experts
        first, last = part[0], part[-1]
        if last - first == len(part) - 1:
            return experts[first : last + 1]
        return [experts[k] for k in part]

    def _staged_pair(self, k: int) -> Pair:
        blob = self._stager.blob(self._entries.jobs[k])
        if blob.buffer.home is not Home.PINNED or blob.nbytes > self._ring.slot_bytes:
            raise DeviceError(
                f"entry {k}: a staged blob of {blob.nbytes} bytes in {blob.buffer.home.value} "
                f"memory for a slot of {self._ring.slot_bytes} bytes"
            )
        self.copied_bytes += blob.nbytes
        return self._ring.room(k % self._ring.num_slots, blob.nbytes), blob
