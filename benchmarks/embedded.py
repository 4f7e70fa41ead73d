"""How fast the embedded model starts, reads prompts and generates on this machine's processor.

    PYTHONPATH=. python benchmarks/embedded.py [--runs N] [--cold N] [--model PATH] [--json]

Rates are median (least to most) of several runs, the cases taken in turns. GB/s counts the bytes of
the weights that a token touches: every matrix outside the experts, its own experts, its n-gram rows
and the head. The share is of the bandwidth at which the same threads read memory in the same run.
CPU seconds are of the command and its helpers; on a shared machine they say more than wall time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.figures import Figure, figure
from strata_cli.engine.device.host import usable_threads
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.model.quants import row_bytes
from strata_cli.engine.model.tensors import ModelFile, load_model_file
from strata_cli.models import DEMO_MODEL_PATH

TEXT = "A small tool lists the packages of a system, and the functions return what they found. "
LENGTHS = (128, 512, 1900)
CHUNKS = (64, 192, 512, 1024)
GENERATE_AFTER = (128, 1900)
GENERATED = 64
READ_BYTES = 512 << 20


@dataclass(frozen=True)
class Rate(Figure):
    """With GB/s, and their share of what the same threads read, where weights are read."""

    gbps: float
    share: float

    def line(self) -> str:
        return f"{super().line():<109} {self.gbps:6.2f} GB/s {self.share:6.1%}"


class Start(NamedTuple):
    """One `strata read` in a process of its own."""

    first_output_s: float
    wall_s: float
    cpu_s: float
    peak_mb: float


def start(args: list[str], cache: str) -> Start:
    command = [sys.executable, "-m", "strata_cli", "read", *args]
    environ = {**os.environ, "XDG_CACHE_HOME": cache}  # noqa: TID251  a child's, with one change
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - began
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(first, time.perf_counter() - began, cpu, used.ru_maxrss / 1024)


def start_rows(model: Path, runs: int, cold_runs: int) -> list[Figure]:
    """Cold starts, each with an empty cache, and warm ones in turns with long reads."""
    short = ["The quick brown fox", "--top", "3", "--model", str(model)]
    long = [TEXT * 100, "--raw", "--max-tokens", "32", "--model", str(model)]
    cold, warm, read = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for index in range(cold_runs):
            cache = os.path.join(folder, str(index))
            os.mkdir(cache)
            cold.append(start(short, cache))
        for _ in range(runs):
            warm.append(start(short, cache))
            read.append(start(long, cache))
    return [
        figure(
            "first start, compiling: to the first output", "s", [s.first_output_s for s in cold]
        ),
        figure("first start, compiling: processor time", "CPU s", [s.cpu_s for s in cold]),
        figure("first start, compiling: peak memory", "MB", [s.peak_mb for s in cold]),
        figure("later start: to the first output", "s", [s.first_output_s for s in warm]),
        figure("later start: processor time", "CPU s", [s.cpu_s for s in warm]),
        figure("read of a long prompt and 32 tokens: peak memory", "MB", [s.peak_mb for s in read]),
    ]


def token_bytes(model: ModelFile) -> int:
    """Bytes of the weights that one decoded token touches, from the tensor directory."""
    spec = model.spec
    total = 0
    for name, tensor in model.tensors.items():
        if "_exps." in name:
            total += tensor.data.nbytes * spec.num_experts_per_tok // spec.num_experts
        elif name == "per_layer_token_embd.weight":
            assert spec.ngram is not None
            total += spec.ngram.num_heads * row_bytes(tensor.qtype, tensor.shape[-1])
        elif name == "token_embd.weight" and not spec.tied_output:
            total += row_bytes(tensor.qtype, tensor.shape[-1])
        else:
            total += tensor.data.nbytes
    return total


def read_gbps(threads: int) -> Callable[[], float]:
    """A measurement: GB/s at which so many threads read memory."""
    parts = np.array_split(np.ones(READ_BYTES // 8), threads)
    pool = ThreadPoolExecutor(threads)

    def measure() -> float:
        began = time.perf_counter()
        list(pool.map(np.max, parts))
        return READ_BYTES / (time.perf_counter() - began) / 1e9

    measure()
    return measure


def prompt_rate(engine: Engine, ids: list[int]) -> float:
    with engine.sequence() as sequence:
        began = time.perf_counter()
        sequence.prefill(ids)
        return len(ids) / (time.perf_counter() - began)


def step_rate(engine: Engine, ids: list[int]) -> float:
    with engine.sequence() as sequence:
        logits = sequence.prefill(ids)
        for _ in range(3):
            logits = sequence.step(int(logits.argmax()))
        began = time.perf_counter()
        for _ in range(GENERATED):
            logits = sequence.step(int(logits.argmax()))
        return GENERATED / (time.perf_counter() - began)


class Case(NamedTuple):
    """One rate to measure; chunk 0 is the automatic one."""

    kind: str
    length: int
    chunk: int


CASES = [
    *(Case("prompt", length, chunk) for chunk in (0, *CHUNKS) for length in LENGTHS),
    *(Case("generation", length, 0) for length in GENERATE_AFTER),
]


def rate_rows(model: Path, runs: int) -> list[Figure]:
    """Prompt and generation rates: in every run each case once, beside the memory's."""
    rates: dict[Case, list[float]] = {case: [] for case in CASES}
    bandwidth, memory = [], read_gbps(usable_threads())
    with ExitStack() as stack:
        engines = {
            chunk: stack.enter_context(
                Engine.open(EngineOptions(model=model, device="host", prefill=chunk))
            )
            for chunk in (0, *CHUNKS)
        }
        ids = engines[0].tokenizer.encode(TEXT * 200, parse_special=False)
        measure = {"prompt": prompt_rate, "generation": step_rate}
        for case in CASES:
            measure[case.kind](engines[case.chunk], ids[: case.length])  # warms up
        for _ in range(runs):
            bandwidth.append(memory())
            for case in CASES:
                rates[case].append(measure[case.kind](engines[case.chunk], ids[: case.length]))
        auto = engines[0].chunk_tokens
    peak = figure(f"memory read by {usable_threads()} threads", "GB/s", bandwidth)
    return [peak, *rated(model, rates, peak.median, auto)]


def rated(
    model: Path, rates: dict[Case, list[float]], peak_gbps: float, auto: int
) -> Iterator[Rate]:
    """The rows of the cases, with the bytes of weights that they read."""
    with load_model_file(model) as file:
        touched, whole = token_bytes(file), sum(t.data.nbytes for t in file.tensors.values())
    for case, values in rates.items():
        what, nbytes = f"generation after {case.length} tokens", float(touched)
        if case.kind == "prompt":
            size = case.chunk or auto
            what = f"prompt of {case.length} tokens, chunks of {size}"
            what += "" if case.chunk else " (auto)"
            nbytes = whole / min(size, case.length)  # a chunk's tokens use every expert
        entry = figure(what, "tok/s", values)
        gbps = entry.median * nbytes / 1e9
        yield Rate(**asdict(entry), gbps=gbps, share=gbps / peak_gbps)


def machine() -> dict[str, str]:
    def output(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    with open("/proc/cpuinfo", encoding="ascii") as lines:
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    changed = output("git", "status", "--porcelain", "--untracked-files=no", "strata_cli")
    commit = output("git", "describe", "--always") + (" and changes" if changed else "")
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "processor": f"{models[0] if models else platform.machine()}, {usable_threads()} threads",
        "load": f"{os.getloadavg()[0]:.1f} before the first run",
        "versions": f"Python {platform.python_version()}, numpy {np.__version__}, "
        f"numba {numba.__version__}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold", type=int, default=3, help="first starts")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL_PATH)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    about = machine()
    rows = start_rows(options.model, options.runs, options.cold)
    rows += rate_rows(options.model, options.runs)
    if options.json:
        print(json.dumps({**about, "rows": [asdict(entry) for entry in rows]}, indent=1))
        return
    print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    for entry in rows:
        print(entry.line())


if __name__ == "__main__":
    run_benchmark(main)
