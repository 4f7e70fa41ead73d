"""What steps of several sequences in one pass cost, beside the same steps one by one.

    PYTHONPATH=. python benchmarks/steps_together.py [MODEL.gguf] [--device cuda:0] [--json FILE]

For each number of sequences: milliseconds of a step (median, least, most), tokens per second of all
together, the same tokens stepped one by one in the same run, and what the first pass of a set costs
that was not recorded before: time, and device memory that is then no longer free. Each row is
checked to have the bits of its sequence alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.arguments import run_benchmark
from strata_cli.engine.engine import Engine, EngineOptions, Part, Sequence
from strata_cli.models import DEMO_MODEL_PATH

WARM_UP = 3


def timed(action: Callable[[], object], times: int) -> list[float]:
    """Milliseconds of each of so many runs, behind some that warm up."""
    for _ in range(WARM_UP):
        action()
    values = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        values.append((time.perf_counter() - start) * 1e3)
    return values


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def together(sequences: list[Sequence], ids: list[int]) -> list[Any]:
    engine = sequences[0]._engine
    parts = [Part(sequence, [token]) for sequence, token in zip(sequences, ids, strict=True)]
    return engine.read_together(parts)


def check_bits(sequences: list[Sequence], ids: list[int]) -> bool:
    """Whether a step together has the bits of steps alone; changes no sequence."""
    before = [sequence.snapshot() for sequence in sequences]
    rows = together(sequences, ids)
    for sequence, snapshot in zip(sequences, before, strict=True):
        sequence.restore(snapshot)
    alone = [sequence.step(token) for sequence, token in zip(sequences, ids, strict=True)]
    for sequence, snapshot in zip(sequences, before, strict=True):
        sequence.restore(snapshot)
    return all(
        np.array_equal(row.view(np.uint32), other.view(np.uint32))
        for row, other in zip(rows, alone, strict=True)
    )


def row_of(engine: Engine, count: int, prompt: int, steps: int) -> dict[str, Any]:
    """All that is measured of so many sequences."""
    rng = np.random.default_rng(count)
    vocab = engine.spec.vocab_size - 64
    with ExitStack() as stack:
        sequences = [stack.enter_context(engine.sequence()) for _ in range(count)]
        for sequence in sequences:
            sequence.prefill(rng.integers(0, vocab, prompt).tolist(), logits="none")
        ids = rng.integers(0, vocab, count).tolist()
        sequences[0].step(ids[0])  # settles what the prompts borrowed
        free_bytes = engine._device.memory().free_bytes
        begin = time.perf_counter()
        together(sequences, ids)
        first_ms = (time.perf_counter() - begin) * 1e3
        recorded_bytes = free_bytes - engine._device.memory().free_bytes
        step_ms = timed(lambda: together(sequences, ids), steps)
        alone_ms = timed(
            lambda: [s.step(token) for s, token in zip(sequences, ids, strict=True)], steps
        )
        return {
            "sequences": count,
            "first_ms": first_ms,
            "recorded_bytes": recorded_bytes,
            "step_ms": spread(step_ms),
            "one_by_one_ms": spread(alone_ms),
            "tokens_per_s": count * 1e3 / statistics.median(step_ms),
            "one_by_one_tokens_per_s": count * 1e3 / statistics.median(alone_ms),
            "same_bits": check_bits(sequences, ids),
        }


def describe(row: dict[str, Any]) -> str:
    return (
        f"{row['sequences']:3} sequences: step {row['step_ms']['median']:8.2f} ms, "
        f"{row['tokens_per_s']:7.1f} tok/s; one by one {row['one_by_one_ms']['median']:8.2f} ms, "
        f"{row['one_by_one_tokens_per_s']:7.1f} tok/s; first {row['first_ms']:8.2f} ms, "
        f"{row['recorded_bytes'] / 2**20:.1f} MiB; same bits: {row['same_bits']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL_PATH)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--counts", default="1,2,4,8,16", help="sequences")
    parser.add_argument("--prompt", type=int, default=300, help="tokens ahead of the steps")
    parser.add_argument("--steps", type=int, default=40, help="timed")
    parser.add_argument("--expert-cache", type=int, help="slots, where not all experts fit")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    counts = [int(text) for text in arguments.counts.split(",")]
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        max_context=arguments.context,
        num_sequences=max(counts),
        expert_cache=arguments.expert_cache,
    )
    with Engine.open(options) as engine:
        rows = []
        for count in counts:
            rows.append(row_of(engine, count, arguments.prompt, arguments.steps))
            row = rows[-1]
            print(describe(row))
            if arguments.json is not None:
                result = {"model": engine.model_name, "device": engine.device_name, "rows": rows}
                arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
