"""The expert cache: slots of device memory that hold the experts in use most, and who is where."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Device, Event, Stream, Tensor, empty
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.experts.adapting import Swaps
from strata_cli.engine.experts.arena import BlobArena
from strata_cli.engine.experts.uploading import Move, Uploader
from strata_cli.engine.kernels.splitting import SlotRange
from strata_cli.errors import OutOfMemory, ShapeError, StateError

LEAST_SLOTS = 128  # that a loan leaves
NOT_RESIDENT = -1
EMPTY = -1
SWAPS_TOGETHER = 32  # that become resident together


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Of an expert cache.

    Attributes:
        num_slots: at least 0.
        slot_bytes: of a slot, a multiple of 256; no blob is larger.
        least_slots: that a loan leaves.
    """

    num_slots: int
    slot_bytes: int
    least_slots: int = LEAST_SLOTS


class _Batch(NamedTuple):
    """Swaps whose copies are under way, and the event behind them."""

    swaps: Swaps
    landed: Event


class ExpertCache:
    """Slots of one size in one block of device memory. Used from one thread, that of ``reads``.

    A pair is layer * num_experts + expert.

    Args:
        device: whose memory.
        reads: the stream whose kernels read the slots and the table of addresses.
        uploader: brings blobs; its copies wait for the reads enqueued before them.
        arena: where kernels find pinned experts that are not resident.
        sizes: see CacheSizes.

    Attributes:
        slot_of: slot of each expert, int32 [L, E]; NOT_RESIDENT: none.
        pair_in: pair in each slot, int64 [num_slots]; EMPTY: none.
        held: pair that each slot should hold, int64 [num_slots]; EMPTY: none. ``pair_in`` differs
            where a slot is lent, a swap is under way, or something was interrupted.
        addresses: where kernels find each expert, int64 [L, E], by id: its slot, else its place in
            the arena; 0: neither, so that it takes a ring to read it.
        device_addresses: the same as a tensor. A change is enqueued on ``reads``.
    """

    def __init__(
        self,
        device: Device,
        reads: Stream,
        uploader: Uploader,
        arena: BlobArena,
        sizes: CacheSizes,
    ) -> None:
        self.num_slots, self.slot_bytes = sizes.num_slots, sizes.slot_bytes
        self.least_slots = sizes.least_slots
        self._reads = reads
        self._uploader = uploader
        self._arena = arena
        shape = (arena.num_layers, arena.num_experts)
        self.slot_of = np.full(shape, NOT_RESIDENT, np.int32)
        self.pair_in = np.full(self.num_slots, EMPTY, np.int64)
        self.held = self.pair_in.copy()
        self._swaps: deque[_Batch] = deque()
        self._is_torn = False
        self._device = device
        self.addresses = arena.addresses.copy()
        self._loan: Loan | None = None
        with ExitStack() as resources:
            nbytes = self.num_slots * self.slot_bytes
            memory = resources.enter_context(device.allocate(nbytes + TAIL_BYTES))
            self._slots = Tensor.over(memory, (self.num_slots, self.slot_bytes), np.uint8)
            self.device_addresses = empty(device, shape, np.int64)
            resources.callback(self.device_addresses.buffer.close)
            pinned = device.allocate_pinned(self.device_addresses.nbytes)
            self._upload_room = Tensor.over(resources.enter_context(pinned), shape, np.int64)
            self._uploaded, self._read = device.event(), device.event()
            resources.callback(self._uploaded.close)
            resources.callback(self._read.close)
            self._publish()
            self._resources = resources.pop_all()

    @property
    def is_resident(self) -> NDArray[np.bool_]:
        """Which experts are in a slot, [L, E]."""
        is_resident: NDArray[np.bool_] = self.slot_of != NOT_RESIDENT
        return is_resident

    @property
    def slot_range(self) -> SlotRange:
        """Addresses of slots, by which kernels tell hits from misses."""
        first = self._slots.address
        return SlotRange(first, first + self._slots.nbytes)

    @property
    def is_coming(self) -> NDArray[np.bool_]:
        """Which experts a swap under way brings, [L, E]."""
        is_coming = np.zeros(self.slot_of.shape, np.bool_)
        for batch in self._swaps:
            is_coming.reshape(-1)[batch.swaps.pairs] = True
        return is_coming

    @property
    def num_coming(self) -> int:
        """Swaps under way."""
        return sum(batch.swaps.pairs.size for batch in self._swaps)

    @property
    def loan(self) -> Loan | None:
        """The one that is open."""
        return self._loan

    @property
    def lendable_bytes(self) -> int:
        """The most that lend() would give now."""
        if self._loan is not None:
            return 0
        return max(self.num_slots - self.least_slots, 0) * self.slot_bytes

    def fill(self, ranking: NDArray[np.int64]) -> None:
        """Make the first num_slots pairs resident, the first in slot 0. Blocks until they are.

        Args:
            ranking: pairs, best first, none twice, [n].

        Raises:
            ShapeError: a pair is out of range, or comes twice.
            StateError: slots are lent.
            DeviceError: a copy failed, or the file cannot be read any more.
        """
        if self._loan is not None:
            raise StateError("the expert cache cannot be filled while slots are lent")
        self._check_ranking(ranking)
        pairs = ranking[: self.num_slots]
        self.land(waits=True)
        self._empty(0)
        self.held[:] = EMPTY
        self.held[: len(pairs)] = pairs
        self._bring(np.arange(len(pairs)), pairs)

    def lend(self, nbytes: int) -> Loan:
        """Give the last slots to the caller; their experts are not resident until it closes.

        Waits for swaps under way alone: what reads the slots now is ahead of the caller's work on
        ``reads``, and of later work of the uploader's stream.

        Args:
            nbytes: how much at least; more than 0.

        Raises:
            OutOfMemory: fewer than least_slots would remain.
            StateError: another loan is open.
        """
        if self._loan is not None:
            raise StateError("the expert cache has lent slots already")
        count = -(-nbytes // self.slot_bytes)
        if nbytes <= 0 or nbytes > self.lendable_bytes:
            raise self._cannot_lend(nbytes, count)
        self.mend()
        first = self.num_slots - count
        pairs = self.pair_in[first:].copy()
        self._empty(first)
        memory = self._slots.rows(first, self.num_slots).reshape(count * self.slot_bytes)
        self._loan = Loan(self, memory, first, pairs)
        return self._loan

    def take_back(self, loan: Loan) -> None:
        """For Loan.close(): refill its slots and make their experts resident again."""
        assert loan is self._loan
        self._loan = None
        slots = np.arange(loan.first_slot, loan.first_slot + loan.num_slots)
        self._bring(slots, loan.pairs)

    def swap(self, swaps: Swaps) -> None:
        """Start to bring pairs into slots; what was there is not resident from now on. No wait.

        Copies run behind all that was enqueued on ``reads`` so far. A new pair is resident once
        land() finds it there.

        Args:
            swaps: pinned pairs that are neither resident nor coming, into slots that are not lent.

        Raises:
            StateError: slots are lent.
            DeviceError: a copy cannot be enqueued; mend() makes up for it.
        """
        if self._loan is not None:
            raise StateError("experts cannot be swapped while slots are lent")
        if not swaps.slots.size:
            return
        self._is_torn = True
        self.pair_in[swaps.slots] = EMPTY
        self.held[swaps.slots] = swaps.pairs
        self._leave(swaps.slots)
        self._fence()
        for first in range(0, swaps.pairs.size, SWAPS_TOGETHER):
            part = slice(first, first + SWAPS_TOGETHER)
            batch = Swaps(swaps.pairs[part], swaps.slots[part])
            self._uploader.enqueue(self._moves(*batch))
            landed = self._device.event()
            self._uploader.copies.record(landed)
            self._swaps.append(_Batch(batch, landed))
        self._is_torn = False

    def land(self, *, waits: bool = False) -> int:
        """Make resident what swaps have brought so far; all of them where it waits.

        Returns:
            How many have landed.

        Raises:
            DeviceError: a copy failed.
        """
        landed = 0
        while self._swaps and (waits or self._swaps[0].landed.query()):
            swaps, event = self._swaps[0]
            event.synchronize()
            self._is_torn = True
            self._swaps.popleft()
            event.close()
            self.slot_of.reshape(-1)[swaps.pairs] = swaps.slots
            self.pair_in[swaps.slots] = swaps.pairs
            landed += swaps.pairs.size
        if landed:
            self._publish()
            self._is_torn = False
        return landed

    def mend(self) -> None:
        """Wait for swaps, and bring what an interrupted call left outside; lent slots stay so.

        Raises:
            DeviceError: a copy failed, or the file cannot be read any more.
        """
        self.land(waits=True)
        stop = self.num_slots if self._loan is None else self._loan.first_slot
        is_missing = self.pair_in[:stop] != self.held[:stop]
        if self._is_torn or is_missing.any():
            slots = np.flatnonzero(is_missing)
            self.pair_in[slots] = EMPTY
            self._leave(slots)
            self._fence()
            self._bring(slots, self.held[slots])
            self._is_torn = False

    @property
    def is_torn(self) -> bool:
        """Whether a call about swaps was interrupted halfway: mend() before the next pass."""
        return self._is_torn

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        while self._swaps:
            self._swaps.pop().landed.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _empty(self, first: int) -> None:
        """Nothing is in the slots from first on.

        Interrupted anywhere, here or in _bring(), ``pair_in`` tells of fewer blobs than there are.
        """
        self.pair_in[first:] = EMPTY
        self._leave(np.arange(first, self.num_slots))
        self._fence()

    def _leave(self, slots: NDArray[np.int64]) -> None:
        """Kernels look for no expert in these slots any more."""
        is_in = np.zeros(self.num_slots + 1, np.bool_)  # the last: NOT_RESIDENT
        is_in[slots] = True
        self.slot_of[is_in[self.slot_of]] = NOT_RESIDENT
        self._publish()

    def _bring(self, slots: NDArray[np.int64], pairs: NDArray[np.int64]) -> None:
        """Copy blobs into slots, and tell when they are there."""
        self._fence()
        self._uploader.upload(self._moves(pairs, slots))
        is_there = pairs != EMPTY
        self.slot_of.reshape(-1)[pairs[is_there]] = slots[is_there]
        self._publish()
        self.pair_in[slots] = pairs

    def _moves(self, pairs: NDArray[np.int64], slots: NDArray[np.int64]) -> Sequence[Move]:
        num_experts = self._arena.num_experts
        return [
            Move(pair // num_experts, pair % num_experts, self._slot(slot))
            for pair, slot in zip(pairs.tolist(), slots.tolist(), strict=True)
            if pair != EMPTY
        ]

    def _slot(self, slot: int) -> Tensor:
        return self._slots.rows(slot, slot + 1).reshape(self.slot_bytes)

    def _fence(self) -> None:
        """Later copies wait for what was enqueued on ``reads`` so far."""
        self._reads.record(self._read)
        self._uploader.copies.wait(self._read)

    def _publish(self) -> None:
        """Bring the addresses up to date, here and on the device."""
        in_slots = self._slots.address + self.slot_of.astype(np.int64) * self.slot_bytes
        self.addresses = np.where(self.is_resident, in_slots, self._arena.addresses)
        self._uploaded.synchronize()  # the last change has left the pinned room
        self._upload_room.numpy()[:] = self.addresses
        self._reads.copy(self.device_addresses, self._upload_room)
        self._reads.record(self._uploaded)

    def _check_ranking(self, ranking: NDArray[np.int64]) -> None:
        num_pairs = self.slot_of.size
        is_inside = ((ranking >= 0) & (ranking < num_pairs)).all()
        if ranking.ndim != 1 or not is_inside or len(np.unique(ranking)) != len(ranking):
            raise ShapeError(
                f"a ranking must list different pairs from 0 to {num_pairs - 1}, "
                f"got {ranking.dtype} {list(ranking.shape)}"
            )

    def _cannot_lend(self, nbytes: int, count: int) -> OutOfMemory:
        return OutOfMemory(
            f"the expert cache cannot lend {gib(nbytes)}: {count} of its {self.num_slots} slots of "
            f"{gib(self.slot_bytes)}, of which {self.least_slots} must remain",
            hint="lower --prefill, or give the expert cache more slots",
        )


class Loan:
    """The last slots of a cache as plain memory; a context manager.

    Attributes:
        memory: uint8 [num_slots * slot_bytes].
        first_slot: of the cache.
        pairs: what the slots held and will hold again, int64 [num_slots].
    """

    def __init__(
        self, cache: ExpertCache, memory: Tensor, first_slot: int, pairs: NDArray[np.int64]
    ) -> None:
        self.memory = memory
        self.first_slot = first_slot
        self.pairs = pairs
        self._cache: ExpertCache | None = cache

    @property
    def num_slots(self) -> int:
        """Lent."""
        return len(self.pairs)

    def close(self) -> None:
        """Refill the slots from host memory and make their experts resident. Blocks until then.

        Waits for what is enqueued on the cache's streams; others must be done with the memory.
        Safe to call twice. Where it fails, the experts stay outside and their slots empty.

        Raises:
            DeviceError: a copy failed, or the file cannot be read any more.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
