"""The clock itself, then what orders and depths gain on it."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.experts.depth import AutoDepth, FixedDepth
from strata_cli.engine.experts.order import by_score, oracle
from strata_cli.engine.experts.walk import ANY_NUMBER
from tests.experts.clocked import (
    ClockedChunk,
    SimClock,
    SimLink,
    SimRouter,
    Speeds,
    Timing,
    rules_of,
)

NONE = np.zeros((2, 8), np.bool_)
ALL = ~NONE
ROUTER = SimRouter(8, 128, 8, skew=1.0, topic=0.7)
SPEEDS = Speeds(copy_us=20.0, dense_us=300.0, expert_us=1.0)


def test_a_link_copies_one_after_the_other_into_released_slots() -> None:
    clock = SimClock(5.0)
    link = SimLink(clock, 10.0, 2)
    link.released_us[1] = 40.0
    link.copy([0, 1])
    assert link.landing_us == {0: 15.0, 1: 50.0}
    assert link.next_landing_us() == 15.0
    clock.now_us = 15.0
    assert link.has_landed(0)
    assert not link.has_landed(1)
    assert link.next_landing_us() == 50.0
    assert link.busy_us == 20.0


def test_a_chunk_that_the_link_bounds_takes_its_copies_and_a_rest() -> None:
    speeds = Speeds(copy_us=10.0, dense_us=1.0, expert_us=0.5)
    timing = ClockedChunk(NONE, ALL, None, rules_of(None, 16), speeds).run()
    assert timing.copied == timing.needed == 16
    assert timing.total_us == pytest.approx(16 * 10.0 + 8 * 0.5)
    assert timing.avoided == 1.0


def test_a_chunk_of_residents_takes_what_it_computes() -> None:
    timing = ClockedChunk(ALL, ALL, None, rules_of(FixedDepth(4)), SPEEDS).run()
    assert timing.total_us == pytest.approx(2 * (300.0 + 8 * 1.0))
    assert timing.copied == 0


def test_traffic_is_skewed_and_complete() -> None:
    counts = ROUTER.prompt(100, seed=1)
    assert (counts.sum(axis=1) == 100 * 8).all()
    assert counts.max() <= 100
    top = np.sort(counts, axis=1)[:, -13:].sum() / counts.sum()
    assert top > 0.3  # a tenth of the experts


def test_the_routed_stream_is_faster_than_the_plain_one_and_a_good_order_avoids_more() -> None:
    counts = ROUTER.prompt(40, seed=2)
    plain = _run(counts, None, FixedDepth(16), is_plain=True)
    by_id = _run(counts, None, FixedDepth(16))
    likely = _run(counts, by_score(ROUTER.profile), FixedDepth(16))
    best = _run(counts, oracle(counts), FixedDepth(16))
    assert plain.total_us > by_id.total_us > likely.total_us >= best.total_us
    assert plain.avoided == 0.0
    assert by_id.avoided < likely.avoided <= best.avoided == 1.0


def test_a_deeper_queue_avoids_less() -> None:
    counts = ROUTER.prompt(40, seed=3)
    avoided = [_run(counts, None, FixedDepth(depth)).avoided for depth in (4, 32, 256)]
    assert avoided == sorted(avoided, reverse=True)
    assert avoided[0] > avoided[2]


def test_unlikely_copies_that_wait_avoid_as_much_as_a_short_queue_beside_a_deep_one() -> None:
    counts = ROUTER.prompt(40, seed=3)
    order = by_score(ROUTER.profile)
    deep, short = (_run(counts, order, FixedDepth(depth)) for depth in (256, 8))
    patient = _run(counts, order, FixedDepth(256), ahead=8)
    assert deep.avoided < short.avoided == pytest.approx(patient.avoided, abs=0.03)
    assert patient.total_us < deep.total_us


def test_an_automatic_depth_gets_on_without_being_told() -> None:
    counts = ROUTER.prompt(40, seed=4)
    fixed = _run(counts, None, FixedDepth(16))
    auto = _run(counts, None, AutoDepth())
    assert auto.total_us < 1.02 * fixed.total_us


def _run(
    counts: np.typing.NDArray[np.int64],
    order: np.typing.NDArray[np.int64] | None,
    depth: FixedDepth | AutoDepth,
    *,
    is_plain: bool = False,
    ahead: int = ANY_NUMBER,
) -> Timing:
    resident = np.zeros(counts.shape, np.bool_)
    rules = rules_of(None if is_plain else depth, ring_slots=64, ahead=ahead)
    return ClockedChunk(resident, counts > 0, order, rules, SPEEDS).run()
