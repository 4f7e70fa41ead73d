"""Issuers in every state a walk can wait in: stopped, failing, hanging, interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from strata_cli.engine.experts.depth import FixedDepth
from strata_cli.engine.experts.entries import EntryList, Ranking, list_entries, rank_experts
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.issuer import InlineIssuer, Issuer, ThreadIssuer
from strata_cli.engine.experts.waiting import LONGEST_NAP_S, SHORTEST_NAP_S, Bell, Pace
from strata_cli.engine.experts.walk import Turn, Walk, WalkRules
from strata_cli.errors import DeviceError, StallError, StateError
from tests.device.gates import wait_until

NUM_EXPERTS = 8
PATIENCE_S = 20.0
SOON_S = 0.05
ISSUERS = pytest.mark.parametrize("issues", [ThreadIssuer, InlineIssuer])


@dataclass
class FakeLink:
    """A link whose copies land when told, and that fails when told."""

    copied: list[int] = field(default_factory=list)
    lands: bool = False
    is_ready: bool = False
    fails_in: str = ""
    interrupts: bool = False

    def copy(self, batch: Sequence[int]) -> None:
        self._fail("copy")
        self.copied += batch

    def has_landed(self, k: int) -> bool:  # noqa: ARG002  a link's signature
        self._fail("has_landed")
        if self.interrupts:
            self.interrupts = False
            os.kill(os.getpid(), signal.SIGINT)
        return self.lands

    def is_staged(self, k: int) -> bool:  # noqa: ARG002  a link's signature
        self._fail("is_staged")
        return self.is_ready

    def _fail(self, call: str) -> None:
        if call == self.fails_in:
            raise DeviceError(f"{call} failed")


class NeverReached:
    """An event that does not come."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise NotImplementedError

    def elapsed_ms(self, start: object) -> float:
        raise NotImplementedError

    def close(self) -> None: ...


class Bench:
    """A walk over one layer that gets into a given state, and what moves it on."""

    def __init__(self, state: Turn) -> None:
        self.link = FakeLink()
        self.gate: Gate | None = Gate(1, NUM_EXPERTS)
        ranking = rank_experts(np.zeros((1, NUM_EXPERTS), np.bool_))
        self.entries = _entries(ranking, state)
        ring = 3 if state is Turn.RING_FULL else 100
        depth = FixedDepth(3 if state is Turn.LINK_FULL else 100)
        likely = [1] if state is Turn.UNLIKELY else None
        rules = WalkRules(ring, depth, ahead=3)
        self.walk = Walk(self.entries, self.link, rules, self.gate, likely)


def _entries(ranking: Ranking, state: Turn) -> EntryList:
    if state is Turn.UNROUTED:
        return EntryList(1)
    is_staged = state is Turn.UNSTAGED
    return list_entries(ranking, np.full((1, NUM_EXPERTS), is_staged))


WAITING = [Turn.RING_FULL, Turn.LINK_FULL, Turn.UNROUTED, Turn.UNLIKELY, Turn.UNSTAGED]


@pytest.mark.parametrize("state", WAITING)
def test_r13_stop_ends_the_thread_in_every_wait_state(state: Turn) -> None:
    bench = Bench(state)
    issuer = ThreadIssuer(bench.walk, PATIENCE_S)
    issuer.start()
    wait_until(lambda: state.value in bench.walk.report())
    issuer.close()
    assert not issuer._thread.is_alive()
    assert bench.walk.turn() is Turn.STOPPED
    issuer.close()


@pytest.mark.parametrize("state", WAITING)
@ISSUERS
def test_r13_a_waiting_consumer_hears_of_the_stop(
    state: Turn, issues: type[ThreadIssuer | InlineIssuer]
) -> None:
    bench = Bench(state)
    issuer: Issuer = issues(bench.walk, PATIENCE_S)
    issuer.start()
    issuer.stop()
    with pytest.raises(StateError, match="stopped"):
        issuer.require(NUM_EXPERTS - 1)
    with pytest.raises(StateError, match="stopped"):
        issuer.await_event(NeverReached(), "routing")
    issuer.close()


@pytest.mark.parametrize("state", WAITING)
@ISSUERS
def test_the_watchdog_ends_a_wait_and_says_what_for(
    state: Turn, issues: type[ThreadIssuer | InlineIssuer]
) -> None:
    bench = Bench(state)
    issuer: Issuer = issues(bench.walk, SOON_S)
    issuer.start()
    with pytest.raises(StallError, match=r"waiting for entry 7; last turn: .*consumed 0") as stall:
        issuer.require(NUM_EXPERTS - 1)
    assert state.value in stall.value.message
    with pytest.raises(StallError, match="waiting for the routing of layer 0"):
        issuer.await_event(NeverReached(), "the routing of layer 0")
    issuer.close()


@pytest.mark.parametrize("call", ["copy", "has_landed", "is_staged"])
@ISSUERS
def test_a_failure_of_the_link_reaches_the_consumer(
    call: str, issues: type[ThreadIssuer | InlineIssuer]
) -> None:
    bench = Bench(Turn.UNSTAGED if call == "is_staged" else Turn.LINK_FULL)
    issuer: Issuer = issues(bench.walk, PATIENCE_S)
    bench.link.fails_in = call
    with pytest.raises(DeviceError, match=f"{call} failed"):
        _start_and_require(issuer)
    with pytest.raises(DeviceError, match=f"{call} failed"):
        issuer.await_event(NeverReached(), "routing")
    with pytest.raises(DeviceError, match=f"{call} failed"):
        issuer.finish()
    issuer.close()


@ISSUERS
def test_publication_ends_the_wait_for_link_room(
    issues: type[ThreadIssuer | InlineIssuer],
) -> None:
    bench = Bench(Turn.LINK_FULL)
    issuer: Issuer = issues(bench.walk, PATIENCE_S)
    issuer.start()
    wait_until(lambda: bench.walk.issued == 3)
    assert bench.gate is not None
    bench.gate.publish(0, np.zeros(NUM_EXPERTS, np.bool_))
    issuer.nudge()
    issuer.finish()
    assert bench.link.copied == [0, 1, 2]
    assert bench.walk.skipped == NUM_EXPERTS - 3
    issuer.close()


@ISSUERS
def test_landed_copies_and_given_back_entries_let_the_walk_go_on(
    issues: type[ThreadIssuer | InlineIssuer],
) -> None:
    bench = Bench(Turn.RING_FULL)
    issuer: Issuer = issues(bench.walk, PATIENCE_S)
    issuer.start()
    for k in range(NUM_EXPERTS):
        issuer.require(k)
        bench.walk.consume(1)
        issuer.nudge()
    issuer.finish()
    assert bench.link.copied == list(range(NUM_EXPERTS))
    issuer.close()


def test_waits_are_counted() -> None:
    bench = Bench(Turn.LINK_FULL)
    issuer = InlineIssuer(bench.walk, SOON_S)
    issuer.start()
    issuer.require(2)
    assert issuer.num_waits == 0
    with pytest.raises(StallError):
        issuer.require(3)
    bench.link.lands = True
    issuer.require(3)
    assert issuer.num_waits == 1
    assert issuer.waited_s > 0


@pytest.mark.parametrize("issues", [ThreadIssuer, InlineIssuer])
def test_ctrl_c_ends_a_wait(issues: type[ThreadIssuer | InlineIssuer]) -> None:
    bench = Bench(Turn.LINK_FULL)
    bench.link.interrupts = True
    issuer: Issuer = issues(bench.walk, PATIENCE_S)
    with pytest.raises(KeyboardInterrupt):
        _start_and_require(issuer)
    issuer.close()


def test_a_bell_keeps_one_ring() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    bell.wait(PATIENCE_S)
    bell.wait(SOON_S / 10)


def test_a_nap_lasts_as_long_as_the_copies_that_may_land_meanwhile() -> None:
    pace = Pace()
    assert SHORTEST_NAP_S < pace.nap_s(0, 5, 0.0) < LONGEST_NAP_S
    assert pace.nap_s(10, 4, 300e-6) == pytest.approx(4 * 30e-6)
    assert pace.nap_s(10, 4, 900e-6) == pytest.approx(4 * 30e-6)  # nothing landed: as before
    assert pace.nap_s(1010, 0, 1e-3) == SHORTEST_NAP_S
    pace.interrupt()
    assert pace.nap_s(1011, 1000, 9.0) == pytest.approx(LONGEST_NAP_S)


def _start_and_require(issuer: Issuer) -> None:
    issuer.start()
    issuer.require(NUM_EXPERTS - 1)
