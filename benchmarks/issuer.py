"""What it costs the host to issue a prompt's copies, and what that costs its neighbours.

    PYTHONPATH=. python benchmarks/issuer.py [--device host|cuda:0] [--json FILE] [--quick]
        [--parts decisions,issuing,streaming,launches]

1. Decisions: microseconds of a walk's turn for each entry, with a link that does nothing.
2. Issuing: the same with the real ring and stream, each entry by itself, several in one call, and
   neighbours as one copy; small blobs, so that the link is never what is waited for.
3. Streaming: blobs of a real size by a thread and inline; the link's rate against one large copy
   measured in the same run, and the issuing thread's own processor time for each entry.
4. Launches: what one launch costs another thread, alone and while a thread issues.

Each figure is the median (least, most) of several runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.figures import Figure, figure
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device, Tensor, empty
from strata_cli.engine.experts.depth import AutoDepth, DepthRule, FixedDepth
from strata_cli.engine.experts.entries import EntryList, list_entries, rank_experts
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.issuer import InlineIssuer, ThreadIssuer
from strata_cli.engine.experts.ring import Ring, RingLink
from strata_cli.engine.experts.walk import Walk, WalkRules
from tests.device.kernels import affine

PARTS = ("decisions", "issuing", "streaming", "launches")
RUNS = 7
WATCHDOG_S = 60.0
NUM_EXPERTS = 512
SMALL_BYTES = 512
LAUNCHES = 2000


def row(what: str, unit: str, values: Sequence[float]) -> Figure:
    made = figure(what, unit, values)
    print(made.line(), flush=True)
    return made


class NoLink:
    """Takes copies and forgets them."""

    def copy(self, batch: Sequence[int]) -> None: ...

    def has_landed(self, k: int) -> bool:  # noqa: ARG002
        return True

    def is_staged(self, k: int) -> bool:  # noqa: ARG002
        return True


def entries_of(num_layers: int, *, adjacent: bool = True) -> EntryList:
    """All experts of some layers; in an order that leaves no two neighbours together, or by id."""
    resident = np.zeros((num_layers, NUM_EXPERTS), np.bool_)
    if adjacent:
        return list_entries(rank_experts(resident))
    order = np.tile(np.arange(NUM_EXPERTS).reshape(2, -1).T.reshape(-1), (num_layers, 1))
    return list_entries(rank_experts(resident, order))


def free_walk(
    entries: EntryList, link: RingLink | NoLink, rules: WalkRules, gate: Gate | None = None
) -> Walk:
    """A walk whose consumer has given everything back already."""
    walk = Walk(entries, link, rules, gate)
    walk.consume(len(entries))
    return walk


def decision_rows() -> list[Figure]:
    entries = entries_of(48)

    def per_entry_us(gate: Gate | None, depth: DepthRule | None, together: int) -> float:
        rules = WalkRules(384, depth, together)
        walk = free_walk(entries, NoLink(), rules, gate)
        start = time.perf_counter()
        while walk.issued < len(entries):
            walk.turn()
        return (time.perf_counter() - start) / len(entries) * 1e6

    nobody = Gate(48, NUM_EXPERTS)
    for layer in range(48):
        nobody.publish(layer, np.zeros(NUM_EXPERTS, np.bool_))
    cases: dict[str, tuple[Gate | None, DepthRule | None, int]] = {
        "decision, plain, one by one": (None, None, 1),
        "decision, plain, 16 together": (None, None, 16),
        "decision, routed, depth 16": (Gate(48, NUM_EXPERTS), FixedDepth(16), 16),
        "decision, routed, depth 64": (Gate(48, NUM_EXPERTS), FixedDepth(64), 16),
        "decision, skipped": (nobody, FixedDepth(16), 16),
    }
    return [
        row(what, "us/entry", [per_entry_us(*case) for _ in range(RUNS)])
        for what, case in cases.items()
    ]


class Bench:
    """Blobs, a ring and streams on a device; every layer has the same blobs."""

    def __init__(self, device: Device, blob_bytes: int, num_slots: int, num_layers: int) -> None:
        self.device = device
        self.blob_bytes = blob_bytes
        self.num_layers = num_layers
        self._arena = device.allocate_pinned(NUM_EXPERTS * blob_bytes)
        self._memory = device.allocate(num_slots * blob_bytes)
        self._arena.host_bytes[:] = 1  # type: ignore[index]  # pinned memory has a host view
        blobs = Tensor.over(self._arena, (NUM_EXPERTS, blob_bytes), np.uint8)
        self.blobs = [blobs] * num_layers
        slots = Tensor.over(self._memory, (num_slots, blob_bytes), np.uint8)
        self.copies, self.reads = device.stream("copies"), device.stream("reads")
        self.ring = Ring(device, slots, self.copies, self.reads)

    def walk(self, entries: EntryList, depth: DepthRule | None, together: int) -> Walk:
        link = RingLink(self.ring, entries, self.blobs)
        gate = Gate(self.num_layers, NUM_EXPERTS) if depth is not None else None
        return free_walk(entries, link, WalkRules(self.ring.num_slots, depth, together), gate)

    def link_gbps(self) -> float:
        """One copy as large as the ring allows."""
        nbytes = min(self._arena.nbytes, self._memory.nbytes)
        to, source = (Tensor.over(b, (nbytes,), np.uint8) for b in (self._memory, self._arena))
        rates = []
        for _ in range(RUNS):
            start = time.perf_counter()
            self.copies.copy(to, source)
            self.copies.synchronize()
            rates.append(nbytes / (time.perf_counter() - start) / 1e9)
        return statistics.median(rates)

    def close(self) -> None:
        self.ring.drain()
        self.reads.synchronize()
        self.ring.close()
        self.copies.close()
        self.reads.close()
        self._arena.close()
        self._memory.close()


@contextmanager
def bench(device: Device, blob_bytes: int, num_slots: int, num_layers: int) -> Iterator[Bench]:
    made = Bench(device, blob_bytes, num_slots, num_layers)
    try:
        yield made
    finally:
        made.close()


def issuing_rows(device: Device, num_layers: int) -> list[Figure]:
    rows = []
    with bench(device, SMALL_BYTES, 384, num_layers) as place:
        for what, adjacent, together in (
            ("issuing, one by one", False, 1),
            ("issuing, 4 in a call, apart", False, 4),
            ("issuing, 16 in a call, apart", False, 16),
            ("issuing, 4 in a call, neighbours", True, 4),
            ("issuing, 16 in a call, neighbours", True, 16),
        ):
            entries = entries_of(num_layers, adjacent=adjacent)
            for depth in (None, FixedDepth(4 * together)):
                name = f"{what}, {'plain' if depth is None else f'depth {depth.depth}'}"
                rows.append(row(name, "us/entry", issuing_us(place, entries, depth, together)))
    return rows


def issuing_us(
    place: Bench, entries: EntryList, depth: DepthRule | None, together: int
) -> list[float]:
    """Processor time of turns that issued something."""
    times = []
    for _ in range(RUNS):
        walk = place.walk(entries, depth, together)
        spent = 0.0
        while walk.issued < len(entries):
            issued, start = walk.issued, time.thread_time()
            walk.turn()
            spent += time.thread_time() - start if walk.issued > issued else 0.0
        place.copies.synchronize()
        times.append(spent / len(entries) * 1e6)
    return times


class TimedIssuer(ThreadIssuer):
    """Notes its thread's processor time."""

    cpu_s = 0.0

    def _serve(self) -> None:
        super()._serve()
        self.cpu_s = time.thread_time()


def streaming_rows(device: Device, blob_bytes: int, num_layers: int) -> list[Figure]:
    rows = []
    with bench(device, blob_bytes, 384, num_layers) as place:
        link_gbps = place.link_gbps()
        rows.append(row(f"link, one copy, blobs of {blob_bytes} B", "GB/s", [link_gbps]))
        for adjacent in (False, True):
            entries = entries_of(num_layers, adjacent=adjacent)
            kind = "neighbours" if adjacent else "apart"
            for depth, together in ((16, 1), (16, 4), (64, 16), (0, 16)):
                name = f"{kind}, depth {depth or 'auto'}, {together} together"
                rows += thread_rows(place, entries, depth, together, name, link_gbps)
            rows += inline_rows(place, entries, kind, link_gbps)
    return rows


def depth_rule(depth: int) -> DepthRule:
    return FixedDepth(depth) if depth else AutoDepth()


def thread_rows(
    place: Bench, entries: EntryList, depth: int, together: int, name: str, link_gbps: float
) -> list[Figure]:
    rates, cpu_us, depths = [], [], []
    for _ in range(RUNS):
        rule = depth_rule(depth)
        issuer = TimedIssuer(place.walk(entries, rule, together), WATCHDOG_S)
        start = time.perf_counter()
        issuer.start()
        issuer.finish()
        place.copies.synchronize()
        seconds = time.perf_counter() - start
        rates.append(len(entries) * place.blob_bytes / seconds / 1e9)
        cpu_us.append(issuer.cpu_s / len(entries) * 1e6)
        depths.append(rule.depth)
    share = [100 * rate / link_gbps for rate in rates]
    rows = [
        row(f"thread, {name}: rate", "GB/s", rates),
        row(f"thread, {name}: of the link", "%", share),
        row(f"thread, {name}: processor time", "us/entry", cpu_us),
    ]
    return rows if depth else [*rows, row(f"thread, {name}: depth at the end", "", depths)]


def inline_rows(place: Bench, entries: EntryList, kind: str, link_gbps: float) -> list[Figure]:
    shares = []
    for _ in range(RUNS):
        issuer = InlineIssuer(place.walk(entries, FixedDepth(16), 4), WATCHDOG_S)
        start = time.perf_counter()
        issuer.start()
        issuer.finish()
        place.copies.synchronize()
        rate = len(entries) * place.blob_bytes / (time.perf_counter() - start) / 1e9
        shares.append(100 * rate / link_gbps)
    return [row(f"inline, {kind}, depth 16, 4 together: of the link", "%", shares)]


def launch_rows(device: Device, blob_bytes: int, num_layers: int) -> list[Figure]:
    """Launches from this thread while another one issues copies."""
    compute = device.stream("compute")
    x = empty(device, (1,), np.int64)
    compute.fill(x, 0)

    def launches_us() -> float:
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            affine(compute, x, 1, 0)
        seconds = time.perf_counter() - start
        compute.synchronize()
        return seconds / LAUNCHES * 1e6

    launches_us()
    rows = [row("launch, nobody issues", "us", [launches_us() for _ in range(RUNS)])]
    with bench(device, blob_bytes, 384, num_layers) as place:
        entries = entries_of(num_layers, adjacent=False)
        for depth, together in ((16, 1), (16, 4), (64, 16)):
            times = beside_issuer(place, entries, FixedDepth(depth), together, launches_us)
            name = f"launch, a thread issues at depth {depth}, {together} together"
            rows.append(row(name, "us", times))
    compute.close()
    return rows


def beside_issuer(
    place: Bench,
    entries: EntryList,
    depth: DepthRule,
    together: int,
    launches_us: Callable[[], float],
) -> list[float]:
    """Launch times that fell wholly into the time in which a thread was issuing."""
    times: list[float] = []
    for _ in range(RUNS):
        issuer = ThreadIssuer(place.walk(entries, depth, together), WATCHDOG_S)
        issuer.start()
        while issuer.walk.issued < len(entries):
            us = launches_us()
            if issuer.walk.issued < len(entries) or not times:
                times.append(us)
        issuer.finish()
        place.copies.synchronize()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="host")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer entries, smaller blobs")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the list above, by name")
    options = parser.parse_args()
    blob_bytes = 131_072 if options.quick else 1_382_400
    num_layers = 1 if options.quick else 8
    rows: list[Figure] = []
    with open_device(options.device) as device:
        measures: dict[str, Callable[[], list[Figure]]] = {
            "decisions": decision_rows,
            "issuing": lambda: issuing_rows(device, num_layers),
            "streaming": lambda: streaming_rows(device, blob_bytes, num_layers),
            "launches": lambda: launch_rows(device, blob_bytes, num_layers),
        }
        for part in options.parts.split(","):
            rows += measures[part]()
    if options.json:
        lines = [json.dumps({"device": options.device, **asdict(entry)}) for entry in rows]
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_benchmark(main)
