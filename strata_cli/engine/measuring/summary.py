"""A trace in numbers: per chunk and layer, what was copied, skipped and waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.trace import OUTSIDE, Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Experts and bytes of a layer, a chunk or a run; and times in microseconds.

    Attributes:
        routed: experts that some token wanted; known of streamed chunks alone.
        resident: of those, the ones that lay where kernels read them.
        copied, skipped: entries of the ring's list.
        cpu: experts computed on the host's processor.
        unrouted: experts that no token wanted and that were not resident.
        bytes: that came over the link.
        link_us: the link was busy for so long.
        run_us: the layers took so long on the device, waits included.
        copy_wait_us: of that, the device waited for copies.
        host_wait_us: of that, it waited for the host to know routing or issued entries.
        ring_wait_us: the link waited for reads of a slot.
    """

    routed: int = 0
    resident: int = 0
    copied: int = 0
    skipped: int = 0
    cpu: int = 0
    unrouted: int = 0
    bytes: int = 0
    link_us: float = 0.0
    run_us: float = 0.0
    copy_wait_us: float = 0.0
    host_wait_us: float = 0.0
    ring_wait_us: float = 0.0

    @property
    def link_gbps(self) -> float:
        """Rate of the link while it was busy, in 10^9 bytes per second; 0 if it never was."""
        return self.bytes / self.link_us / 1e3 if self.link_us else 0.0

    @property
    def needed(self) -> int:
        """Experts that had to come over the link."""
        return self.routed - self.resident - self.cpu

    @property
    def avoided_share(self) -> float:
        """Of the experts that need not come, the share that did not, 0 to 1; 1 if all had to."""
        in_vain = max(self.copied - self.needed, 0)
        return 1 - in_vain / self.unrouted if self.unrouted else 1.0

    @property
    def needed_ms(self) -> float:
        """How long the link takes for what is needed alone, at its rate; 0 if it never was busy."""
        return self.link_us / 1e3 * min(self.needed / self.copied, 1) if self.copied else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSummary:
    """One layer of a chunk."""

    layer: int
    traffic: Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSummary:
    """One chunk.

    Attributes:
        chunk: number within the run.
        position: of its first token.
        tokens: of the chunk.
        ring_slots: of the ring that its experts came through; 0: there was none.
        start_ns, stop_ns: from the first to the last thing that the device did for it.
        traffic: of all layers.
        issue_wait_us: the compute thread waited for entries to be issued.
        device_wait_us: the compute thread waited for the device, mostly for routing.
        issuer_wait_us: the issuer waited, by what for (see issuer.wait in docs/trace.md).
        layers: in order.
    """

    chunk: int
    position: int
    tokens: int
    ring_slots: int
    start_ns: int
    stop_ns: int
    traffic: Traffic
    issue_wait_us: float
    device_wait_us: float
    issuer_wait_us: dict[str, float]
    layers: tuple[LayerSummary, ...]

    @property
    def wall_us(self) -> float:
        """How long the chunk took."""
        return (self.stop_ns - self.start_ns) / 1e3

    @property
    def link_share(self) -> float:
        """The share of that in which the link was busy, 0 to 1."""
        return self.traffic.link_us / self.wall_us if self.wall_us else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """All prompts of a trace.

    Attributes:
        model, device: of the run; "" if the trace does not begin with it.
        num_pairs: experts of all layers; 0 if the trace does not begin with it.
        num_resident: of those, when the model was loaded.
        tokens: of all prompts.
        prompt_ms: that they took.
        traffic: of all chunks.
        chunks: in order.
        steps: what became of the cached experts that steps wanted.
    """

    model: str
    device: str
    num_pairs: int
    num_resident: int
    tokens: int
    prompt_ms: float
    traffic: Traffic
    chunks: tuple[ChunkSummary, ...]
    steps: ResidencyCounts

    @property
    def is_streamed(self) -> bool:
        """Whether any expert was streamed."""
        return any(chunk.traffic.copied or chunk.traffic.skipped for chunk in self.chunks)

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second; 0 where no prompt ended."""
        return self.tokens / self.prompt_ms * 1e3 if self.prompt_ms else 0.0

    @property
    def link_share(self) -> float:
        """The share of the prompts' time in which the link was busy, 0 to 1."""
        return self.traffic.link_us / self.prompt_ms / 1e3 if self.prompt_ms else 0.0


def add(parts: Iterable[Traffic]) -> Traffic:
    """The traffic of all parts together."""
    all_parts = list(parts)
    names = [field.name for field in fields(Traffic)]
    return Traffic(**{name: sum(getattr(part, name) for part in all_parts) for name in names})


def summarize(events: Sequence[Event]) -> RunSummary:
    """A trace's events in numbers. Events of unknown names are ignored."""
    by_chunk: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        by_chunk[event["chunk"]].append(event)
    outside = by_chunk.pop(OUTSIDE, [])
    begin = next((event for event in outside if event["ev"] == "run.begin"), None)
    ends = [event for event in outside if event["ev"] == "prompt.end"]
    chunks = tuple(_chunk(number, by_chunk[number]) for number in sorted(by_chunk))
    return RunSummary(
        model=begin["model"] if begin else "",
        device=begin["device"] if begin else "",
        num_pairs=begin["num_layers"] * begin["num_experts"] if begin else 0,
        num_resident=begin["num_resident"] if begin else 0,
        tokens=sum(event["tokens"] for event in ends),
        prompt_ms=sum(event["dur_us"] for event in ends) / 1e3,
        traffic=add(chunk.traffic for chunk in chunks),
        chunks=chunks,
        steps=_steps(events),
    )


def _steps(events: Sequence[Event]) -> ResidencyCounts:
    of = _by_name(events)
    names = ("routed", "hits", "pcie", "cpu", "dropped")
    sums = {name: sum(event[name] for event in of["window.experts"]) for name in names}
    swaps = sum(event["swaps"] for event in of["cache.swap"])
    return ResidencyCounts(windows=len(of["window.experts"]), swaps=swaps, **sums)


def _chunk(number: int, events: Sequence[Event]) -> ChunkSummary:
    of = _by_name(events)
    begin = of["chunk.begin"][0] if of["chunk.begin"] else {}
    waits: defaultdict[str, float] = defaultdict(float)
    for event in of["issuer.wait"]:
        waits[event["reason"]] += event["dur_us"]
    layers = _layers(of)
    total = add(layer.traffic for layer in layers)
    start_ns, stop_ns = _bounds(of, events)
    return ChunkSummary(
        chunk=number,
        position=begin.get("position", 0),
        tokens=begin.get("tokens", 0),
        ring_slots=begin.get("ring_slots", 0),
        start_ns=start_ns,
        stop_ns=stop_ns,
        traffic=add([total, Traffic(ring_wait_us=_sum(of["ring.wait"]))]),
        issue_wait_us=_sum(of["issue.wait"]),
        device_wait_us=_sum(of["device.wait"]),
        issuer_wait_us={reason: round(waits[reason], 1) for reason in sorted(waits)},
        layers=layers,
    )


def _layers(of: defaultdict[str, list[Event]]) -> tuple[LayerSummary, ...]:
    parts: defaultdict[int, list[Traffic]] = defaultdict(list)
    for event in of["layer.run"]:
        parts[event["layer"]].append(Traffic(run_us=event["dur_us"]))
    for event in of["layer.routed"]:
        streamed = event["routed"] - event["routed_resident"]
        traffic = Traffic(
            routed=event["routed"],
            resident=event["routed_resident"],
            unrouted=event["entries"] - streamed,
        )
        parts[event["layer"]].append(traffic)
    for event in of["layer.entries"]:
        traffic = Traffic(copied=event["copied"], skipped=event["skipped"])
        parts[event["layer"]].append(traffic)
    for event in of["layer.cpu"]:
        parts[event["layer"]].append(Traffic(cpu=event["experts"]))
    for event in of["copy.wait"]:
        parts[event["layer"]].append(Traffic(copy_wait_us=event["dur_us"]))
    for event in of["host.wait"]:
        parts[event["layer"]].append(Traffic(host_wait_us=event["dur_us"]))
    layer_of = EntryLayers(of["layer.entries"])
    for event in of["copy.run"]:
        traffic = Traffic(bytes=event["bytes"], link_us=event["dur_us"])
        parts[layer_of(event["first"])].append(traffic)
    return tuple(LayerSummary(layer=layer, traffic=add(parts[layer])) for layer in sorted(parts))


class EntryLayers:
    """The layer of each entry of one chunk.

    Args:
        events: the chunk's layer.entries.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        filled = [event for event in events if event["entries"]]
        self._firsts = [event["first"] for event in filled]
        self._layers = [event["layer"] for event in filled]

    def __call__(self, entry: int) -> int:
        """The entry's layer; 0 where the trace does not say."""
        index = bisect_right(self._firsts, entry) - 1
        return int(self._layers[index]) if index >= 0 else 0


def _bounds(of: defaultdict[str, list[Event]], events: Sequence[Event]) -> tuple[int, int]:
    spans = of["layer.run"] + of["copy.run"] or list(events)
    stops = [event["t_ns"] + round(1e3 * event.get("dur_us", 0)) for event in spans]
    return min(event["t_ns"] for event in spans), max(stops)


def _by_name(events: Sequence[Event]) -> defaultdict[str, list[Event]]:
    of: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        of[event["ev"]].append(event)
    return of


def _sum(events: Sequence[Event]) -> float:
    return float(sum(event["dur_us"] for event in events))
