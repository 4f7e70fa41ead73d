"""Brings single blobs from host memory into slots: at the start, and when a loan ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.experts.arena import BlobArena
from strata_cli.engine.experts.stager import SHORTEST_NAP_S, Stager

TOGETHER = 64  # copies in one call of the device


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
    """

    def __init__(
        self, device: Device, copies: Stream, arena: BlobArena, stager: Stager | None
    ) -> None:
        self.copies = copies
        self._device = device
        self._arena = arena
        self._stager = stager

    def upload(self, moves: Sequence[Move]) -> None:
        """Queue the copies and wait for all of them.

        Raises:
            DeviceError: a copy failed, or the file cannot be read any more.
        """
        is_pinned = self._arena.is_pinned
        pinned = [move for move in moves if is_pinned[move.layer, move.expert]]
        for first in range(0, len(pinned), TOGETHER):
            self.copies.copy_many([self._pair(m) for m in pinned[first : first + TOGETHER]])
        if len(pinned) < len(moves):
            self._stage([m for m in moves if not is_pinned[m.layer, m.expert]])
        self.copies.synchronize()

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
