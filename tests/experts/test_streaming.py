"""Whole chunks on a device, with real threads: what is read from the ring is what belongs there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from strata_cli.engine.device.base import Device, Tensor
from strata_cli.engine.experts.depth import AutoDepth
from strata_cli.engine.experts.entries import rank_experts
from strata_cli.engine.experts.keeping import most_used
from strata_cli.engine.experts.streaming import (
    AHEAD,
    Blobs,
    ChunkStream,
    Outlook,
    StreamOptions,
)
from strata_cli.errors import ConfigError, DeviceError, ShapeError, StateError
from tests.experts.cases import FIXED
from tests.experts.lab import MORE_SLOTS, Lab, large_case
from tests.experts.simulator import Case

WATCHDOG_S = 20.0
OPTIONS = StreamOptions(watchdog_s=WATCHDOG_S)
WAYS = {
    "routed": OPTIONS,
    "routed inline": replace(OPTIONS, has_thread=False),
    "routed, one by one, depth 1": replace(OPTIONS, depth=1, together=1),
    "routed, any depth, own groups": replace(OPTIONS, depth=0, takes_landed=False, group=3),
    "plain": replace(OPTIONS, skips_unrouted=False),
    "plain inline": replace(OPTIONS, skips_unrouted=False, has_thread=False),
}


@pytest.fixture
def lab(device: Device) -> Iterator[Lab]:
    made = Lab(device, large_case())
    yield made
    made.close()


@pytest.mark.parametrize("way", WAYS)
def test_every_routed_expert_is_read_from_its_own_bytes_chunk_after_chunk(
    lab: Lab, way: str
) -> None:
    for seed in range(3):
        case = large_case(seed=seed, routed=0.2 + 0.3 * seed)
        counts = lab.stream_chunk(case, WAYS[way])
        length = int((~case.resident).sum())
        assert counts.copied + counts.skipped == length
        assert counts.copied >= int((case.routed & ~case.resident).sum())
        assert counts.skipped == 0 or WAYS[way].skips_unrouted


@pytest.mark.parametrize("name", FIXED)
def test_fixed_cases_with_a_thread(device: Device, name: str) -> None:
    case = FIXED[name]
    lab = Lab(device, case)
    for _ in range(3):
        lab.stream_chunk(case, OPTIONS)
    lab.close()


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_ring_of_eight_slots_copies_nothing_that_is_not_routed(
    device: Device, has_thread: bool
) -> None:
    case = large_case(ring_slots=8)
    lab = Lab(device, case)
    counts = lab.stream_chunk(case, replace(OPTIONS, has_thread=has_thread))
    assert counts.copied == int((case.routed & ~case.resident).sum())
    assert counts.skipped == 0
    lab.close()


def test_staged_blobs_are_copied_whether_routed_or_not(lab: Lab) -> None:
    case = large_case()
    rng = np.random.default_rng(5)
    case = replace(case, staged=~case.resident & (rng.random(case.resident.shape) < 0.4))
    counts = lab.stream_chunk(case, OPTIONS)
    assert counts.copied >= int(((case.routed | case.staged) & ~case.resident).sum())


def test_blobs_smaller_than_a_slot_and_an_order_of_its_own(device: Device) -> None:
    case = large_case()
    rng = np.random.default_rng(1)
    order = np.argsort(rng.random(case.resident.shape), axis=1)
    case = replace(case, blob_bytes=(40_000, 1_000, 40_000, 39_999, 7, 40_000), order=order)
    lab = Lab(device, case)
    lab.stream_chunk(case, OPTIONS)
    lab.close()


def test_neighbouring_blobs_are_one_copy(lab: Lab) -> None:
    nobody = np.zeros_like(lab.case.resident)
    case = replace(lab.case, resident=nobody)
    one_by_one = lab.stream_chunk(case, replace(WAYS["plain"], together=1))
    together = lab.stream_chunk(case, WAYS["plain"])
    assert one_by_one.num_copies == one_by_one.copied == case.resident.size
    assert together.copied == one_by_one.copied
    assert together.copied_bytes == one_by_one.copied_bytes
    assert together.num_copies < one_by_one.num_copies / 3


def test_kept_blobs_are_resident_for_the_next_chunk(lab: Lab) -> None:
    kept = lab.kept_blobs(num_slots=13)  # 2 for each of 6 layers, 3 for the last
    kept.begin(lab.ring.num_slots)
    before = lab.stream_chunk(lab.case, OPTIONS, kept)
    kept.begin(lab.ring.num_slots)
    assert kept.is_kept.sum(axis=1).tolist() == [2, 2, 2, 2, 2, 3]
    assert not (kept.is_kept & ~(lab.case.routed & ~lab.case.resident)).any()
    for layer, expert in np.argwhere(kept.is_kept).tolist():
        blob = lab.read_kept(kept, layer, expert)
        assert (blob == lab.layers[layer].numpy()[expert]).all()
    again = replace(lab.case, resident=lab.case.resident | kept.is_kept)
    after = lab.stream_chunk(again, OPTIONS, kept)
    assert after.copied + after.skipped == before.copied + before.skipped - 13
    kept.begin(lab.ring.num_slots)
    assert kept.is_kept.sum() == 13


def test_what_a_ring_holds_in_the_end_is_kept_for_a_shorter_one(lab: Lab) -> None:
    kept = lab.kept_blobs(num_slots=0)
    kept.begin(lab.ring.num_slots)
    lab.stream_chunk(lab.case, OPTIONS, kept)
    kept.begin(4)
    assert 0 < kept.is_kept.sum() <= lab.ring.num_slots - 4
    assert not (kept.is_kept & ~(lab.case.routed & ~lab.case.resident)).any()
    for layer, expert in np.argwhere(kept.is_kept).tolist():
        blob = lab.read_kept(kept, layer, expert)
        assert (blob == lab.layers[layer].numpy()[expert]).all()
    kept.begin(lab.ring.num_slots)
    assert not kept.is_kept.any()


@pytest.mark.parametrize("num_slots", [1, 5, MORE_SLOTS])
def test_what_is_kept_follows_what_tokens_want(lab: Lab, num_slots: int) -> None:
    """Chunk after chunk its bytes are those of the experts that it is said to be."""
    kept = lab.kept_blobs(num_slots)
    for seed in range(8):
        kept.begin(lab.ring.num_slots - seed % 2 * 5)
        before, routed = kept.is_kept, large_case(seed=seed % 3).routed
        case = replace(lab.case, routed=routed, resident=lab.case.resident | before)
        with lab.shorter_ring(lab.ring.num_slots - seed % 2 * 5):
            lab.stream_chunk(case, OPTIONS, kept)
        assert kept.is_kept.sum() <= lab.ring.num_slots + num_slots
        for layer, expert in np.argwhere(kept.is_kept).tolist():
            blob = lab.read_kept(kept, layer, expert)
            assert (blob == lab.layers[layer].numpy()[expert]).all()


def test_the_most_used_are_kept_and_of_equals_the_lower_id() -> None:
    use = np.array([3, 9, 9, 0, 4])
    assert most_used(use, [0, 1, 2, 4], 2).tolist() == [1, 2]
    assert most_used(use, [4, 2, 0], 2).tolist() == [2, 4]
    assert most_used(use, [0, 1], 5).tolist() == [1, 0]
    assert most_used(use, [0, 1], 0).tolist() == []


def test_an_abandoned_chunk_leaves_a_ring_that_the_next_can_use(lab: Lab) -> None:
    ranking = rank_experts(lab.case.resident)
    stream = ChunkStream(ranking, lab.ring, Blobs(lab.layers), OPTIONS)
    with stream:
        _begin_first_group(stream, lab.case)
    with pytest.raises(StateError, match="stopped"):
        stream.finish()
    lab.ring.drain()
    lab.stream_chunk(lab.case, OPTIONS)


def test_an_automatic_depth_goes_on_where_the_chunk_before_ended(lab: Lab) -> None:
    ranking, learnt = rank_experts(lab.case.resident), AutoDepth(24)
    for depth, expected in ((0, "depth 24"), (7, "depth 7")):
        options = replace(OPTIONS, depth=depth)
        outlook = Outlook(learnt=learnt)
        stream = ChunkStream(ranking, lab.ring, Blobs(lab.layers), options, outlook=outlook)
        assert stream.report().endswith(expected)


def test_a_depth_that_is_asked_for_is_the_depth_of_unlikely_copies_too(lab: Lab) -> None:
    ranking = rank_experts(lab.case.resident)
    for depth, ahead, expected in ((0, 0, AHEAD), (40, 0, 40), (0, 9, 9), (40, 9, 9)):
        options = replace(OPTIONS, depth=depth, ahead=ahead)
        stream = ChunkStream(ranking, lab.ring, Blobs(lab.layers), options)
        assert f"ahead {expected}, depth" in stream.report()


def test_a_stopped_stream_says_so(lab: Lab) -> None:
    ranking = rank_experts(np.zeros_like(lab.case.resident))
    with ChunkStream(ranking, lab.ring, Blobs(lab.layers), OPTIONS) as stream:
        stream.stop()
        with pytest.raises(StateError, match="stopped"):
            _read_all(stream, lab.case)


@pytest.mark.parametrize("has_thread", [True, False])
def test_a_blob_that_no_stager_brings_is_an_error(lab: Lab, has_thread: bool) -> None:
    ranking = rank_experts(np.zeros_like(lab.case.resident))
    blobs = Blobs(lab.layers, np.ones_like(lab.case.resident))
    options = replace(OPTIONS, has_thread=has_thread)
    with (
        pytest.raises(DeviceError, match="no stager"),
        ChunkStream(ranking, lab.ring, blobs, options) as stream,
    ):
        _begin_first_group(stream, lab.case)


def test_a_blob_larger_than_a_slot_is_refused(lab: Lab) -> None:
    ranking = rank_experts(lab.case.resident)
    large = Tensor.over(lab.device.allocate_pinned(90_000), (1, 90_000), np.uint8)
    with pytest.raises(ShapeError, match="90000 bytes does not fit a slot of 40000"):
        ChunkStream(ranking, lab.ring, Blobs([large]), OPTIONS)


def test_a_depth_out_of_range_is_refused(lab: Lab) -> None:
    ranking = rank_experts(lab.case.resident)
    with pytest.raises(ConfigError, match=r"1\.\.256, got 257"):
        ChunkStream(ranking, lab.ring, Blobs(lab.layers), replace(OPTIONS, depth=257))


def _everybody(case: Case) -> np.typing.NDArray[np.int64]:
    return np.arange(case.resident.shape[1] + 1)


def _begin_first_group(stream: ChunkStream, case: Case) -> None:
    stream.publish(0, _everybody(case))
    next(iter(stream.groups(0)))


def _read_all(stream: ChunkStream, case: Case) -> None:
    for layer in range(len(case.resident)):
        stream.publish(layer, _everybody(case))
        for _ in stream.groups(layer):
            pass
