"""A trace of two chunks whose experts were streamed, from a device with real threads."""

from __future__ import annotations

from strata_cli.engine.device import open_device
from strata_cli.engine.experts.streaming import StreamCounts, StreamOptions
from strata_cli.engine.trace import OUTSIDE, Event, Trace
from tests.experts.lab import Lab, large_case

NUM_LAYERS, RING_SLOTS = 6, 20


def streamed_trace() -> tuple[list[Event], list[StreamCounts]]:
    """Events in the order of their times, and what each chunk's stream counted."""
    events: list[Event] = []
    counts = []
    trace = Trace(events.append)
    trace.event(
        "run.begin",
        model="m",
        device="host",
        num_layers=NUM_LAYERS,
        num_experts=24,
        chunk_tokens=8,
        num_resident=50,
    )
    start_ns = trace.now_ns()
    with open_device("host") as device:
        lab = Lab(device, large_case(NUM_LAYERS, ring_slots=RING_SLOTS), trace)
        for chunk in range(2):
            trace.chunk = chunk
            trace.event("chunk.begin", position=8 * chunk, tokens=8, ring_slots=RING_SLOTS)
            case = large_case(NUM_LAYERS, ring_slots=RING_SLOTS, seed=chunk)
            counts.append(lab.stream_chunk(case, StreamOptions(watchdog_s=20.0)))
            _compute_layers(lab, trace)
            trace.event("layer.cpu", layer=1, experts=3, pairs=4, dur_us=1.0)
            trace.event("chunk.end", tokens=8, dur_us=5.0)
        trace.chunk = OUTSIDE
        lab.close()
    trace.since("prompt.end", start_ns, tokens=16)
    return sorted(events, key=lambda event: int(event["t_ns"])), counts


def _compute_layers(lab: Lab, trace: Trace) -> None:
    """Layers as if their groups had been marked while they ran."""
    start_ns = trace.now_ns()
    for layer in range(NUM_LAYERS):
        trace.event("layer.run", t_ns=start_ns + 1000 * layer, layer=layer, dur_us=1.0)
