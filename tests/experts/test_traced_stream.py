"""What a chunk's stream tells the trace, on a device with real threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from strata_cli.engine.device.base import Device
from strata_cli.engine.experts.entries import rank_experts
from strata_cli.engine.experts.streaming import StreamCounts, StreamOptions
from strata_cli.engine.trace import EVENTS, Event, Trace
from tests.experts.lab import Lab, large_case
from tests.experts.simulator import Case

OPTIONS = StreamOptions(watchdog_s=20.0)
WAYS = {
    "routed": OPTIONS,
    "inline": replace(OPTIONS, has_thread=False),
    "plain": replace(OPTIONS, skips_unrouted=False),
}


class Traced:
    """A chunk that was streamed with a trace."""

    def __init__(self, device: Device, case: Case, options: StreamOptions) -> None:
        self.case = case
        self.events: list[Event] = []
        trace = Trace(self.events.append)
        lab = Lab(device, case, trace)
        trace.chunk = 4
        self.counts: StreamCounts = lab.stream_chunk(case, options)
        lab.close()

    def of(self, ev: str) -> Iterator[Event]:
        return (event for event in self.events if event["ev"] == ev)

    def sum(self, ev: str, field: str) -> int:
        return int(sum(event[field] for event in self.of(ev)))


@pytest.fixture(params=WAYS)
def traced(device: Device, request: pytest.FixtureRequest) -> Traced:
    return Traced(device, large_case(ring_slots=20), WAYS[request.param])


def test_every_event_has_the_fields_of_the_schema_and_its_chunk(traced: Traced) -> None:
    for event in traced.events:
        assert set(event) == {"v", "t_ns", "ev", "chunk", *EVENTS[event["ev"]]}
        assert event["chunk"] == 4
        assert event.get("dur_us", 0) >= 0


def test_copies_add_up_to_what_the_stream_counted(traced: Traced) -> None:
    counts = traced.counts
    assert traced.sum("copy.run", "entries") == counts.copied
    assert traced.sum("copy.run", "bytes") == counts.copied_bytes
    assert traced.sum("copy.run", "pieces") == counts.num_copies
    assert traced.sum("issuer.turn", "copied") == counts.copied
    assert traced.sum("issuer.turn", "skipped") == counts.skipped
    assert next(traced.of("stream.end"))["skipped"] == counts.skipped
    assert len(list(traced.of("issue.wait"))) == counts.num_waits
    for event in traced.of("copy.run"):
        assert event["slot"] == event["first"] % traced.case.ring_slots
        assert event["last"] - event["first"] + 1 >= event["entries"]


def test_layers_tell_what_was_routed_listed_copied_and_skipped(traced: Traced) -> None:
    case, first = traced.case, 0
    ranking = rank_experts(case.resident, case.order)
    layers = zip(traced.of("layer.routed"), traced.of("layer.entries"), strict=True)
    for index, (routed, entries) in enumerate(layers):
        assert routed["layer"] == entries["layer"] == index
        assert routed["routed"] == case.routed[index].sum()
        assert routed["routed_resident"] == (case.routed & case.resident)[index].sum()
        assert routed["entries"] == entries["entries"] == (~case.resident[index]).sum()
        assert entries["first"] == first
        assert entries["copied"] == traced.counts.copied_of_layer[index]
        assert entries["copied"] + entries["skipped"] == entries["entries"]
        first += entries["entries"]
    assert ranking.num_layers == index + 1


def test_groups_cover_the_routed_experts_each_behind_its_copy(traced: Traced) -> None:
    case = traced.case
    computed = Counter(
        {
            (event["layer"], event["first_rank"]): event["experts"]
            for event in traced.of("group.run")
        }
    )
    assert computed.total() == case.routed.sum()
    residents = [event for event in traced.of("group.run") if event["is_resident"]]
    assert sum(event["experts"] for event in residents) == (case.routed & case.resident).sum()
    waits = [event["layer"] for event in traced.of("copy.wait")]
    streamed = [event["layer"] for event in traced.of("group.run") if not event["is_resident"]]
    assert waits == streamed


def test_time_between_groups_is_the_devices_wait_for_the_host(traced: Traced) -> None:
    groups = Counter(event["layer"] for event in traced.of("group.run"))
    waits = Counter(event["layer"] for event in traced.of("host.wait"))
    assert waits == Counter({layer: count - 1 for layer, count in groups.items() if count > 1})


def test_copies_of_the_link_do_not_overlap(traced: Traced) -> None:
    spans = [(event["t_ns"], event["dur_us"] * 1e3) for event in traced.of("copy.run")]
    for (start, length), (after, _) in pairwise(spans):
        assert start + length <= after + 100  # of rounding


def test_a_small_ring_makes_copies_wait_for_reads(device: Device) -> None:
    traced = Traced(device, large_case(ring_slots=10), WAYS["plain"])
    assert any(traced.of("ring.wait"))
    reasons = {event["reason"] for event in traced.of("issuer.wait")}
    assert "ring_full" in reasons
