"""How long a large model takes from the command to its first token, and what bounds that.

    PYTHONPATH=. python benchmarks/start.py MODEL.gguf [--device cuda:0] [--vram-gib 24]
        [--runs 2] [--json FILE]

1. The file read by plain reads of many threads, twice: the second is the page cache's rate.
2. Page-locked memory for all experts, locked and filled from the file, twice. The first may wait
   for a virtual machine to be given the memory.
3. `strata read` of one token, all weights in the GPU's memory: seconds of the whole process.
4. The same with --vram-gib of it: the experts go to page-locked memory, and some to the cache.

Kernels are compiled before anything is timed. Exit code 1 where a read fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_benchmark
from strata_cli.engine.device import open_device
from strata_cli.engine.experts.arena import open_arena
from strata_cli.engine.experts.blobs import blob_layouts
from strata_cli.engine.model.tensors import load_model_file

PIECE_BYTES = 32 << 20
THREADS = 16
GIB = 1 << 30


def read_rate(path: Path) -> float:
    """GB/s of reading the whole file, by threads, into memory that is used again."""
    nbytes = path.stat().st_size

    def read(first: int) -> None:
        buffer = bytearray(PIECE_BYTES)
        with path.open("rb", buffering=0) as file:
            for start in range(first * PIECE_BYTES, nbytes, THREADS * PIECE_BYTES):
                file.seek(start)
                file.readinto(buffer)

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(read, range(THREADS)))
    return nbytes / (time.perf_counter() - begin) / 1e9


def first_token(model: Path, device: str, more: list[str]) -> dict[str, Any]:
    """One `strata read` that makes one token, as a process of its own."""
    command = [sys.executable, "-m", "strata_cli", "read", "Once upon a time", "--raw", "--json"]
    command += ["--model", str(model), "--device", device, "--max-tokens", "1", *more]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.returncode}\n{done.stderr[-2000:]}")
    timings = json.loads(done.stdout)["timings"]
    return {"process_s": seconds, **timings}


def arena_rates(model: Path, device: str) -> list[float]:
    """GiB/s of locking memory for all experts and reading them into it, twice."""
    rates = []
    with load_model_file(model) as file, open_device(device) as opened:
        for _ in range(2):
            begin = time.perf_counter()
            with open_arena(file, blob_layouts(file), opened) as arena:
                seconds = time.perf_counter() - begin
                rates.append(arena.nbytes / seconds / GIB)
                print(
                    f"arena: {arena.nbytes / GIB:.1f} GiB locked and read in {seconds:.2f} s, "
                    f"{rates[-1]:.1f} GiB/s",
                    flush=True,
                )
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--vram-gib", type=float, default=24.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, device = arguments.model, arguments.device
    report: dict[str, Any] = {"file_gb": model.stat().st_size / 1e9}
    report["read_gbps"] = [read_rate(model) for _ in range(2)]
    print(
        f"file: {report['file_gb']:.1f} GB read at "
        + ", ".join(f"{rate:.1f} GB/s" for rate in report["read_gbps"]),
        flush=True,
    )
    report["arena_gibps"] = arena_rates(model, device)
    some = ["--vram-bytes", f"{int(arguments.vram_gib * GIB)}"]
    for name, more in (("all in VRAM", []), (f"{arguments.vram_gib:g} GiB of VRAM", some)):
        first_token(model, device, more)  # compiles
        report[name] = [first_token(model, device, more) for _ in range(arguments.runs)]
        for run in report[name]:
            print(
                f"first token, {name}: process {run['process_s']:.2f} s, "
                f"of it loading {run['load_ms'] / 1e3:.2f} s, prompt {run['prompt_ms']:.1f} ms",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
