"""Brings single blobs from host memory into slots: at the start, and when a loan ends."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.experts.arena import BlobArena
from strata_cli.engine.experts.stager import SHORTEST_NAP_S, Stager
from strata_cli.errors import OutOfMemory

TOGETHER = 64  # copies in one call of the device
BURST_BYTES = 256 << 20  # copied at a time, so that the link's rate is seen
LEAST_BURST_BYTES = 16 << 20  # that says anything about the rate
PROBE_BYTES, PROBES = 64 << 20, 4  # where a cache is too small for bursts; the fastest counts


class Move(NamedTuple):
    """One expert and where its blob goes, uint8 [slot_bytes]."""

    layer: int
    expert: int
    to: Tensor


@dataclass(frozen=True, slots=True)
class _Jobs:
    """Moves as a list for the stager: every one needs it."""

    layers: Sequence[int]
    experts: Sequence[int]

    @property
    def count(self) -> int:
        return len(self.layers)

    @property
    def jobs(self) -> Sequence[int]:
        return range(self.count)


class Uploader:
    """Copies blobs out of the arena, and through the stager what is not in it.

    Args:
        device: of the slots.
        copies: the stream for it.
        arena: of the blobs.
        stager: for experts that are not in the arena; None: there are none.

    Attributes:
        copies: see above.
        link_gbps: rate of the fastest burst so far, in GB/s; 0: none was long enough.
    """

    def __init__(
        self, device: Device, copies: Stream, arena: BlobArena, stager: Stager | None
    ) -> None:
        self.copies = copies
        self._device = device
        self._arena = arena
        self._stager = stager
        self.link_gbps = 0.0

    def upload(self, moves: Sequence[Move]) -> None:
        """Queue the copies and wait for all of them.

        Raises:
            DeviceError: a copy failed, or the file cannot be read any more.
        """
        is_pinned = self._arena.is_pinned
        pinned = [move for move in moves if is_pinned[move.layer, move.expert]]
        for burst in self._bursts(pinned):
            self._copy_timed(burst)
        if len(pinned) < len(moves):
            self._stage([m for m in moves if not is_pinned[m.layer, m.expert]])
        self.copies.synchronize()

    def enqueue(self, moves: Sequence[Move]) -> None:
        """Queue the copies of experts that are in the arena. Does not wait."""
        for first in range(0, len(moves), TOGETHER):
            self.copies.copy_many([self._pair(m) for m in moves[first : first + TOGETHER]])

    def probe(self) -> None:
        """Note the link's rate where no upload was long enough to tell; if there is room."""
        layers = [layer for layer in self._arena.layers if layer.nbytes]
        if self.link_gbps or not layers:
            return
        nbytes = min(PROBE_BYTES, layers[0].nbytes)
        source = layers[0].reshape(layers[0].nbytes).rows(0, nbytes)
        try:
            memory = self._device.allocate(nbytes)
        except OutOfMemory:
            return
        with memory:
            to = Tensor.over(memory, (nbytes,), np.uint8)
            for _ in range(PROBES):
                start = time.perf_counter()
                self.copies.copy(to, source)
                self.copies.synchronize()
                seconds = max(time.perf_counter() - start, 1e-9)
                self.link_gbps = max(self.link_gbps, nbytes / seconds / 1e9)

    def _bursts(self, moves: Sequence[Move]) -> Iterator[Sequence[Move]]:
        start, nbytes = 0, 0
        for index, move in enumerate(moves):
            nbytes += move.to.nbytes
            if nbytes >= BURST_BYTES or index + 1 == len(moves):
                yield moves[start : index + 1]
                start, nbytes = index + 1, 0

    def _copy_timed(self, moves: Sequence[Move]) -> None:
        """Queue copies, wait for them and note how fast they were, if they are many."""
        nbytes = sum(self._arena.blob(move.layer, move.expert).nbytes for move in moves)
        start = time.perf_counter()
        self.enqueue(moves)
        if nbytes >= LEAST_BURST_BYTES:
            self.copies.synchronize()
            seconds = max(time.perf_counter() - start, 1e-9)
            self.link_gbps = max(self.link_gbps, nbytes / seconds / 1e9)

    def _pair(self, move: Move) -> tuple[Tensor, Tensor]:
        blob = self._arena.blob(move.layer, move.expert)
        return move.to.rows(0, blob.nbytes), blob

    def _stage(self, moves: Sequence[Move]) -> None:
        assert self._stager is not None, "an expert is neither pinned nor can it be staged"
        stager = self._stager
        with ExitStack() as resources:
            events = [self._device.event() for _ in range(stager.num_buffers)]
            for event in events:
                resources.callback(event.close)
            jobs = _Jobs([move.layer for move in moves], [move.expert for move in moves])
            resources.enter_context(stager.staging(jobs))
            for job, move in enumerate(moves):
                while not stager.is_ready(job):
                    time.sleep(SHORTEST_NAP_S)
                blob = stager.blob(job)
                self.copies.copy(move.to.rows(0, blob.nbytes), blob)
                copied = events[job % len(events)]
                self.copies.record(copied)
                stager.sent(job, copied)
