"""Chunks streamed for real on a device, with every slot copied out when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Event, Tensor
from strata_cli.engine.device.transfer import download
from strata_cli.engine.experts.entries import rank_experts
from strata_cli.engine.experts.keeping import KeptBlobs
from strata_cli.engine.experts.ring import U8, Ring
from strata_cli.engine.experts.streaming import Blobs, ChunkStream, StreamCounts, StreamOptions
from strata_cli.engine.trace import NO_TRACE, Trace
from tests.experts.cases import plain_case
from tests.experts.simulator import Case

MORE_SLOTS = 13  # behind a ring's


def large_case(
    num_layers: int = 6,
    num_experts: int = 24,
    *,
    blob_bytes: int = 40_000,
    ring_slots: int = 20,
    routed: float = 0.4,
    seed: int = 0,
) -> Case:
    """A chunk whose copies take some time."""
    case = plain_case(num_layers, num_experts, ring_slots=ring_slots, routed=routed, seed=seed)
    return replace(case, blob_bytes=(blob_bytes,) * num_layers)


class ReadyStager:
    """Blobs of jobs in pinned memory from the start."""

    def __init__(self) -> None:
        self.blobs: list[Tensor] = []
        self.events: list[Event] = []

    def is_ready(self, job: int) -> bool:
        return job < len(self.blobs)

    def blob(self, job: int) -> Tensor:
        return self.blobs[job]

    def sent(self, job: int, copied: Event) -> None:
        assert job == len(self.events)
        self.events.append(copied)


class Lab:
    """A device with blobs, a ring and two streams; it outlives chunks."""

    def __init__(self, device: Device, case: Case, trace: Trace = NO_TRACE) -> None:
        self.device = device
        self.case = case
        self.copies, self.reads = device.stream("copies"), device.stream("reads")
        slot_bytes = max(case.blob_bytes)
        num_slots = case.ring_slots + MORE_SLOTS
        memory = device.allocate(num_slots * slot_bytes)
        self._slots = Tensor.over(memory, (num_slots, slot_bytes), np.uint8)
        slots = self._slots.rows(0, case.ring_slots)
        self.ring = Ring(device, slots, self.copies, self.reads, trace)
        self.layers = [self._stamped(layer, size) for layer, size in enumerate(case.blob_bytes)]

    def _stamped(self, layer: int, nbytes: int) -> Tensor:
        num_experts = self.case.resident.shape[1]
        buffer = self.device.allocate_pinned(num_experts * nbytes)
        blobs = Tensor.over(buffer, (num_experts, nbytes), np.uint8)
        rng = np.random.default_rng(layer)
        blobs.numpy()[:] = rng.integers(0, 256, blobs.shape, np.uint8)
        return blobs

    def stream_chunk(
        self, case: Case, options: StreamOptions, kept: KeptBlobs | None = None
    ) -> StreamCounts:
        """Stream one chunk and compare what was read with what should have been."""
        ranking = rank_experts(case.resident, case.order)
        routed = np.take_along_axis(case.routed, ranking.expert_at, axis=1)
        stager = ReadyStager()
        for layer, expert in self._jobs(case):
            blob = self.layers[layer].rows(expert, expert + 1)
            stager.blobs.append(blob.reshape(blob.size))
        blobs = Blobs(self.layers, case.staged, stager)
        num_reads = int((case.routed & ~case.resident).sum())
        record = self.device.allocate_pinned(max(num_reads * self.ring.slot_bytes, 1))
        expected: list[NDArray[np.uint8]] = []
        with ChunkStream(ranking, self.ring, blobs, options, kept) as stream:
            entries = stream.entries
            for layer in range(ranking.num_layers):
                stream.publish(layer, np.concatenate([[0], np.cumsum(routed[layer])]))
                entry_of = {entries.ranks[k]: k for k in entries.of_layer(layer)}
                for group in stream.groups(layer):
                    for rank in group:
                        if rank in entry_of and routed[layer, rank]:
                            self._read(entry_of[rank], layer, record, len(expected))
                            expert = entries.experts[entry_of[rank]]
                            expected.append(self.layers[layer].numpy()[expert])
            stream.finish()
        if kept is not None:
            kept.leave(stream.entries, stream.use)
        assert ((stream.use > 0) == case.routed).all()
        self.reads.synchronize()
        self.copies.synchronize()
        assert len(expected) == num_reads
        self._compare(record.host_bytes, expected)
        record.close()
        return stream.counts

    def _jobs(self, case: Case) -> list[tuple[int, int]]:
        """Staged experts in list order. Only for cases in which every entry is listed at once."""
        order = rank_experts(case.resident, case.order).expert_at
        return [
            (layer, int(expert))
            for layer in range(len(order))
            for expert in order[layer]
            if case.staged[layer, expert]
        ]

    def _read(self, k: int, layer: int, record: Buffer, index: int) -> None:
        nbytes = self.case.blob_bytes[layer]
        slot = self.ring.room(k % self.ring.num_slots, nbytes)
        to = Tensor(record, index * self.ring.slot_bytes, (nbytes,), slot.dtype)
        self.reads.copy(to, slot)

    def _compare(
        self, record: NDArray[np.uint8] | None, expected: Sequence[NDArray[np.uint8]]
    ) -> None:
        assert record is not None
        for index, blob in enumerate(expected):
            start = index * self.ring.slot_bytes
            assert (record[start : start + blob.size] == blob).all(), f"read {index} is not its own"

    def kept_blobs(self, num_slots: int) -> KeptBlobs:
        """So many, behind the ring."""
        slots = self._slots.rows(0, self.ring.num_slots + num_slots)
        return KeptBlobs(self.reads, slots, self.case.blob_bytes, self.case.resident.shape[1])

    @contextmanager
    def shorter_ring(self, num_slots: int) -> Iterator[None]:
        """Inside, the ring is of the first slots alone."""
        whole = self.ring
        slots = self._slots.rows(0, num_slots)
        self.ring = Ring(self.device, slots, self.copies, self.reads)
        try:
            yield
        finally:
            self.ring.drain()
            self.reads.synchronize()
            self.ring.close()
            self.ring = whole

    def read_kept(self, kept: KeptBlobs, layer: int, expert: int) -> NDArray[np.uint8]:
        """A host copy of a kept blob."""
        slots, nbytes = kept.slots, self.case.blob_bytes[layer]
        offset = int(kept.addresses[layer, expert]) - slots.buffer.address
        return download(self.device, self.reads, Tensor(slots.buffer, offset, (nbytes,), U8))

    def close(self) -> None:
        self.ring.drain()
        self.ring.close()
