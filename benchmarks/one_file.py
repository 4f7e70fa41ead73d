"""What `dist/strata.pyz` needs on a machine that has nothing but Python: size, unpacking, starts.

    make binary && python benchmarks/one_file.py [--file FILE] [--python PYTHON] [--runs N]

All runs have one environment and one home folder, which begin empty. After the reads the server is
started, asked for a completion, and ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

READ = ("read", "Which of these is a fruit? A. apple B. stone", "--allowed", "A", "--allowed", "B")


class Timed(NamedTuple):
    """Seconds of wall and of processor time, and what was printed."""

    wall_s: float
    cpu_s: float
    output: str


class OneFile:
    """The file, run by a Python in a home folder that begins empty."""

    def __init__(self, python: str, file: Path, home: Path) -> None:
        self.command = (python, str(file.absolute()))
        self.environ = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
        self.home = home

    def run(self, *words: str) -> Timed:
        before, start = os.times(), time.perf_counter()
        done = subprocess.run(
            (*self.command, *words),
            env=self.environ,
            cwd=self.home,
            capture_output=True,
            text=True,
            check=True,
        )
        wall_s, after = time.perf_counter() - start, os.times()
        cpu_s = after.children_user - before.children_user
        cpu_s += after.children_system - before.children_system
        return Timed(wall_s, cpu_s, done.stdout)

    def serve(self, port: int) -> tuple[float, str]:
        """Seconds from the start of a server to its first completion, and its text."""
        start = time.perf_counter()
        words = ("serve", "--port", str(port), "--device", "host")
        server = subprocess.Popen((*self.command, *words), env=self.environ, cwd=self.home)
        try:
            text = completion(port)
            return time.perf_counter() - start, text
        finally:
            server.terminate()
            if server.wait(timeout=10) != 0:
                raise SystemExit(f"the server ended with {server.returncode}")


def completion(port: int) -> str:
    """The text of a completion, as soon as the server listens."""
    body = json.dumps({"prompt": "A chess engine", "max_tokens": 4, "temperature": 0}).encode()
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def folder_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("dist/strata.pyz"))
    parser.add_argument("--python", default="/usr/bin/python3")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    home = Path(tempfile.mkdtemp(prefix="one-file-"))
    try:
        program = OneFile(options.python, options.file, home)
        unpacking = program.run("--version")
        first = program.run(*READ)
        later = [program.run(*READ) for _ in range(options.runs)]
        if {run.output for run in later} != {first.output}:
            raise SystemExit("the answers differ")
        serve_s, text = program.serve(free_port())
        figures = {
            "file MB": options.file.stat().st_size / 1e6,
            "unpacked MB": folder_bytes(home / ".shiv") / 1e6,
            "first start, unpacking: s": unpacking.wall_s,
            "first start, unpacking: CPU s": unpacking.cpu_s,
            "first read, compiling: s": first.wall_s,
            "first read, compiling: CPU s": first.cpu_s,
            "later reads: s": statistics.median(run.wall_s for run in later),
            "later reads: CPU s": statistics.median(run.cpu_s for run in later),
            "server, to its first completion: s": serve_s,
            "load": os.getloadavg()[0],
        }
    finally:
        shutil.rmtree(home)
    for name, value in figures.items():
        print(f"{name:40} {value:8.2f}")
    print(first.output, repr(text), sep="\n")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
