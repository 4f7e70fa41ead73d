"""Experts brought into slots: which, where to, and that their bytes arrive whole."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels.fetch import (
    FETCH_BLOBS,
    LINE_BYTES,
    MOST_FETCHED,
    fetch_blobs,
    fetch_stride,
)
from strata_cli.engine.kernels.splitting import SlotRange
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab

GUARD = 0xA5  # what fresh memory of the lab holds


class Scene:
    """Experts in mapped host memory and in a cache, and slots to fetch the former into.

    Args:
        lab: to work on.
        blob_bytes: of an expert.
        is_cached: which of them are in the cache, [E].
        num_slots: to fetch into.
    """

    def __init__(
        self, lab: Lab, blob_bytes: int, is_cached: NDArray[np.bool_], num_slots: int
    ) -> None:
        self.lab, self.blob_bytes, self.is_cached = lab, blob_bytes, is_cached
        count = len(is_cached)
        rng = np.random.default_rng(blob_bytes)
        self.blobs = rng.integers(0, 256, (count, blob_bytes), np.uint8)
        pinned = lab.device.allocate_pinned(self.blobs.nbytes + LINE_BYTES)
        host = Tensor.over(pinned, self.blobs.shape, np.uint8)
        host.numpy()[:] = self.blobs
        self._pinned = host  # keeps it
        self.cache = lab.put(self.blobs)
        rows = np.arange(count) * blob_bytes
        self.addresses = np.where(is_cached, self.cache.address + rows, host.address + rows)
        self.stride = fetch_stride(blob_bytes)
        self.slots = lab.empty((num_slots, self.stride), np.uint8)

    def fetch(self, pairs_of: NDArray[np.int32]) -> NDArray[np.int64]:
        """Fetch for so many pairs of each expert, [E]; returns the staged addresses."""
        start = np.concatenate([[0], np.cumsum(pairs_of)]).astype(np.int32)
        staged = self.lab.empty(self.addresses.shape, np.int64)
        cached = SlotRange(self.cache.address, self.cache.address + self.cache.nbytes)
        addresses, starts = self.lab.put(self.addresses), self.lab.put(start)
        fetch_blobs(self.lab.stream, addresses, starts, cached, self.slots, staged, self.blob_bytes)
        found: NDArray[np.int64] = self.lab.get(staged)
        self.check(found, start)
        return found

    def check(self, staged: NDArray[np.int64], start: NDArray[np.int32]) -> None:
        """Every address is the old one or a slot that holds the blob, as the reference says."""
        slot_of = FETCH_BLOBS.reference(self.is_cached, start, len(self.slots_now()))
        memory = self.slots_now().reshape(-1)
        for expert, slot in enumerate(slot_of):
            if slot < 0:
                assert staged[expert] == self.addresses[expert]
                continue
            at = staged[expert] - self.slots.address
            assert at // self.stride == slot
            assert at % LINE_BYTES == self.addresses[expert] % LINE_BYTES
            assert (memory[at : at + self.blob_bytes] == self.blobs[expert]).all()

    def slots_now(self) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self.lab.get(self.slots)
        return found


@pytest.mark.parametrize("blob_bytes", [1, 98, 128, 4096, 4098, 70_002])
def test_wanted_experts_outside_the_cache_are_fetched(lab: Lab, blob_bytes: int) -> None:
    is_cached = np.array([False, True, False, False, True, False, False])
    scene = Scene(lab, blob_bytes, is_cached, num_slots=5)
    staged = scene.fetch(np.array([2, 1, 0, 3, 0, 1, 1], np.int32))
    assert (staged != scene.addresses).tolist() == [True, False, False, True, False, True, True]


def test_what_finds_no_slot_stays_where_it_is(lab: Lab) -> None:
    scene = Scene(lab, 300, np.zeros(9, np.bool_), num_slots=4)
    staged = scene.fetch(np.ones(9, np.int32))
    assert (staged != scene.addresses).sum() == 4


def test_many_experts_and_all_slots(lab: Lab) -> None:
    rng = np.random.default_rng(3)
    scene = Scene(lab, 1_000, rng.random(1_300) < 0.5, num_slots=MOST_FETCHED)
    scene.fetch(rng.integers(0, 2, 1_300).astype(np.int32))


def test_nothing_wanted_is_nothing_fetched(lab: Lab) -> None:
    scene = Scene(lab, 64, np.zeros(3, np.bool_), num_slots=2)
    staged = scene.fetch(np.zeros(3, np.int32))
    assert (staged == scene.addresses).all()
    assert (scene.slots_now() == GUARD).all()


def test_slots_that_are_too_small_or_too_many_are_refused(lab: Lab) -> None:
    longs, starts = lab.empty((3,), np.int64), lab.empty((4,), np.int32)
    for shape in ((2, fetch_stride(500) - LINE_BYTES), (MOST_FETCHED + 1, fetch_stride(500))):
        with pytest.raises(ShapeError, match="slots of"):
            fetch_blobs(
                lab.stream,
                longs,
                starts,
                SlotRange(0, 0),
                lab.empty(shape, np.uint8),
                lab.empty((3,), np.int64),
                500,
            )
