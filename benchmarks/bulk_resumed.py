"""Many rows by `strata decide --jsonl`: undisturbed, killed at random and resumed, and by Ray.

    PYTHONPATH=. python benchmarks/bulk_resumed.py [--rows N] [--kills N] [--seed N] [--no-ray]

Short states and one yes-or-no question at level raw, the embedded model on the host. Each kill is a
SIGKILL once a random number of rows is there; the same command then goes on. With Ray, two workers
of one thread each on this machine (needs the extra `ray`). Prints what each run took, and fails
where an output differs from the undisturbed one in any byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.arguments import run_benchmark

WORDS = ("mail", "games", "python", "fonts", "sound", "video", "net", "web", "math", "science")
QUESTION = "Is this a game?"
POLL_S = 0.02


def write_rows(path: Path, count: int) -> None:
    words = [
        " ".join(WORDS[number // 10**place % 10] for place in range(4)) for number in range(count)
    ]
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(words):
            file.write(json.dumps({"id": number, "state": f"A tool for {text}."}) + "\n")


def command(rows: Path, out: Path, *more: str) -> list[str]:
    asked = ["--jsonl", str(rows), "--out", str(out), "-q", QUESTION, "--yes-no"]
    how = ["--level", "raw", "--device", "host"]
    return [sys.executable, "-m", "strata_cli", "decide", *asked, *how, *more]


def run(name: str, asked: list[str]) -> None:
    started = time.perf_counter()
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    said = done.stderr.strip().splitlines()[-1:]
    print(f"{name}: {time.perf_counter() - started:.0f} s; {' '.join(said)}", flush=True)


def run_until(asked: list[str], out: Path, num_bytes: int) -> int:
    """Kill a run once its output has so many bytes; returns how many it then has."""
    with subprocess.Popen(asked, stderr=subprocess.DEVNULL) as process:
        while not out.exists() or out.stat().st_size < num_bytes:
            if process.poll() is not None:
                raise SystemExit(f"it ended with {process.returncode} before it was killed")
            time.sleep(POLL_S)
        os.kill(process.pid, signal.SIGKILL)
    return out.stat().st_size


def run_with_kills(
    asked: list[str], out: Path, num_bytes: int, arguments: argparse.Namespace
) -> None:
    rng = random.Random(arguments.seed)
    for place in sorted(rng.randrange(1, num_bytes) for _ in range(arguments.kills)):
        had = run_until(asked, out, place)
        whole = out.read_bytes().count(b"\n")
        print(f"killed at {had:,} bytes, {whole:,} whole rows", flush=True)
    run("the rest", asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-ray", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, outs = folder / "rows.jsonl", [folder / f"{one}.jsonl" for one in "abc"]
        write_rows(rows, arguments.rows)
        run("undisturbed", command(rows, outs[0]))
        expected = outs[0].read_bytes()
        if arguments.kills:
            run_with_kills(command(rows, outs[1]), outs[1], len(expected), arguments)
        if not arguments.no_ray:
            run("Ray", command(rows, outs[2], "--ray", "--workers", "2", "--threads", "1"))
        found = [out.read_bytes() for out in outs if out.exists()]
        num_equal = sum(one == expected for one in found)
        count = expected.count(b"\n")
        print(
            f"{num_equal} of {len(found)} outputs are those of the undisturbed run: {count:,} rows"
        )
    return 0 if num_equal == len(found) else 1


if __name__ == "__main__":
    run_benchmark(main)
