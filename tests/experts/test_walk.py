"""The walk, its ring and its consumer under the simulator, which checks R1 to R10, R16 and R17."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from strata_cli.engine.experts.depth import FixedDepth
from strata_cli.engine.experts.gate import Gate
from strata_cli.errors import StateError
from tests.experts.broken import BROKEN
from tests.experts.cases import FIXED, cases, plain_case
from tests.experts.simulator import Broken, Case, Parts, simulate

SEEDS = range(24)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("skips", [True, False])
def test_r16_every_fixed_case_ends_with_all_invariants_kept(name: str, skips: bool) -> None:
    for seed in range(3):
        simulate(replace(FIXED[name], skips=skips, seed=seed))


@settings(max_examples=250)
@given(cases())
def test_r1_to_r10_and_r17_hold_for_any_chunk_at_any_speed(case: Case) -> None:
    simulate(case)


@settings(max_examples=50)
@given(cases())
def test_r11_without_publication_nothing_is_skipped(case: Case) -> None:
    class Silent(Gate):
        def publish(self, layer: int, routed: np.typing.NDArray[np.bool_]) -> None:
            pass

    case = replace(case, skips=True, lists_routed=False)
    silent = simulate(case, Parts(gate=Silent))
    plain = simulate(replace(case, skips=False))
    assert silent.num_skipped == 0
    assert silent.copies == plain.copies == list(range(silent.length))


@settings(max_examples=50)
@given(cases())
def test_r12_with_all_routing_known_only_what_must_be_is_copied(case: Case) -> None:
    case = replace(case, skips=True, lists_routed=False, lists_ahead=False)
    outcome = simulate(case, publish_first=True)
    assert set(outcome.copies) == outcome.routed_entries | outcome.staged_entries


def test_r14_a_gate_starts_unpublished_and_takes_each_layer_once() -> None:
    gate = Gate(3, 4)
    assert gate.rows == [None, None, None]
    gate.publish(1, np.array([True, False, False, True]))
    assert gate.rows == [None, bytes([1, 0, 0, 1]), None]
    with pytest.raises(StateError, match="layer 1 was published before"):
        gate.publish(1, np.zeros(4, np.bool_))


@settings(max_examples=50)
@given(cases())
def test_r15_the_consumer_does_the_same_with_skipping_off(case: Case) -> None:
    case = replace(case, takes_landed=False, lists_routed=False)
    logs = [simulate(replace(case, skips=skips)).consumer_log for skips in (True, False)]
    assert logs[0] == logs[1]


def test_the_plain_walk_copies_everything_and_the_routed_one_less() -> None:
    case = plain_case(routed=0.3, ring_slots=6, depth=2)
    plain, routed = simulate(replace(case, skips=False)), simulate(case)
    assert plain.num_copied == plain.length
    assert plain.num_skipped == 0
    assert len(routed.routed_entries) <= routed.num_copied < plain.num_copied


def test_r18_what_is_unlikely_waits_for_its_routing_while_the_link_has_enough_to_do() -> None:
    case = plain_case(routed=0.3, ring_slots=40, depth=16, resident=0.0)
    order = np.argsort(~case.routed, axis=1, kind="stable")
    case = replace(case, order=order, weights=(9, 1, 1, 1), together=4)
    eager = [simulate(replace(case, seed=seed)).num_skipped for seed in range(8)]
    likely = tuple(case.routed.sum(axis=1).tolist())
    case = replace(case, ahead=1, num_likely=likely)
    patient = [simulate(replace(case, seed=seed)).num_skipped for seed in range(8)]
    assert sum(patient) > sum(eager)


def test_a_list_that_grows_ahead_of_the_routing_keeps_every_invariant() -> None:
    for seed in range(12):
        case = plain_case(ring_slots=6 + seed, depth=4, seed=seed)
        case = replace(case, lists_ahead=True, together=3, weights=(seed + 1, 2, 1, 1))
        for selects in (False, True):
            simulate(replace(case, selects=selects))


def test_no_two_copies_of_a_batch_go_to_the_same_slot() -> None:
    """The device may carry them in any order. Staged entries are copied although given back."""
    for seed in range(40):
        case = plain_case(4, 12, resident=0.0, routed=0.2, ring_slots=6, depth=64, seed=seed)
        staged = np.random.default_rng(seed).random(case.staged.shape) < 0.3
        simulate(replace(case, staged=staged, together=8, weights=(1, 9, 9, 9)))


def test_a_small_ring_copies_routed_entries_only() -> None:
    case = replace(plain_case(routed=0.3, ring_slots=8), skips=False, lists_routed=True)
    outcome = simulate(case)
    assert outcome.copies == sorted(outcome.routed_entries)
    assert outcome.num_skipped == 0


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_part_is_caught(name: str) -> None:
    parts, number = BROKEN[name]
    caught = [_broken_invariant(case, parts) for case in _hard_cases()]
    assert number in caught, f"caught as {set(caught)}"


def test_the_cases_that_catch_broken_parts_pass_whole_ones() -> None:
    assert {_broken_invariant(case, Parts()) for case in _hard_cases()} == {""}


def _hard_cases() -> list[Case]:
    """Slow reads behind a fast link, small rings, staged blobs, unlike layers."""
    hard = []
    for seed in SEEDS:
        case = plain_case(ring_slots=5 + seed % 7, depth=3, seed=seed, resident=0.1)
        case = replace(case, weights=(6, 6, 1, 2) if seed % 2 else (2, 1, 2, 2), together=4)
        if seed % 3 == 0:
            rng = np.random.default_rng(seed)
            case = replace(case, staged=~case.resident & (rng.random(case.staged.shape) < 0.3))
        if seed % 4 == 0:
            case = replace(case, blob_bytes=(12, 5, 12, 12), depth=FixedDepth(16))
        if seed % 5 == 0:
            case = replace(case, ahead=2, num_likely=(4, 0, 2, 12), depth=FixedDepth(8))
        hard.append(case)
    return hard


def _broken_invariant(case: Case, parts: Parts) -> str:
    try:
        simulate(case, parts)
    except Broken as broken:
        return str(broken).split(":")[0]
    return ""
