"""Prompts and steps whose experts are not all pinned, or are computed in part by the host.

    PYTHONPATH=. python benchmarks/feeding.py MODEL.gguf [--device cuda:0] --vram-gib 8
        [--ways "pinned;half;file;file, 8 threads;share auto"] [--lengths 300,900,2000] [--steps 24]
        [--runs 3] [--json FILE]

Every way is a fresh engine within the same device memory. It reads each prompt once and then
--runs times, of which the median counts, and steps behind the last one. Logits and state must be
those of the first way in every bit, but for ways that share with the host: of those the largest
difference of the log-probabilities is told. What the gate of the share measured is told too: the
ratio of layers with it to layers without, and the microseconds of an expert on the link and there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import run_benchmark
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.cpu_share import ShareGate
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.prefill.prompt_stream import StreamRules
from tools.synth.prompts import zipf_prompt

PLAIN = StreamRules()
HALF = -1  # of the experts' bytes
WAYS: dict[str, tuple[int | None, StagerSize, float | None]] = {
    "pinned": (None, StagerSize(), 0.0),
    "half": (HALF, StagerSize(), 0.0),
    "file": (0, StagerSize(), 0.0),
    "file, 8 threads": (0, StagerSize(32, 8), 0.0),
    "file, 12 threads": (0, StagerSize(48, 12), 0.0),
    "share auto": (None, StagerSize(), None),
    "share 0.25": (None, StagerSize(), 0.25),
}


@dataclass(frozen=True)
class Row:
    """One way with one prompt, or with steps behind it."""

    way: str
    what: str
    tokens: int
    seconds: float
    tokens_per_s: float
    copied: int
    copied_gbps: float
    same_bits: bool
    difference: float


@dataclass
class Truth:
    """Logits of each prompt and of the last step, by the first way."""

    logits: dict[str, NDArray[np.float32]]

    def check(self, what: str, logits: NDArray[np.float32]) -> tuple[bool, float]:
        """Whether the bits are the same, and the largest difference of a log-probability."""
        expected = self.logits.setdefault(what, logits.copy())
        difference = np.abs(log_softmax_row(logits) - log_softmax_row(expected)).max()
        return bool((logits.view(np.uint32) == expected.view(np.uint32)).all()), float(difference)


def rows_of(
    engine: Engine, way: str, prompts: list[list[int]], steps: int, runs: int, truth: Truth
) -> Iterator[Row]:
    streamer = engine._streamer
    assert streamer is not None, "every expert is resident: lower --vram-gib"
    with engine.sequence() as sequence:
        for ids in prompts:
            seconds = []
            for run in range(runs + 1):
                sequence.reset()
                start = time.perf_counter()
                logits = sequence.prefill(ids)
                if run:
                    seconds.append(time.perf_counter() - start)
            taken = statistics.median(seconds)
            copied = sum(counts.copied for counts in streamer.counts)
            nbytes = sum(counts.copied_bytes for counts in streamer.counts)
            same, difference = truth.check(f"{len(ids)}", logits)
            rate, gbps = len(ids) / taken, nbytes / taken / 1e9
            yield Row(way, "prompt", len(ids), taken, rate, copied, gbps, same, difference)
        tokens = prompts[0][:steps]
        sequence.step(tokens[0])
        start = time.perf_counter()
        for token in tokens[1:]:
            logits = sequence.step(token)
        taken = time.perf_counter() - start
        same, difference = truth.check("steps", logits)
        rate = (steps - 1) / taken
        yield Row(way, "steps", steps - 1, taken, rate, 0, 0.0, same, difference)


def gate_of(engine: Engine) -> ShareGate | None:
    assert engine._streamer is not None
    share = engine._streamer._share
    return None if share is None else share.gate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--vram-gib", type=float, default=0.0)
    parser.add_argument("--slots", type=int, help="of the expert cache; else as many as fit")
    parser.add_argument("--ways", default=";".join(WAYS))
    parser.add_argument("--lengths", default="300,900,2000")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    lengths = [int(text) for text in arguments.lengths.split(",")]
    with load_model_file(arguments.model) as model:
        spec = model.spec
        nbytes = sum(i.nbytes for name, i in model.tensors.items() if "_exps." in name)
    prompts = [zipf_prompt(spec.vocab_size, count, seed=1) for count in lengths]
    truth, rows = Truth({}), list[Row]()
    for name in arguments.ways.split(";"):
        pinned, stager, share = WAYS[name]
        options = EngineOptions(
            model=arguments.model,
            device=arguments.device,
            max_context=max(lengths) + arguments.steps + 64,
            vram_bytes=int(arguments.vram_gib * (1 << 30)),
            expert_cache=arguments.slots,
            pinned_bytes=nbytes // 2 if pinned == HALF else pinned,
            stager=stager,
            streaming=replace(PLAIN, cpu_share=share),
        )
        start = time.perf_counter()
        with Engine.open(options) as engine:
            print(f"{name}: opened in {time.perf_counter() - start:.1f} s", flush=True)
            for row in rows_of(engine, name, prompts, arguments.steps, arguments.runs, truth):
                rows.append(row)
                print(
                    f"  {row.what} {row.tokens:6d} tokens {row.seconds * 1e3:9.1f} ms "
                    f"{row.tokens_per_s:9.1f} tokens/s copied {row.copied:6d} "
                    f"{row.copied_gbps:5.1f} GB/s {'same' if row.same_bits else 'OTHER'} bits, "
                    f"largest difference {row.difference:.3g}",
                    flush=True,
                )
            gate = gate_of(engine)
            if gate is not None:
                print(
                    f"  gate {'open' if gate.is_open else 'closed'}, share {gate.share:.2f}, "
                    f"ratios {[round(ratio, 3) for ratio in gate._ratios]}, an expert takes "
                    f"{gate._link_us or 0:.0f} us on the link, {gate._cpu_us or 0:.0f} us there"
                )
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    run_benchmark(main)
