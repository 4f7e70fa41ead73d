"""How a layer's experts are grouped: by what has landed, and not too far ahead of the device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from strata_cli.engine.device.base import Device, Event, empty
from strata_cli.engine.experts.consumer import Consumer, ConsumerRules
from strata_cli.engine.experts.entries import list_entries, rank_experts
from strata_cli.engine.experts.issuer import Issuer
from strata_cli.engine.experts.ring import Ring

NUM_EXPERTS = 40
RING_SLOTS = 64


class IssuedIssuer:
    """Has issued everything; notes which events the consumer waits for."""

    def __init__(self) -> None:
        self.awaited: list[Event] = []
        self.walk = SimpleNamespace(issued=NUM_EXPERTS, consumed=0, consume=self._consume)

    def _consume(self, count: int) -> None:
        self.walk.consumed += count

    def nudge(self) -> None:
        pass

    def require(self, k: int) -> None:
        assert k < self.walk.issued

    def await_event(self, event: Event, what: str) -> None:
        assert "layer 0" in what
        self.awaited.append(event)


def groups_of(
    device: Device, monkeypatch: pytest.MonkeyPatch, landed: int, rules: ConsumerRules
) -> tuple[list[range], IssuedIssuer, list[Event]]:
    """The groups of a layer whose experts are all routed; what waited; the release events."""
    issuer = IssuedIssuer()
    released: list[Event] = []
    slots = empty(device, (RING_SLOTS, 16), np.uint8)
    copies, reads = device.stream("copies"), device.stream("reads")
    with slots.buffer:
        ring = Ring(device, slots, copies, reads)
        release = ring.release

        def noted(entries: Sequence[int]) -> Event:
            released.append(release(entries))
            return released[-1]

        monkeypatch.setattr(ring, "has_landed", lambda k: k < landed)
        monkeypatch.setattr(ring, "await_copy", lambda k: None)  # noqa: ARG005
        monkeypatch.setattr(ring, "release", noted)
        ranking = rank_experts(np.zeros((1, NUM_EXPERTS), np.bool_))
        entries = list_entries(ranking)
        consumer = Consumer(ranking, entries, ring, cast(Issuer, issuer), None, rules)
        consumer.publish(0, np.arange(NUM_EXPERTS + 1))
        groups = list(consumer.groups(0))
        reads.synchronize()
        ring.close()
    return groups, issuer, released


@pytest.mark.parametrize(
    ("landed", "expected"),
    [
        (0, [4] * 10),  # none has: as many as a group waits for
        (11, [11, 4, 4, 4, 4, 4, 4, 4, 1]),  # a part of what is issued
        (32, [32, 4, 4]),  # half of the ring, and no more
        (40, [32, 8]),
    ],
)
def test_a_group_is_what_has_landed(
    device: Device, monkeypatch: pytest.MonkeyPatch, landed: int, expected: list[int]
) -> None:
    groups, _, _ = groups_of(device, monkeypatch, landed, ConsumerRules(group=4))
    assert [len(group) for group in groups] == expected
    assert [rank for group in groups for rank in group] == list(range(NUM_EXPERTS))


def test_a_third_group_waits_for_the_first(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, issuer, released = groups_of(device, monkeypatch, 0, ConsumerRules(group=10))
    assert len(released) == 4
    assert issuer.awaited == released[:2]


def test_groups_of_a_fixed_size_wait_for_copies_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = ConsumerRules(group=10, takes_landed=False)
    groups, issuer, _ = groups_of(device, monkeypatch, 40, rules)
    assert [len(group) for group in groups] == [10] * 4
    assert not issuer.awaited
