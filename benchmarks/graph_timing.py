"""Timing launches on a GPU by replaying graphs of them, case by case in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strata_cli.engine.device.base import (
    Buffer,
    Device,
    Graph,
    Kernel,
    KernelArgument,
    Launch,
    Stream,
    Tensor,
    empty,
)
from strata_cli.engine.device.transfer import upload

TURNS = 7
READ_BYTES = 4 << 30


def nothing(begin: int, end: int, *_: Any) -> None:
    """No host body: these kernels only run on a GPU."""


READ = Kernel("read_all", nothing, nothing, str(Path(__file__).with_name("read_all.cu")))


@dataclass
class Bench:
    """The device, the rows of results so far, and memory that kernels find by address."""

    device: Device
    stream: Stream
    rows: list[dict[str, Any]] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    kept: list[Tensor] = field(default_factory=list)

    def tensor(self, values: np.ndarray) -> Tensor:
        tensor = empty(self.device, values.shape, values.dtype)
        upload(self.device, self.stream, tensor, values)
        return tensor

    def normal(self, *shape: int) -> Tensor:
        return self.tensor(self.random.standard_normal(shape).astype(np.float32))

    def record(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{k} {_short(v)}" for k, v in row.items()), flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class Case:
    """A graph to replay, with what one replay moves (bytes) or computes (operations)."""

    name: str
    graph: Graph
    launches: int
    nbytes: float = 0.0
    flops: float = 0.0


def record_graph(bench: Bench, launches: Sequence[Callable[[], None]]) -> Graph:
    launches[0]()  # loads outside the graph
    bench.stream.synchronize()
    with bench.stream.capture() as graph:
        for launch in launches:
            launch()
    return graph


def take_turns(bench: Bench, cases: Iterable[Case]) -> dict[str, list[float]]:
    """Milliseconds of every replay; the first of each case, which warms up, is left out."""
    start, end = bench.device.event(timing=True), bench.device.event(timing=True)
    cases = list(cases)
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for turn in range(TURNS + 1):
        for case in cases:
            bench.stream.record(start)
            bench.stream.replay(case.graph)
            bench.stream.record(end)
            end.synchronize()
            if turn:
                times[case.name].append(end.elapsed_ms(start))
    return times


def report(bench: Bench, kind: str, cases: Sequence[Case], limit: float) -> None:
    """limit: GB/s where a case counts bytes, TFLOP/s where it counts operations."""
    for case, times in zip(cases, take_turns(bench, cases).values(), strict=True):
        ms = statistics.median(times)
        rate = case.nbytes / ms / 1e6 if case.nbytes else case.flops / ms / 1e9
        bench.record(
            kind=kind,
            case=case.name,
            us=1e3 * ms / case.launches,
            min_us=1e3 * min(times) / case.launches,
            max_us=1e3 * max(times) / case.launches,
            **{"GB/s" if case.nbytes else "TFLOP/s": rate},
            percent=100 * rate / limit,
        )
    for case in cases:
        case.graph.close()


def read_rate(bench: Bench) -> float:
    """GB/s at which a plain kernel reads device memory."""
    data = empty(bench.device, (READ_BYTES,), np.uint8)
    bench.stream.fill(data, 1)
    out = empty(bench.device, (1,), np.uint32)
    launch = Launch(items=1, grid=(4096, 1, 1), block=(256, 1, 1), extents=(READ_BYTES // 16,))
    graph = record_graph(bench, [lambda: bench.stream.launch(READ, launch, data, out)])
    ms = statistics.median(take_turns(bench, [Case("read", graph, 1, READ_BYTES)])["read"])
    data.buffer.close()
    bench.record(kind="limit", case="device memory read", **{"GB/s": READ_BYTES / ms / 1e6})
    return READ_BYTES / ms / 1e6


def copy_rate(bench: Bench, source: Buffer, nbytes: int) -> float:
    """GB/s of one large copy of host memory to the device."""
    target = empty(bench.device, (nbytes,), np.uint8)
    view = Tensor.over(source, (nbytes,), np.uint8)
    graph = record_graph(bench, [lambda: bench.stream.copy(target, view)])
    ms = statistics.median(take_turns(bench, [Case("copy", graph, 1)])["copy"])
    target.buffer.close()
    bench.record(kind="limit", case="host to device copy", **{"GB/s": nbytes / ms / 1e6})
    return nbytes / ms / 1e6


def torch_rate(bench: Bench, shapes: Sequence[tuple[int, int, int]]) -> float:
    """torch's bfloat16 TFLOP/s for each (tokens, cols, rows) on random data; returns the best."""
    import torch

    best = 0.0
    for tokens, cols, rows in shapes:
        x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
        times = []
        for turn in range(TURNS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(4):
                x @ w.T
            end.record()
            end.synchronize()
            if turn > 1:
                times.append(start.elapsed_time(end) / 4)
        rate = 2 * tokens * cols * rows / statistics.median(times) / 1e9
        best = max(best, rate)
        case = f"torch bf16 T{tokens} K{cols} N{rows}"
        bench.record(kind="limit", case=case, **{"TFLOP/s": rate})
        del x, w
    torch.cuda.empty_cache()
    return best


class Collector:
    """A stream that keeps the kernels it is asked to launch and does nothing else."""

    def __init__(self, shared_bytes: int, num_multiprocessors: int = 132) -> None:
        self.shared_bytes = shared_bytes
        self.num_multiprocessors = num_multiprocessors
        self.capability = (9, 0)
        self.kernels: dict[Kernel, None] = {}

    def launch(self, kernel: Kernel, _launch: Launch, *_: KernelArgument) -> None:
        self.kernels[kernel] = None


class Nowhere:
    """A buffer of any size, for tensors that are only looked at."""

    nbytes = 1 << 60
    address = 0


def imagined(*shape: int, dtype: Any = np.float32) -> Tensor:
    """A tensor without memory."""
    return Tensor(Nowhere(), 0, shape, np.dtype(dtype))  # type: ignore[arg-type]  # a stand-in
