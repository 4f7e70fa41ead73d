"""Experts brought into slots: which, where to, and that their bytes arrive whole."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.device.transfer import upload
from strata_cli.engine.kernels.fetch import (
    AHEAD_WORDS,
    BRING_AHEAD,
    FETCH_BLOBS,
    LEARN_ERRORS,
    LEARNT,
    LINE_BYTES,
    MOST_AHEAD,
    MOST_FETCHED,
    PROGRESS_WORDS,
    SPAN_BYTES,
    Ahead,
    LayersAhead,
    bring_ahead,
    bring_layers,
    can_bring_layers,
    fetch_blobs,
    fetch_stride,
    learn_errors,
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
        self.progress = lab.put(np.zeros(PROGRESS_WORDS, np.int32))
        self.cached = SlotRange(self.cache.address, self.cache.address + self.cache.nbytes)
        self.ahead = Ahead(
            lab.put(np.zeros(AHEAD_WORDS, np.int32)), lab.empty((3, self.stride), np.uint8)
        )

    def bring(
        self,
        logits: NDArray[np.float32],
        errors: NDArray[np.float32] | None = None,
        num_likely: int = 1 << 20,
    ) -> list[int]:
        """Bring what a router of these logits [T, E] might choose; returns what should come.

        Args:
            logits: see above.
            errors: what is added to them, [E]; None: nothing.
            num_likely: as of bring_ahead().
        """
        may_come = (self.addresses != 0) & ~self.is_cached
        if errors is None:
            errors = np.zeros(logits.shape[1], np.float32)
        tables = self.lab.put(errors), self.lab.put(self.addresses)
        operands = (self.lab.put(logits), *tables, self.cached, self.ahead)
        bring_ahead(self.lab.stream, *operands, num_likely, self.blob_bytes)
        most = self.ahead.slots.shape[0]
        chosen = BRING_AHEAD.reference(logits, errors, may_come, num_likely, most)
        return [int(expert) for expert in chosen]

    def fetch(
        self, pairs_of: NDArray[np.int32], come: list[int] | None = None
    ) -> NDArray[np.int64]:
        """Fetch for so many pairs of each expert, [E]; returns the staged addresses.

        Args:
            pairs_of: see above.
            come: what is in the slots of what was brought ahead; None: nothing ever was.
        """
        start = np.concatenate([[0], np.cumsum(pairs_of)]).astype(np.int32)
        staged = self.lab.empty(self.addresses.shape, np.int64)
        addresses, starts = self.lab.put(self.addresses), self.lab.put(start)
        operands = (addresses, starts, self.cached, self.slots, staged)
        own = self.progress, self.blob_bytes, None if come is None else self.ahead
        fetch_blobs(self.lab.stream, *operands, *own)
        assert not self.lab.get(self.progress).any()
        found: NDArray[np.int64] = self.lab.get(staged)
        self.check(found, start, come or [])
        return found

    def check(self, staged: NDArray[np.int64], start: NDArray[np.int32], come: list[int]) -> None:
        """Every address is the old one or a slot that holds the blob, as the reference says."""
        slot_of = FETCH_BLOBS.reference(self.is_cached, start, len(self.slots_now()))
        for expert, slot in enumerate(slot_of):
            if slot < 0:
                assert staged[expert] == self.addresses[expert]
                continue
            is_there = expert in come
            slots = self.ahead.slots if is_there else self.slots
            at = staged[expert] - slots.address
            assert at // self.stride == (come.index(expert) if is_there else slot)
            assert at % LINE_BYTES == self.addresses[expert] % LINE_BYTES
            memory = self.lab.get(slots).reshape(-1)
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
                lab.empty((PROGRESS_WORDS,), np.int32),
                500,
            )


@pytest.mark.parametrize("blob_bytes", [1, 4098, 70_002])
def test_what_was_brought_ahead_is_not_fetched_again(lab: Lab, blob_bytes: int) -> None:
    is_cached = np.array([False, True, False, False, True, False, False])
    scene = Scene(lab, blob_bytes, is_cached, num_slots=5)
    logits = np.array([[0.5, 9, 3, -1, 8, np.nan, -5], [0, 0, -2, 2, 0, -np.inf, -3]], np.float32)
    come = scene.bring(logits)
    assert come == [2, 3, 0]  # of the largest logits, but outside the cache
    scene.fetch(np.array([2, 1, 0, 3, 0, 1, 1], np.int32), come)
    before = scene.slots_now()
    assert (before[[0, 1]] == GUARD).all()  # the places of 0 and 3, which had come


def test_equal_logits_come_by_id_and_no_more_than_there_are(lab: Lab) -> None:
    scene = Scene(lab, 500, np.array([True, False, False, True]), num_slots=2)
    come = scene.bring(np.zeros((1, 4), np.float32))
    assert come == [1, 2]
    scene.fetch(np.ones(4, np.int32), come)


def test_errors_are_added_to_what_is_foreseen(lab: Lab) -> None:
    scene = Scene(lab, 500, np.zeros(5, np.bool_), num_slots=5)
    logits = np.array([[4, 3, 2, 1, 0]], np.float32)
    come = scene.bring(logits, np.array([-9, 0, 0.5, 5, np.nan], np.float32))
    assert come == [3, 1, 2]
    scene.fetch(np.ones(5, np.int32), come)


@pytest.mark.parametrize("num_likely", range(6))
def test_only_likely_experts_come(lab: Lab, num_likely: int) -> None:
    scene = Scene(lab, 500, np.array([False, True, True, False, False]), num_slots=5)
    come = scene.bring(np.array([[1, 9, 8, 7, 0]], np.float32), num_likely=num_likely)
    assert come == [3, 0, 4][: max(num_likely - 2, 0)]
    scene.fetch(np.ones(5, np.int32), come)


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_errors_follow_what_is_foreseen_wrongly(lab: Lab, num_tokens: int) -> None:
    rng = np.random.default_rng(4)
    foreseen, logits = (rng.standard_normal((3, 3, 70), np.float32) for _ in range(2))
    logits[1, 0, 5] = np.inf
    errors = rng.standard_normal((3, 70), np.float32)
    expected = LEARN_ERRORS.reference(foreseen, logits, errors, LEARNT, num_tokens)
    found = lab.put(errors)
    learn_errors(lab.stream, lab.put(foreseen), lab.put(logits), found, num_tokens)
    np.testing.assert_allclose(lab.get(found), expected, rtol=1e-5, atol=1e-6)
    assert expected[1, 5] == 0
    with pytest.raises(ShapeError, match="4 tokens of 3"):
        learn_errors(lab.stream, lab.put(foreseen), lab.put(logits), found, 4)


def test_many_experts_are_listed(lab: Lab) -> None:
    rng = np.random.default_rng(8)
    scene = Scene(lab, 1_000, rng.random(1_300) < 0.5, num_slots=MOST_FETCHED)
    come = scene.bring(rng.standard_normal((4, 1_300), np.float32))
    pairs_of = np.zeros(1_300, np.int32)
    pairs_of[[*come[1:], 7, 8, 9]] = 2
    scene.fetch(pairs_of, come)


@pytest.mark.parametrize("spans", [0, 1, 7, 8, 9, 24])
def test_a_fetch_takes_over_where_it_ends_what_comes_ahead(lab: Lab, spans: int) -> None:
    blob_bytes = 7 * SPAN_BYTES + 100
    whole = 8  # spans of a blob
    scene = Scene(lab, blob_bytes, np.zeros(5, np.bool_), num_slots=5)
    come = [3, 0, 4]
    if not lab.device.has_own_memory:
        spans -= spans % whole  # only whole blobs come there
    state = np.zeros(AHEAD_WORDS, np.int32)
    state[:3] = [spans, 0, len(come)]
    experts, done = state[-2 * MOST_AHEAD :].reshape(2, MOST_AHEAD)
    experts[: len(come)] = come
    done[: len(come)] = np.clip(spans - whole * np.arange(len(come)), 0, whole)
    done[come.index(4)] = 0  # some of it may still be on its way: nobody wants it, so nobody waits
    upload(lab.device, lab.stream, scene.ahead.state, state)
    slots = np.full((3, scene.stride), GUARD, np.uint8)
    for slot, expert in enumerate(come):
        skew = scene.addresses[expert] % LINE_BYTES
        length = min(max(spans - slot * whole, 0) * SPAN_BYTES - skew, blob_bytes)
        if length > 0:
            slots[slot, skew : skew + length] = scene.blobs[expert][:length]
    upload(lab.device, lab.stream, scene.ahead.slots, slots)
    begun = come[: -(-spans // whole)]
    scene.fetch(np.array([1, 1, 1, 1, 0], np.int32), begun)
    scene.bring(np.ones((1, 5), np.float32))  # too late
    assert (lab.get(scene.ahead.slots)[2, -200:] == slots[2, -200:]).all()
    assert (lab.get(scene.ahead.state)[-MOST_AHEAD:] == done[: len(come)].tolist() + [0] * 13).all()


@pytest.mark.parametrize("delay", range(6))
def test_what_comes_on_another_stream_may_end_at_any_moment(lab: Lab, delay: int) -> None:
    """Whatever has come by then: every expert that is wanted is whole, wherever it is."""
    scene = Scene(lab, 700_002, np.zeros(7, np.bool_), num_slots=7)
    side, logits = lab.device.stream("side"), lab.put(np.arange(7, dtype=np.float32)[None])
    zeros, addresses = lab.put(np.zeros(7, np.float32)), lab.put(scene.addresses)
    pairs_of = np.array([1, 1, 0, 1, 1, 0, 2], np.int32)
    starts = lab.put(np.concatenate([[0], np.cumsum(pairs_of)]).astype(np.int32))
    staged, other = lab.empty((7,), np.int64), lab.empty((4 << delay, 1 << 16), np.uint8)
    for _ in range(3):
        for tensor in (scene.ahead.state, scene.ahead.slots, scene.slots):
            lab.stream.fill(tensor, 0)
        lab.stream.fork(side)
        bring_ahead(side, logits, zeros, addresses, scene.cached, scene.ahead, 7, scene.blob_bytes)
        for row in range(other.shape[0] if delay else 0):
            lab.stream.fill(other.rows(row, row + 1), 1)
        operands = (addresses, starts, scene.cached, scene.slots, staged, scene.progress)
        fetch_blobs(lab.stream, *operands, scene.blob_bytes, scene.ahead)
        found = lab.get(staged)
        for expert in np.flatnonzero(pairs_of):
            at = found[expert] - scene.slots.address
            slots = scene.slots if 0 <= at < scene.slots.nbytes else scene.ahead.slots
            at = found[expert] - slots.address
            memory = lab.get(slots).reshape(-1)
            assert (memory[at : at + scene.blob_bytes] == scene.blobs[expert]).all()
        lab.stream.join(side)
    lab.stream.synchronize()
    side.close()


@pytest.mark.parametrize("blob_bytes", [1, 4098, 28_700, 700_002])
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_one_launch_brings_for_all_layers(lab: Lab, blob_bytes: int, num_tokens: int) -> None:
    """In turn, once each layer before has fetched; where the device cannot, nothing comes.

    Nothing is allocated or freed meanwhile: a GPU's driver waits for the launch before it does.
    """
    layers, rng = 4, np.random.default_rng(blob_bytes)
    experts = 600 if blob_bytes < SPAN_BYTES else 9
    scene = Scene(lab, blob_bytes, rng.random(experts) < 0.3, min(experts, MOST_FETCHED))
    foreseen = rng.standard_normal((layers, 2, experts), np.float32)
    errors = rng.standard_normal((layers, experts), np.float32)
    ahead = LayersAhead(
        lab.put(np.zeros((layers, AHEAD_WORDS), np.int32)),
        lab.empty((2, 3, scene.stride), np.uint8),
        lab.put(np.full(layers, blob_bytes, np.int64)),
    )
    side = lab.device.stream("side")
    other = lab.empty((1 << 25 if lab.device.has_own_memory else 1,), np.uint8)
    addresses = lab.put(np.tile(scene.addresses, (layers, 1)))
    staged = [lab.empty((experts,), np.int64) for _ in range(layers)]
    slots = [lab.empty(scene.slots.shape, np.uint8) for _ in range(layers)]
    starts = lab.put(np.arange(experts + 1, dtype=np.int32))
    operands = lab.put(foreseen), lab.put(errors), addresses, scene.cached, ahead
    scene.fetch(np.zeros(experts, np.int32))  # loads the kernel
    lab.stream.synchronize()
    lab.stream.fork(side)
    bring_layers(side, *operands, num_tokens, 7)
    for layer in range(layers):
        for turn in range(20):  # computes something
            lab.stream.fill(other, turn)
        own = addresses.rows(layer, layer + 1).reshape(experts), starts, scene.cached
        following = _state(ahead, layer + 1) if layer + 1 < layers else None
        room = ahead.slots.rows(layer % 2, layer % 2 + 1).reshape(*ahead.slots.shape[1:])
        coming = Ahead(_state(ahead, layer), room) if layer else None
        out = slots[layer], staged[layer], scene.progress
        fetch_blobs(lab.stream, *own, *out, blob_bytes, coming, following)
    lab.stream.join(side)
    states = lab.get(ahead.states)
    done = states[:, -MOST_AHEAD:].sum(axis=1)
    assert (done[1:] > 0).any() == can_bring_layers(lab.stream)
    for layer in range(2, layers):  # whose slots nobody has used since
        room = ahead.slots.rows(layer % 2, layer % 2 + 1).reshape(*ahead.slots.shape[1:])
        scene.slots, scene.ahead = slots[layer], Ahead(_state(ahead, layer), room)
        likely = foreseen[layer, :num_tokens], errors[layer], ~scene.is_cached
        listed = BRING_AHEAD.reference(*likely, 7, 3).tolist()
        spans = -(-(blob_bytes + LINE_BYTES) // SPAN_BYTES)
        come = listed[: -(-int(done[layer]) // spans)]
        scene.check(lab.get(staged[layer]), np.arange(experts + 1, dtype=np.int32), come)
    side.close()


def _state(ahead: LayersAhead, layer: int) -> Tensor:
    return ahead.states.rows(layer, layer + 1).reshape(AHEAD_WORDS)


def test_slots_for_what_comes_ahead_are_checked_too(lab: Lab) -> None:
    scene = Scene(lab, 500, np.zeros(3, np.bool_), num_slots=2)
    for shape in ((2, fetch_stride(500) - LINE_BYTES), (MOST_AHEAD + 1, fetch_stride(500))):
        scene.ahead = Ahead(scene.ahead.state, lab.empty(shape, np.uint8))
        with pytest.raises(ShapeError, match="slots of"):
            scene.bring(np.ones((1, 3), np.float32))
