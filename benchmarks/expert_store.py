"""How fast the store of experts opens, refills what it lent, and stages what is not pinned.

    PYTHONPATH=. python benchmarks/expert_store.py MODEL.gguf [--device host|cuda:0]
        [--slots N] [--threads 1,2,4,8] [--json FILE]

1. Open: GB/s of locking memory and reading the file into it, and of filling the cache. The file
   comes from the page cache if it is there: run twice to compare.
2. Refill: GB/s of bringing a loan of half the cache back, against one large copy of pinned memory
   measured in the same run.
3. Staged refill: the same with nothing pinned, out of the file by some numbers of threads.
4. Tables: microseconds of lending and of taking back one slot.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.figures import Figure, figure, seconds
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.experts.arena import open_arena
from strata_cli.engine.experts.blobs import blob_layouts
from strata_cli.engine.experts.cache import ExpertCache
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.experts.store import ExpertStore, StoreOptions
from strata_cli.engine.model.tensors import ModelFile, load_model_file

RUNS = 5


@dataclass
class Report:
    rows: list[Figure] = field(default_factory=list)

    def add(self, what: str, unit: str, values: Sequence[float]) -> None:
        self.rows.append(figure(what, unit, values))
        print(self.rows[-1].line(), flush=True)


def open_rows(report: Report, model: ModelFile, device: Device) -> None:
    layouts = blob_layouts(model)
    rates, reading = [], []
    for _ in range(2):
        first: list[float] = []

        def note(*_progress: int, marks: list[float] = first) -> None:
            marks.append(time.perf_counter())

        start = time.perf_counter()
        with open_arena(model, layouts, device, progress=note) as arena:
            rates.append(arena.nbytes / (time.perf_counter() - start) / 1e9)
            reading.append(arena.nbytes / max(first[-1] - first[0], 1e-9) / 1e9)
    report.add("open: lock and read the arena", "GB/s", rates)
    report.add("open: read alone, from the first piece on", "GB/s", reading)


def refill_rows(report: Report, store: ExpertStore, reads: Stream, what: str) -> None:
    cache = store.cache
    nbytes = cache.num_slots // 2 * store.slot_bytes

    def refill() -> float:
        loan = cache.lend(nbytes)
        reads.synchronize()
        return nbytes / seconds(loan.close) / 1e9

    report.add(f"{what}: {nbytes / 1e9:.1f} GB", "GB/s", [refill() for _ in range(RUNS)])


def copy_rows(report: Report, store: ExpertStore) -> None:
    source = store.blobs.layers[0]
    with store.cache.lend(store.cache.lendable_bytes) as loan:
        size = min(loan.memory.nbytes, source.nbytes)
        pair = (flat(loan.memory, size), flat(source, size))

        def copy() -> None:
            store.copies.copy(*pair)
            store.copies.synchronize()

        report.add("one large copy", "GB/s", [size / seconds(copy) / 1e9 for _ in range(RUNS)])


def flat(tensor: Tensor, nbytes: int) -> Tensor:
    return Tensor.over(tensor.buffer, (nbytes,), np.uint8, tensor.offset_bytes)


def table_rows(report: Report, cache: ExpertCache, reads: Stream) -> None:
    lending, returning = [], []
    for _ in range(200):
        start = time.perf_counter()
        loan = cache.lend(1)
        lending.append((time.perf_counter() - start) * 1e6)
        reads.synchronize()
        returning.append(seconds(loan.close) * 1e6)
    report.add("tables: lend one slot", "us", lending)
    report.add("tables: take one slot back, its copy included", "us", returning)


def measure(options: argparse.Namespace, report: Report) -> None:
    threads = [int(count) for count in options.threads.split(",")]
    with load_model_file(options.model) as model, open_device(options.device) as device:
        reads = device.stream("reads")
        slots = options.slots or model.spec.num_layers * model.spec.num_experts // 4

        def store(**how: Any) -> ExpertStore:
            wanted = StoreOptions(num_slots=slots, least_slots=0, **how)
            return ExpertStore.open(model, device, reads, wanted)

        open_rows(report, model, device)
        with store() as pinned:
            refill_rows(report, pinned, reads, "refill")
            copy_rows(report, pinned)
            table_rows(report, pinned.cache, reads)
        for count in threads:
            with store(pinned_bytes=0, stager=StagerSize(num_threads=count)) as staged:
                refill_rows(report, staged, reads, f"staged refill, {count} threads")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="host")
    parser.add_argument("--slots", type=int, default=0)
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = Report()
    measure(options, report)
    if options.json:
        lines = [json.dumps(asdict(row)) + "\n" for row in report.rows]
        options.json.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    run_benchmark(main)
