"""What the server costs and stands: one client that reads one token, then many at once.

    PYTHONPATH=. python benchmarks/server_load.py [--seconds N] [--clients N] [--parallel N]
        [--reads N] [--json]

Overhead is the time of a canonical one-token read over HTTP less the time the engine had it, the
prompt being known. Under load three of four clients make such reads of fixed prompts, one streams
chats; every read must have the bits of its first one, every answer must be whole. Memory and
descriptors are those of all processes, after a tenth of the time and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_benchmark

PROMPTS = [
    f"A small tool lists the packages of a system, and the {word} return what they found. " * 4
    for word in ("functions", "commands", "libraries", "users", "servers", "games", "texts", "maps")
]
LABELS = [70, 71, 72, 73]


class Connection:
    """A kept-alive connection; just enough HTTP to cost little beside the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of an answer of 200."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        assert self._reader is not None
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        start = await self._reader.readuntil(b"\r\n\r\n")
        if not start.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(start.decode())
        length = re.search(rb"content-length: (\d+)", start)
        if length:
            return await self._reader.readexactly(int(length[1]))
        whole = b""
        while size := int(await self._reader.readline(), 16):
            whole += await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
        return whole


@dataclass
class Load:
    """What the clients saw."""

    reads: int = 0
    chats: int = 0
    different: int = 0
    broken: int = 0
    read_ms: list[float] = field(default_factory=list)
    chat_ms: list[float] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)


@contextmanager
def server(parallel: int) -> Iterator[tuple[int, int]]:
    """A server of the embedded model: its process and port."""
    command = [sys.executable, "-m", "strata_cli", "serve", "--device", "host", "--port", "0"]
    command += ["--parallel", str(parallel), "--max-queue", "4096"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"answers on http://127.0.0.1:(\d+)", line):
                break
        else:
            raise RuntimeError("the server did not start")
        try:
            yield process.pid, int(found[1])
        finally:
            process.terminate()
            process.wait(30)


def read_body(prompt: str) -> dict[str, Any]:
    """A canonical one-token read."""
    return {"prompt": prompt, "max_tokens": 1, "logprobs": 4, "allowed_token_ids": LABELS}


async def measure_overhead(pid: int, port: int, reads: int) -> dict[str, float]:
    """Milliseconds of one-token reads of a known prompt, one after another."""
    connection = Connection(port)
    wall, engine = [], []
    before = [0.0, 0.0]
    for number in range(reads + 20):
        if number == 20:
            before = cpu_ms(pid)
        started = time.perf_counter()
        answer = json.loads(await connection.post("/v1/completions", read_body(PROMPTS[0])))
        seconds = time.perf_counter() - started
        if number >= 20:
            wall.append(seconds * 1e3)
            engine.append(answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"])
    over = [a - b for a, b in zip(wall, engine, strict=True)]
    server_ms, others_ms = (a - b for a, b in zip(cpu_ms(pid), before, strict=True))
    return {
        "reads": reads,
        "wall_p50_ms": statistics.median(wall),
        "engine_p50_ms": statistics.median(engine),
        "overhead_p50_ms": statistics.median(over),
        "overhead_p99_ms": percentile(over, 0.99),
        "wall_least_ms": min(wall),
        "server_cpu_ms": server_ms / reads,
        "worker_cpu_ms": others_ms / reads,
        "reads_per_s": 1e3 / statistics.fmean(wall),
    }


def cpu_ms(pid: int) -> list[float]:
    """Processor time of a process, and of its children together."""
    tick_ms = 1e3 / os.sysconf("SC_CLK_TCK")

    def spent(item: str) -> float:
        fields = Path(f"/proc/{item}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * tick_ms

    return [spent(str(pid)), sum(map(spent, _children(pid)))]


async def measure_load(
    pid: int, port: int, clients: int, seconds: float
) -> tuple[Load, list[dict[str, int]]]:
    """Many clients for some time."""
    load, end = Load(), time.monotonic() + seconds
    usage: list[dict[str, int]] = []

    async def reader(number: int) -> None:
        connection = Connection(port)
        while time.monotonic() < end:
            prompt = PROMPTS[number % len(PROMPTS)]
            started = time.perf_counter()
            answer = json.loads(await connection.post("/v1/completions", read_body(prompt)))
            load.read_ms.append((time.perf_counter() - started) * 1e3)
            load.reads += 1
            value = answer["choices"]
            load.different += load.first.setdefault(prompt, value) != value

    async def talker(number: int) -> None:
        connection = Connection(port)
        turn = 0
        while time.monotonic() < end:
            turn += 1
            content = f"Tell me about number {number} and {turn}"
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24}
            started = time.perf_counter()
            answer = await connection.post("/v1/chat/completions", {**body, "stream": True})
            load.chat_ms.append((time.perf_counter() - started) * 1e3)
            load.chats += 1
            load.broken += not answer.endswith(b"data: [DONE]\n\n") or b'"error"' in answer

    async def watch() -> None:
        await asyncio.sleep(seconds / 10)
        usage.append(resources(pid))

    kinds = [talker if number % 4 == 3 else reader for number in range(clients)]
    await asyncio.gather(watch(), *(kind(number) for number, kind in enumerate(kinds)))
    usage.append(resources(pid))
    return load, usage


def resources(pid: int) -> dict[str, int]:
    """Resident memory and descriptors of a process and its children."""
    pids = [pid, *(int(item) for item in _children(pid))]
    memory = sum(_resident_kib(item) for item in pids)
    return {
        "memory_mib": memory >> 10,
        "descriptors": sum(len(os.listdir(f"/proc/{item}/fd")) for item in pids),
        "processes": len(pids),
    }


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _resident_kib(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


def percentile(values: list[float], share: float) -> float:
    """Of sorted values the one at a share of their number."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> int:
    """Measure, print, and fail where an answer was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--reads", type=int, default=300)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with server(options.parallel) as (pid, port):
        overhead = asyncio.run(measure_overhead(pid, port, options.reads))
        load, usage = asyncio.run(measure_load(pid, port, options.clients, options.seconds))
    result = {
        "overhead": overhead,
        "load": {
            "clients": options.clients,
            "parallel": options.parallel,
            "seconds": options.seconds,
            "reads": load.reads,
            "reads_per_s": load.reads / options.seconds,
            "read_p50_ms": percentile(load.read_ms, 0.5),
            "read_p99_ms": percentile(load.read_ms, 0.99),
            "chats": load.chats,
            "chat_p50_ms": percentile(load.chat_ms, 0.5),
            "chat_p99_ms": percentile(load.chat_ms, 0.99),
            "reads_that_differ": load.different,
            "broken_chats": load.broken,
            "resources_early": usage[0],
            "resources_late": usage[1],
        },
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for part, values in result.items():
            for name, value in values.items():
                print(
                    f"{part:9} {name:18} {value:.3f}"
                    if isinstance(value, float)
                    else f"{part:9} {name:18} {value}"
                )
    return 1 if load.different or load.broken else 0


if __name__ == "__main__":
    run_benchmark(main)
