"""Bringing the experts of a step from host memory into the device's, inside a recorded pass."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.shapes import expect, expect_rank
from strata_cli.engine.kernels.splitting import SlotRange
from strata_cli.errors import ShapeError

BLOCKS, THREADS = 132, 512  # that keep enough of the link's lines under way
LINE_BYTES = 128  # that a link carries together
MOST_FETCHED = 64  # blobs of one call


def fetch_stride(blob_bytes: int) -> int:
    """Bytes of a slot for fetched blobs of up to so many: they keep their place in a line."""
    return -(-(blob_bytes + 2 * LINE_BYTES) // LINE_BYTES) * LINE_BYTES


def fetch_blobs(
    stream: Stream,
    addresses: Tensor,
    expert_start: Tensor,
    cached: SlotRange,
    slots: Tensor,
    staged: Tensor,
    blob_bytes: int,
) -> None:
    """Copy the blobs of experts that have pairs, and lie outside the cache, into slots.

    As many as there are slots for, by id; products find the others where they are. Which those are
    changes no result.

    Args:
        stream: enqueues here; also whatever reads the slots.
        addresses: of each expert's blob, int64 [E]; 0: it is nowhere that can be read.
        expert_start: where each expert's pairs begin, int32 [E + 1].
        cached: what lies there is in the device's memory already.
        slots: uint8 [S, stride], device memory, overwritten; S is at most MOST_FETCHED.
        staged: int64 [E], overwritten: addresses, with those of fetched blobs in their slots.
        blob_bytes: of each expert.

    Raises:
        ShapeError: an argument has another shape or type, or a slot is too small for a blob.
    """
    expect_rank("fetch_blobs addresses", addresses, 1)
    expect_rank("fetch_blobs slots", slots, 2)
    num_experts, (num_slots, stride) = addresses.size, slots.shape
    expect("fetch_blobs addresses", addresses, (num_experts,), np.int64)
    expect("fetch_blobs expert_start", expert_start, (num_experts + 1,), np.int32)
    expect("fetch_blobs slots", slots, slots.shape, np.uint8)
    expect("fetch_blobs staged", staged, (num_experts,), np.int64)
    if slots.address % LINE_BYTES:
        raise ShapeError(f"fetch_blobs slots: must begin a line of {LINE_BYTES} bytes")
    if num_slots > MOST_FETCHED or stride < fetch_stride(blob_bytes) or stride % LINE_BYTES:
        raise ShapeError(
            f"fetch_blobs: {num_slots} slots of {stride} bytes for blobs of {blob_bytes}: at most "
            f"{MOST_FETCHED}, of {fetch_stride(blob_bytes)} bytes"
        )
    launch = Launch(
        items=1,
        grid=(BLOCKS, 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_experts, num_slots, stride),
        early=True,
    )
    first, end = cached
    stream.launch(
        FETCH_BLOBS, launch, addresses, expert_start, first, end, slots, staged, blob_bytes
    )


def _fetch_blobs(
    begin: int,
    end: int,
    addresses: NDArray[np.int64],
    expert_start: NDArray[np.int32],
    first_cached: int,
    end_cached: int,
    slots: NDArray[np.uint8],
    staged: NDArray[np.int64],
    blob_bytes: int,
) -> None:
    if begin == end:
        return
    staged[:] = addresses
    is_cached = (addresses >= first_cached) & (addresses < end_cached)
    wanted = np.flatnonzero((np.diff(expert_start) > 0) & (addresses != 0) & ~is_cached)
    for slot, expert in enumerate(wanted[: len(slots)]):
        source = int(addresses[expert])
        place = slots[slot].ctypes.data + source % LINE_BYTES
        ctypes.memmove(place, source, blob_bytes)
        staged[expert] = place


def _fetch_reference(
    is_cached: NDArray[np.bool_], expert_start: NDArray[np.int32], num_slots: int
) -> NDArray[np.int64]:
    """Slot of each expert's blob, [E]; -1: it stays where it is."""
    slot_of = np.full(len(is_cached), -1, np.int64)
    count = 0
    for expert, cached in enumerate(is_cached):
        if expert_start[expert + 1] > expert_start[expert] and not cached and count < num_slots:
            slot_of[expert] = count
            count += 1
    return slot_of


FETCH_BLOBS = Kernel("fetch_blobs", _fetch_blobs, _fetch_reference, "fetch.cu")
