from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.measuring.perfetto import TRACKS, as_perfetto
from strata_cli.engine.measuring.summary import EntryLayers, Traffic, add, summarize
from strata_cli.engine.measuring.timeline import SHADES, shade, timeline
from strata_cli.engine.trace import Event
from tests.measuring.streamed import NUM_LAYERS, RING_SLOTS, streamed_trace


def event(ev: str, t_us: float, chunk: int = 0, **fields: object) -> Event:
    return {"v": 1, "t_ns": round(1e3 * t_us), "ev": ev, "chunk": chunk, **fields}


def copy(t_us: float, dur_us: float, first: int, nbytes: int) -> Event:
    return event("copy.run", t_us, first=first, entries=1, bytes=nbytes, dur_us=dur_us)


SMALL = [
    event("chunk.begin", 0, position=64, tokens=9, ring_slots=8),
    event("layer.run", 100, layer=0, dur_us=100.0),
    event("layer.run", 200, layer=2, dur_us=200.0),
    event("layer.routed", 120, layer=0, routed=5, routed_resident=2, entries=4, pairs=9),
    event("layer.entries", 300, layer=0, first=0, entries=4, copied=3, skipped=1),
    event("layer.entries", 300, layer=1, first=4, entries=0, copied=0, skipped=0),
    event("layer.entries", 300, layer=2, first=4, entries=2, copied=1, skipped=1),
    event("copy.wait", 150, layer=0, entry=2, dur_us=30.0),
    event("host.wait", 210, layer=2, dur_us=40.0),
    copy(50, 40.0, 0, 120_000),
    copy(90, 60.0, 2, 240_000),
    copy(250, 100.0, 5, 100_000),
    event("ring.wait", 92, slot=1, dur_us=7.0),
    event("issue.wait", 130, entry=2, dur_us=11.0),
    event("device.wait", 110, what="the routing of layer 0", dur_us=13.0),
    event("issuer.turn", 50, first=0, last=1, copied=1, skipped=1, ended_by="done", dur_us=50.0),
    event("issuer.wait", 95, reason="ring_full", dur_us=17.0),
    event("issuer.wait", 125, reason="ring_full", dur_us=3.0),
    event("layer.cpu", 140, layer=2, experts=2, pairs=2, dur_us=9.0),
    event("from.the.future", 141, colour="blue"),
]


def test_steps_in_numbers() -> None:
    counts = {"routed": 30, "hits": 20, "pcie": 7, "cpu": 2, "dropped": 1}
    events = [
        event("window.experts", 1, chunk=-1, rows=1, **counts),
        event("cache.swap", 2, chunk=-1, swaps=4),
        event("cache.land", 3, chunk=-1, landed=4, coming=0),
        event("window.experts", 4, chunk=-1, rows=1, **counts),
    ]
    steps = summarize(events).steps
    assert steps == ResidencyCounts(2, 60, 40, 14, 4, 2, 4)
    assert steps.hit_rate == pytest.approx(2 / 3)
    assert summarize(SMALL).steps == ResidencyCounts()


def test_a_chunk_in_numbers() -> None:
    (chunk,) = summarize(SMALL).chunks
    assert (chunk.position, chunk.tokens, chunk.ring_slots) == (64, 9, 8)
    assert chunk.wall_us == 350  # from the first copy to the end of the last layer
    assert chunk.traffic == Traffic(
        routed=5, resident=2, copied=4, skipped=2, cpu=2, unrouted=1, bytes=460_000,
        link_us=200.0, run_us=300.0, copy_wait_us=30.0, host_wait_us=40.0,
        ring_wait_us=7.0,
    )  # fmt: skip
    assert chunk.link_share == pytest.approx(200 / 350)
    assert chunk.traffic.link_gbps == pytest.approx(2.3)
    assert chunk.traffic.needed == 5 - 2 - 2
    assert chunk.traffic.needed_ms == pytest.approx(0.2 / 4)
    assert (chunk.issue_wait_us, chunk.device_wait_us) == (11, 13)
    assert chunk.issuer_wait_us == {"ring_full": 20}


def test_copies_belong_to_the_layer_of_their_first_entry() -> None:
    (chunk,) = summarize(SMALL).chunks
    assert [layer.layer for layer in chunk.layers] == [0, 1, 2]
    assert [layer.traffic.bytes for layer in chunk.layers] == [360_000, 0, 100_000]
    assert [layer.traffic.link_us for layer in chunk.layers] == [100, 0, 100]
    assert EntryLayers([])(7) == 0


@pytest.mark.parametrize(("copied", "share"), [(10, 1), (15, 0.75), (30, 0), (8, 1)])
def test_what_came_although_no_token_wanted_it_counts(copied: int, share: float) -> None:
    traffic = Traffic(routed=14, resident=4, unrouted=20, copied=copied)
    assert traffic.avoided_share == pytest.approx(share)
    assert Traffic(routed=3).avoided_share == 1


def test_a_trace_that_was_cut_off_is_summed_up_as_far_as_it_goes() -> None:
    run = summarize([event("prompt.begin", 0, -1, position=0, tokens=3), *SMALL[:1]])
    assert (run.model, run.num_pairs, run.tokens) == ("", 0, 0)
    assert (run.prompt_ms, run.tokens_per_s, run.link_share) == (0, 0, 0)
    assert run.chunks[0].wall_us == run.chunks[0].link_share == 0
    assert not run.is_streamed
    assert add([]) == Traffic()


def test_a_streamed_run_adds_up_to_what_its_streams_counted() -> None:
    events, counts = streamed_trace()
    run = summarize(events)
    assert (run.model, run.device, run.tokens) == ("m", "host", 16)
    assert (run.num_pairs, run.num_resident) == (144, 50)
    assert run.is_streamed
    for chunk, count in zip(run.chunks, counts, strict=True):
        assert chunk.ring_slots == RING_SLOTS
        assert (chunk.traffic.copied, chunk.traffic.skipped) == (count.copied, count.skipped)
        assert chunk.traffic.bytes == count.copied_bytes
        assert tuple(layer.traffic.copied for layer in chunk.layers) == count.copied_of_layer
        assert sum(layer.traffic.bytes for layer in chunk.layers) == count.copied_bytes
        assert [layer.layer for layer in chunk.layers] == list(range(NUM_LAYERS))
        assert 0 < chunk.link_share <= 1
    assert run.traffic.cpu == 6


def test_perfetto_gets_spans_on_named_tracks_that_nest() -> None:
    events, _ = streamed_trace()
    shown = as_perfetto(events)["traceEvents"]
    names = {item["tid"]: item["args"]["name"] for item in shown if item["ph"] == "M"}
    assert names == {track.number: track.name for track in TRACKS}
    open_until: dict[int, list[float]] = {track.number: [] for track in TRACKS}
    for item in sorted(shown, key=lambda item: (item.get("ts", 0), -item.get("dur", 0))):
        assert item["pid"] == 1
        assert item["ph"] in "MXi"
        if item["ph"] != "X" or item["cat"] in ("layer.cpu", "layer.run", "chunk.end"):
            continue  # those are made up
        ends = open_until[item["tid"]]
        while ends and ends[-1] <= item["ts"]:
            ends.pop()
        assert not ends or item["ts"] + item["dur"] <= ends[-1]
        ends.append(item["ts"] + item["dur"])
    assert sum(item["cat"] == "copy.run" for item in shown if item["ph"] == "X") > 5
    assert {"chunk 0", "chunk 1", "prompt"} <= {item["name"] for item in shown}


def test_the_timeline_shows_when_each_part_was_busy() -> None:
    run = summarize(SMALL)
    lines = timeline(run.chunks[0], SMALL, width=7)  # of 50 us: 50, 100, ... 400
    assert lines["compute"] == " #:.###"
    assert lines["link"] == "##  ## "
    assert lines["issuer"] == "#      "


def test_shades_are_quarters() -> None:
    assert shade(np.array([-0.1, 0, 5e-4, 0.01, 0.25, 0.26, 0.6, 0.8, 1, 1.5])) == "   ..:=###"
    assert len(SHADES) == 5


def test_perfetto_gets_no_span_that_rounding_made_overlap() -> None:
    """Perfetto drops those."""
    layer = {"layer": 0}
    events = [
        event("layer.run", 1, dur_us=10.0, **layer),
        event("host.wait", 1, dur_us=4.1, **layer),
        event("copy.wait", 5.05, dur_us=6.0, entry=0, **layer),
        event("layer.run", 10.97, dur_us=2.0, **layer),
    ]
    shown = [item for item in as_perfetto(events)["traceEvents"] if item["ph"] == "X"]
    assert [item["ts"] for item in shown] == [1, 1, 5.05, 10.97]
    assert [item["dur"] for item in shown] == pytest.approx([9.968, 4.048, 5.918, 2])
