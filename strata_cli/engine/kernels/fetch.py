"""Bringing the experts of a step from host memory into the device's, inside a recorded pass.

What a layer routes to is fetched once it is known. Until then the link may bring what it will
probably route to; whoever fetches ends that, and takes over what has come.
"""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank
from strata_cli.engine.kernels.splitting import Coming, SlotRange
from strata_cli.errors import ShapeError

BLOCKS, THREADS = 132, 512  # that keep enough of the link's lines under way
# Where the copy engine of a multiprocessor carries them through shared memory, a thread of each of
# these does. They leave products that are launched early their place, and start at once.
CARRY_CAPABILITY = (9, 0)
CARRY_BLOCKS, CARRY_THREADS = 16, 256
CARRY_STAGES = 8  # of a block, that hold a span each
PROGRESS_WORDS = 2
LINE_BYTES = 128  # that a link carries together
SPAN_BYTES = 4096  # of a blob, that a warp copies at a time
MOST_FETCHED = 64  # blobs of one call
# What is brought ahead goes on beside other launches, in few warps, which leave those their place:
# as much as possible of a multiprocessor's memory is to be shared memory, which they need.
BRING_BLOCKS, BRING_THREADS = 16, 128
BRING_SHARED_BYTES = 20 << 10
MOST_AHEAD = 16  # blobs
LAYERS_BLOCKS, LAYERS_THREADS = 12, 32  # one launch brings for all layers, where those carry
LAYERS_STAGES = 8
PATIENCE_NS = 100_000_000  # for a layer; a device may run that launch before what it waits for
LEARNT = 0.3  # of what was foreseen wrongly, by the next token; from 0.1 on it is the same
LEARN_THREADS = 256
# Words of a state: the last ones are there for each slot.
_CLAIMED, _FINAL, _COUNT, _GO, _EXPERTS = range(5)
_DONE = _EXPERTS + MOST_AHEAD
AHEAD_WORDS = _DONE + MOST_AHEAD
_LOCK = threading.Lock()  # on the host, of what is brought ahead


class Ahead(NamedTuple):
    """Where blobs of one layer go before it is routed.

    Attributes:
        state: int32 [AHEAD_WORDS], all 0 before a pass: what has come, and of whom.
        slots: uint8 [S, stride], device memory; S is at most MOST_AHEAD.
    """

    state: Tensor
    slots: Tensor


def coming_of(ahead: Ahead, blob_bytes: int) -> Coming:
    """Which experts, of so many bytes, are on their way to it."""
    words = (_CLAIMED, _CLAIMED + 1), (_COUNT, _COUNT + 1), (_EXPERTS, _DONE)
    claimed, count, experts = (ahead.state.rows(*each) for each in words)
    return Coming(claimed, count, experts, _spans_of(blob_bytes))


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
    progress: Tensor,
    blob_bytes: int,
    ahead: Ahead | None = None,
    next_state: Tensor | None = None,
) -> None:
    """Copy the blobs of experts that have pairs, and lie outside the cache, into slots.

    As many as there are slots for, by id; products find the others where they are. Which those are
    changes no result. What was brought ahead stays in its slot there; nothing more is.

    Args:
        stream: enqueues here; also whatever reads the slots.
        addresses: of each expert's blob, int64 [E]; 0: it is nowhere that can be read.
        expert_start: where each expert's pairs begin, int32 [E + 1].
        cached: what lies there is in the device's memory already.
        slots: uint8 [S, stride], device memory, overwritten; S is at most MOST_FETCHED.
        staged: int64 [E], overwritten: addresses, with those of fetched blobs in their slots.
        progress: int32 [PROGRESS_WORDS], all 0 before and behind a call.
        blob_bytes: of each expert.
        ahead: what bring_ahead() or bring_layers() was given for the same experts; None: neither
            was called.
        next_state: of the Ahead of the next layer, for bring_layers(); None: that was not called.

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
    expect("fetch_blobs progress", progress, (PROGRESS_WORDS,), np.int32)
    _expect_slots("fetch_blobs", slots, MOST_FETCHED, blob_bytes)
    num_ahead = 0
    if ahead is not None:
        num_ahead = _expect_ahead("fetch_blobs", ahead, blob_bytes, stride)
    state, ahead_slots = ahead or (expert_start, slots)
    following = expert_start
    if next_state is not None:
        expect("fetch_blobs next_state", next_state, (AHEAD_WORDS,), np.int32)
        following = next_state
    carries = can_bring_layers(stream)
    launch = Launch(
        items=1,
        grid=(CARRY_BLOCKS if carries else BLOCKS, 1, 1),
        block=(CARRY_THREADS if carries else THREADS, 1, 1),
        shared_bytes=CARRY_STAGES * SPAN_BYTES if carries else 0,
        extents=(num_experts, num_slots, stride),
        early=True,
    )
    tensors = slots, staged, state, ahead_slots, following, progress
    numbers = num_ahead, int(next_state is not None), blob_bytes, CARRY_STAGES
    stream.launch(FETCH_BLOBS, launch, addresses, expert_start, *cached, *tensors, *numbers)


def bring_ahead(
    stream: Stream,
    logits: Tensor,
    errors: Tensor,
    addresses: Tensor,
    cached: SlotRange,
    ahead: Ahead,
    num_likely: int,
    blob_bytes: int,
) -> None:
    """Copy blobs of experts that a router will probably choose, and lie outside the cache.

    Those of the largest logits of any token, as many as there are slots, in turn, until
    fetch_blobs() is called with the same ``ahead``, which may be on another stream.

    Args:
        stream: enqueues here.
        logits: what the router might say, float32 [T, E]; neither these nor ``errors`` may be
            overwritten before the pass ends.
        errors: what is added to them, float32 [E]; see learn_errors().
        addresses: of each expert's blob, int64 [E]; 0: it is nowhere that can be read.
        cached: what lies there is in the device's memory already.
        ahead: overwritten.
        num_likely: how many experts of the largest logits are likely, those in the cache included:
            no others come.
        blob_bytes: of each expert.

    Raises:
        ShapeError: an argument has another shape or type, or a slot is too small for a blob.
    """
    expect_rank("bring_ahead logits", logits, 2)
    num_tokens, num_experts = logits.shape
    expect("bring_ahead logits", logits, logits.shape, np.float32)
    expect("bring_ahead errors", errors, (num_experts,), np.float32)
    expect("bring_ahead addresses", addresses, (num_experts,), np.int64)
    stride = ahead.slots.shape[-1]
    num_slots = _expect_ahead("bring_ahead", ahead, blob_bytes, stride)
    launch = Launch(
        items=1,
        grid=(BRING_BLOCKS, 1, 1),
        block=(BRING_THREADS, 1, 1),
        shared_bytes=max(12 * num_experts, BRING_SHARED_BYTES),
        extents=(num_tokens, num_experts, num_slots, stride),
    )
    tables = (logits, errors, addresses, *cached, ahead.slots, ahead.state)
    stream.launch(BRING_AHEAD, launch, *tables, num_likely, blob_bytes)


class LayersAhead(NamedTuple):
    """Where blobs of all layers but the first go before those are routed.

    Attributes:
        states: int32 [L, AHEAD_WORDS], of an Ahead each.
        slots: uint8 [2, S, stride], device memory: of even layers, of odd ones.
        blob_bytes: of each layer's experts, int64 [L].
    """

    states: Tensor
    slots: Tensor
    blob_bytes: Tensor


def can_bring_layers(stream: Stream) -> bool:
    """Whether bring_layers() does anything; else bring_ahead() serves, layer by layer."""
    return stream.capability >= CARRY_CAPABILITY


def bring_layers(
    stream: Stream,
    foreseen: Tensor,
    errors: Tensor,
    addresses: Tensor,
    cached: SlotRange,
    ahead: LayersAhead,
    num_tokens: int,
    num_likely: int,
) -> None:
    """What bring_ahead() does, for all layers but the first, beside the pass that routes them.

    It is enqueued behind what clears ``states`` and ahead of the first fetch_blobs(); each of those
    is given its own Ahead and the next layer's state. What cannot run beside them brings nothing.

    Args:
        stream: beside that of the pass.
        foreseen: what routers might say, float32 [L, T, E]; of a layer once fetch_blobs() of the
            layer before runs.
        errors: what is added to that, float32 [L, E].
        addresses: of each expert's blob, int64 [L, E].
        cached: what lies there is in the device's memory already.
        ahead: overwritten.
        num_tokens: of the pass, 1..T, in the first rows of each layer.
        num_likely: see bring_ahead().

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("bring_layers foreseen", foreseen, 3)
    expect_rank("bring_layers slots", ahead.slots, 3)
    num_layers, room, num_experts = foreseen.shape
    num_slots, stride = ahead.slots.shape[1:]
    expect("bring_layers foreseen", foreseen, foreseen.shape, np.float32)
    expect("bring_layers errors", errors, (num_layers, num_experts), np.float32)
    expect("bring_layers addresses", addresses, (num_layers, num_experts), np.int64)
    expect("bring_layers slots", ahead.slots, (2, num_slots, stride), np.uint8)
    expect("bring_layers states", ahead.states, (num_layers, AHEAD_WORDS), np.int32)
    expect("bring_layers blob_bytes", ahead.blob_bytes, (num_layers,), np.int64)
    launch = Launch(
        items=1,
        grid=(LAYERS_BLOCKS, 1, 1),
        block=(LAYERS_THREADS, 1, 1),
        shared_bytes=max(12 * num_experts, LAYERS_STAGES * SPAN_BYTES, BRING_SHARED_BYTES),
        extents=(num_layers, room, num_tokens, num_experts, num_slots, stride),
    )
    tables = (foreseen, errors, addresses, ahead.blob_bytes, *cached, ahead.slots, ahead.states)
    stream.launch(BRING_LAYERS, launch, *tables, num_likely, PATIENCE_NS, LAYERS_STAGES)


def learn_errors(
    stream: Stream, foreseen: Tensor, logits: Tensor, errors: Tensor, num_tokens: int
) -> None:
    """Have the errors of foreseen logits follow what routers then said.

    What one token's logits lack, the next one's lack much the same of: layers in between add much
    the same to both.

    Args:
        stream: enqueues here.
        foreseen: float32 [L, T, E].
        logits: of the routers, float32 [L, T, E].
        errors: float32 [L, E], changed in place by LEARNT of what they are off, in the mean over
            tokens.
        num_tokens: of the pass, 1..T, in the first rows of each layer.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("learn_errors foreseen", foreseen, 3)
    num_layers, room, num_experts = foreseen.shape
    expect("learn_errors foreseen", foreseen, foreseen.shape, np.float32)
    expect("learn_errors logits", logits, foreseen.shape, np.float32)
    expect("learn_errors errors", errors, (num_layers, num_experts), np.float32)
    if not 0 < num_tokens <= room:
        raise ShapeError(f"learn_errors: {num_tokens} tokens of {room}")
    launch = Launch(
        items=num_layers,
        grain=num_layers,
        grid=(blocks(errors.size, LEARN_THREADS), 1, 1),
        block=(LEARN_THREADS, 1, 1),
        extents=(errors.size, num_experts, room),
    )
    stream.launch(LEARN_ERRORS, launch, foreseen, logits, errors, LEARNT, num_tokens)


def _expect_slots(name: str, slots: Tensor, most: int, blob_bytes: int) -> None:
    expect(f"{name} slots", slots, slots.shape, np.uint8)
    num_slots, stride = slots.shape
    if slots.address % LINE_BYTES:
        raise ShapeError(f"{name} slots: must begin a line of {LINE_BYTES} bytes")
    if num_slots > most or stride < fetch_stride(blob_bytes) or stride % LINE_BYTES:
        raise ShapeError(
            f"{name}: {num_slots} slots of {stride} bytes for blobs of {blob_bytes}: at most "
            f"{most}, of {fetch_stride(blob_bytes)} bytes"
        )


def _expect_ahead(name: str, ahead: Ahead, blob_bytes: int, stride: int) -> int:
    """Its number of slots."""
    expect_rank(f"{name} ahead slots", ahead.slots, 2)
    expect(f"{name} ahead slots", ahead.slots, (ahead.slots.shape[0], stride), np.uint8)
    expect(f"{name} ahead state", ahead.state, (AHEAD_WORDS,), np.int32)
    _expect_slots(f"{name} ahead", ahead.slots, MOST_AHEAD, blob_bytes)
    return ahead.slots.shape[0]


def _fetch_blobs(
    begin: int,
    end: int,
    addresses: NDArray[np.int64],
    expert_start: NDArray[np.int32],
    first_cached: int,
    end_cached: int,
    slots: NDArray[np.uint8],
    staged: NDArray[np.int64],
    state: NDArray[np.int32],
    ahead_slots: NDArray[np.uint8],
    next_state: NDArray[np.int32],  # noqa: ARG001  for the GPU
    progress: NDArray[np.int32],  # noqa: ARG001  likewise
    num_ahead: int,
    has_next: int,  # noqa: ARG001  likewise
    blob_bytes: int,
    num_stages: int,  # noqa: ARG001  likewise
) -> None:
    if begin == end:
        return
    staged[:] = addresses
    come: list[int] = []
    if num_ahead:
        with _LOCK:
            state[_FINAL] = state[_CLAIMED] + 1
        come = state[_EXPERTS:][: state[_CLAIMED] // _spans_of(blob_bytes)].tolist()
    is_cached = (addresses >= first_cached) & (addresses < end_cached)
    wanted = np.flatnonzero((np.diff(expert_start) > 0) & (addresses != 0) & ~is_cached)
    for slot, expert in enumerate(wanted[: len(slots)].tolist()):
        if expert in come:
            staged[expert] = _place_of(ahead_slots[come.index(expert)], int(addresses[expert]))
        else:
            staged[expert] = _copy_blob(slots[slot], int(addresses[expert]), blob_bytes)


def _spans_of(blob_bytes: int) -> int:
    return (blob_bytes + LINE_BYTES + SPAN_BYTES - 1) // SPAN_BYTES


def _place_of(slot: NDArray[np.uint8], source: int) -> int:
    """Where a blob goes: as far behind a line's begin as it comes from."""
    return int(slot.ctypes.data) + source % LINE_BYTES


def _copy_blob(slot: NDArray[np.uint8], source: int, blob_bytes: int) -> int:
    """Where it is now."""
    place = _place_of(slot, source)
    ctypes.memmove(place, source, blob_bytes)
    return place


def _bring_ahead(
    begin: int,
    end: int,
    logits: NDArray[np.float32],
    errors: NDArray[np.float32],
    addresses: NDArray[np.int64],
    first_cached: int,
    end_cached: int,
    slots: NDArray[np.uint8],
    state: NDArray[np.int32],
    num_likely: int,
    blob_bytes: int,
) -> None:
    if begin == end:
        return
    is_cached = (addresses >= first_cached) & (addresses < end_cached)
    may_come = (addresses != 0) & ~is_cached
    chosen = _bring_reference(logits, errors, may_come, num_likely, len(slots))
    state[_EXPERTS : _EXPERTS + len(chosen)] = chosen
    state[_COUNT] = len(chosen)
    for slot, expert in enumerate(chosen.tolist()):
        with _LOCK:  # of whole blobs, so that whoever ends it finds no part of one
            if state[_FINAL]:
                return
            _copy_blob(slots[slot], int(addresses[expert]), blob_bytes)
            state[_DONE + slot] = _spans_of(blob_bytes)
            state[_CLAIMED] = (slot + 1) * _spans_of(blob_bytes)


def _bring_layers(_begin: int, _end: int, *_args: object) -> None:
    """Nothing: a host stream would not get on beside it."""


def _bring_reference(
    logits: NDArray[np.float32],
    errors: NDArray[np.float32],
    may_come: NDArray[np.bool_],
    num_likely: int,
    num_slots: int,
) -> NDArray[np.int64]:
    """Experts in the order in which they come, at most [num_slots]."""
    largest = np.where(np.isnan(logits), -np.inf, logits).max(axis=0) + errors
    order = np.argsort(-largest, kind="stable")[:num_likely]
    return order[may_come[order]][:num_slots]


def _learn_errors(
    begin: int,
    end: int,
    foreseen: NDArray[np.float32],
    logits: NDArray[np.float32],
    errors: NDArray[np.float32],
    part: float,
    num_tokens: int,
) -> None:
    own = slice(begin, end)
    errors[own] = _learn_reference(foreseen[own], logits[own], errors[own], part, num_tokens)


def _learn_reference(
    foreseen: NDArray[np.float32],
    logits: NDArray[np.float32],
    errors: NDArray[np.float32],
    part: float,
    num_tokens: int,
) -> NDArray[np.float32]:
    """The errors afterwards, [L, E]; 0 where they are no numbers any more."""
    lacking = (logits - foreseen)[:, :num_tokens].mean(axis=1, dtype=np.float32)
    learnt = errors + np.float32(part) * (lacking - errors)
    return np.where(np.isfinite(learnt), learnt, np.float32(0))


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
BRING_AHEAD = Kernel("bring_ahead", _bring_ahead, _bring_reference, "fetch.cu")
BRING_LAYERS = Kernel("bring_layers", _bring_layers, _bring_reference, "fetch.cu")
LEARN_ERRORS = Kernel("learn_errors", _learn_errors, _learn_reference, "fetch.cu")
