"""What suffixes of one prefix cost beside reads of their own.

    PYTHONPATH=. python benchmarks/shared_prefix.py [--prefix N] [--suffix N] [--runs N]
        [--model PATH] [--device NAME] [--json]

Cases are taken in turns; times are median (least to most), and the ratio is the median of the
ratios of neighbours: K suffixes with their prefix over one fresh read of prefix and suffix. Before
anything is timed, every fifth shared row is compared with its fresh read, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.figures import seconds
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.engine.session import Session
from strata_cli.models import DEMO_MODEL_PATH

TEXT = "A small tool lists the packages of a system, and the functions return what they found. "
COUNTS = (1, 4, 16)
PARKING = CacheRules(conversation_cache_mib=4096, least_parked_tokens=1)


@dataclass(frozen=True)
class Row:
    """One case: milliseconds, and the median of its ratios to the fresh read beside it."""

    what: str
    median_ms: float
    least_ms: float
    most_ms: float
    ratio: float

    def line(self) -> str:
        spread = f"({self.least_ms:.1f} to {self.most_ms:.1f})"
        return f"{self.what:<48} {self.median_ms:9.1f} ms {spread:<20} {self.ratio:7.3f}"


@dataclass(frozen=True)
class Work:
    """An engine, a prefix and suffixes of it."""

    engine: Engine
    prefix: list[int]
    suffixes: list[list[int]]

    def fresh(self, index: int = 0) -> np.ndarray:
        with self.engine.sequence() as sequence:
            return sequence.prefill(self.prefix + self.suffixes[index])

    def shared(self, count: int) -> list[np.ndarray]:
        with self.engine.sequence() as sequence:
            sequence.prefill(self.prefix, logits="none")
            return sequence.score(self.suffixes[:count])

    def check(self) -> None:
        for index, row in enumerate(self.shared(len(self.suffixes))):
            if index % 5 == 0 and self.fresh(index).tobytes() != row.tobytes():
                raise SystemExit(f"suffix {index + 1} differs from a read of its own")


def park_and_return(work: Work, session: Session) -> None:
    """Two conversations in turns: one is parked, the other comes back."""
    session.read(work.prefix + work.suffixes[1])
    session.read(work.prefix[::-1] + work.suffixes[1])


def measure(work: Work, runs: int) -> list[Row]:
    with (
        work.engine.sequence() as held,
        Session(work.engine) as session,
        Session(work.engine, PARKING) as parking,
    ):
        held.prefill(work.prefix, logits="none")
        snapshot = held.snapshot()
        session.read(work.prefix)
        park_and_return(work, parking)
        cases: dict[str, Callable[[], object]] = {"one fresh read": work.fresh}
        for count in COUNTS:
            cases[f"{count} suffixes with their prefix"] = partial(work.shared, count)
        for count in COUNTS:
            several = work.suffixes[:count]
            cases[f"{count} suffixes of a prefix that was read"] = partial(held.score, several)
        cases["a tail after a cached prefix"] = lambda: session.read(
            work.prefix + work.suffixes[0][:-1] + [int(time.perf_counter_ns() % 1000)]
        )
        cases["a prompt that was the last one"] = lambda: parking.read(
            work.prefix[::-1] + work.suffixes[1]
        )
        cases["two parked conversations, one after the other"] = lambda: park_and_return(
            work, parking
        )
        cases["a snapshot"] = held.snapshot
        cases["its restoring"] = lambda: held.restore(snapshot)
        cases["parking, without the snapshot"] = held.park
        times: dict[str, list[float]] = {what: [] for what in cases}
        for run in range(runs + 1):  # the first warms up
            for what, action in cases.items():
                elapsed = seconds(action)
                if run:
                    times[what].append(elapsed * 1e3)
    fresh = times["one fresh read"]
    return [
        Row(
            what,
            statistics.median(values),
            min(values),
            max(values),
            statistics.median(a / b for a, b in zip(values, fresh, strict=True)),
        )
        for what, values in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefix", type=int, default=1600)
    parser.add_argument("--suffix", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_PATH)
    parser.add_argument("--device", default="host")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with Engine.open(EngineOptions(model=options.model, device=options.device)) as engine:
        ids = engine.tokenizer.encode(TEXT * 2000, parse_special=False)
        start = options.prefix
        suffixes = [ids[start + 5 * i :][: options.suffix] for i in range(max(COUNTS))]
        work = Work(engine, ids[:start], suffixes)
        work.check()
        rows = measure(work, options.runs)
        with engine.sequence() as sequence:
            sequence.prefill(work.prefix)
            snapshot_bytes, kv_bytes = sequence.snapshot().nbytes, sequence.park().nbytes
        about = {
            "commit": subprocess.run(
                ["git", "describe", "--always", "--dirty"], capture_output=True, text=True
            ).stdout.strip(),
            "model": engine.model_name,
            "device": engine.device_name,
            "chunk_tokens": engine.chunk_tokens,
            "prefix_tokens": options.prefix,
            "suffix_tokens": options.suffix,
            "snapshot_bytes": snapshot_bytes,
            "kv_bytes_of_the_prefix": kv_bytes,
        }
    if options.json:
        print(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    print(f"{'':<48} {'median':>12} {'(least to most)':<20} {'ratio':>7}")
    for row in rows:
        print(row.line())


if __name__ == "__main__":
    run_benchmark(main)
