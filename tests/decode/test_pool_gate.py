"""When windows ask the pool: both ways are timed, and the faster one is gone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strata_cli.engine.decode.pool_gate import AGAIN, SETTLING, TRIAL, PoolGate


def ways(seconds: Callable[[int, bool], float], windows: int) -> list[bool]:
    """Which way each window went that takes so long."""
    gate, gone = PoolGate(), []
    for index in range(windows):
        gone.append(gate.is_open)
        gate.add(seconds(index, gate.is_open))
    return gone


@pytest.mark.parametrize(("with_pool", "stays"), [(0.8, True), (0.99, False), (1.2, False)])
def test_both_ways_are_tried_and_the_faster_one_is_kept(with_pool: float, stays: bool) -> None:
    gone = ways(lambda _, is_open: with_pool if is_open else 1.0, 2 * TRIAL + AGAIN)
    assert gone[: 2 * TRIAL] == [True] * TRIAL + [False] * TRIAL
    assert gone[2 * TRIAL :] == [stays] * AGAIN


def test_windows_in_which_all_is_new_do_not_count() -> None:
    """A graph is recorded in the first one of either way."""

    def seconds(index: int, is_open: bool) -> float:
        return 100.0 if index % TRIAL < SETTLING else 0.5 if is_open else 1.0

    assert all(ways(seconds, 2 * TRIAL + 50)[2 * TRIAL :])


def test_what_changes_is_noticed() -> None:
    change = 2 * TRIAL + AGAIN // 2

    def seconds(index: int, is_open: bool) -> float:
        pool = 0.5 if index < change else 2.0
        return pool if is_open else 1.0

    gone = ways(seconds, 2 * TRIAL + 2 * AGAIN)
    assert gone[2 * TRIAL : 2 * TRIAL + AGAIN] == [True] * AGAIN
    assert not any(gone[2 * TRIAL + AGAIN :])


def test_the_slower_way_is_tried_now_and_then() -> None:
    gone = ways(lambda _, is_open: 2.0 if is_open else 1.0, 2 * TRIAL + AGAIN + TRIAL + 5)
    assert gone[2 * TRIAL + AGAIN :] == [True] * TRIAL + [False] * 5
