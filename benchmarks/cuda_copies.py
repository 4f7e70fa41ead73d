"""What copying weights into shared memory can reach on a GPU, before any product is made.

    PYTHONPATH=. python benchmarks/cuda_copies.py [--json FILE]

Chains of launches that each read what the one ahead wrote, as a decode step's do: device memory in
three sizes, in turn and started early; and mapped host memory by the length of requests.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.graph_timing import (
    Bench,
    Case,
    copy_rate,
    nothing,
    read_rate,
    record_graph,
    report,
)
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Kernel, Launch, Tensor, empty

SOURCE = str(Path(__file__).with_name("copy_spans.cu"))
DATA_BYTES = 640 << 20
MOST_THREADS = 1 << 20


class Way(NamedTuple):
    """How one launch copies: defines, blocks, warps per block, slots, bytes of a span and piece."""

    defines: tuple[str, ...]
    blocks: int
    warps: int
    depth: int
    span: int
    piece: int

    @property
    def name(self) -> str:
        how = " ".join(self.defines)
        return f"{how} {self.blocks}x{self.warps} depth {self.depth} {self.span}/{self.piece}"


BULK, LANES = ("BULK=1",), ("BULK=0",)
DEVICE_WAYS = (
    Way(LANES, 132, 16, 1, 4352, 4352),
    Way(LANES, 264, 16, 1, 4352, 4352),
    Way(LANES, 132, 16, 2, 2176, 2176),
    Way(BULK, 132, 16, 1, 4352, 4352),
    Way(BULK, 132, 16, 1, 4352, 544),
    Way(BULK, 132, 4, 4, 5440, 5440),
    Way(BULK, 132, 16, 2, 2176, 2176),
    Way(BULK, 264, 16, 1, 4352, 4352),
    Way((*BULK, "AHEAD_L2=65536"), 132, 16, 1, 4352, 4352),
    Way((*BULK, "AHEAD_L2=65536"), 132, 8, 1, 4352, 4352),
)
HOST_WAYS = (
    *(Way(LANES, 132, 16, 1, n, n) for n in (2048, 3072, 4096)),
    *(Way(BULK, 132, w, 1, n, p) for w, n, p in ((16, 4096, 4096), (16, 4096, 128))),
    Way(BULK, 132, 4, 1, 16384, 16384),
    Way(BULK, 132, 1, 4, 8192, 8192),
    Way(BULK, 32, 4, 2, 8192, 8192),
    Way(BULK, 132, 16, 1, 2720, 2720),
    Way(BULK, 132, 16, 1, 2880, 352),
    Way(LANES, 132, 16, 1, 2720, 2720),
)


@cache
def kernel_of(defines: tuple[str, ...]) -> Kernel:
    return Kernel("copy_spans", nothing, nothing, SOURCE, defines=defines)


def chain(bench: Bench, way: Way, data: Tensor, nbytes: int, launches: int, *, early: bool) -> Case:
    """Launches over one region after the other; each reads the 10 KB that the one ahead wrote."""
    outs = [empty(bench.device, (MOST_THREADS,), np.uint32) for _ in range(2)]
    for out in outs:
        bench.stream.fill(out, 0)
    shared = way.warps * way.depth * (way.span + 8)
    steps = []
    for i in range(launches):
        at = i * nbytes % (data.nbytes - nbytes) // 4096 * 4096
        part = Tensor.over(data.buffer, (nbytes,), np.uint8, at)
        launch = Launch(
            items=1,
            grid=(way.blocks, 1, 1),
            block=(32 * way.warps, 1, 1),
            shared_bytes=shared,
            extents=(nbytes, 2560, way.span, way.piece, way.depth),
            early=early,
        )
        kernel = kernel_of(way.defines)
        steps.append(
            partial(bench.stream.launch, kernel, launch, part, outs[i % 2], outs[1 - i % 2])
        )
    name = f"{nbytes / 1e6:.1f} MB {way.name} {'early' if early else 'in turn'}"
    return Case(name, record_graph(bench, steps), launches, nbytes * launches)


def device_copies(bench: Bench, limit: float) -> None:
    data = empty(bench.device, (DATA_BYTES,), np.uint8)
    bench.stream.fill(data, 1)
    for nbytes in (33 << 20, 16 << 20, 4 << 20):
        launches = max(8, (400 << 20) // nbytes)
        for early in (False, True):
            cases = [chain(bench, w, data, nbytes, launches, early=early) for w in DEVICE_WAYS]
            report(bench, "device", cases, limit)
    data.buffer.close()


def host_copies(bench: Bench) -> None:
    link = bench.device.allocate_pinned(256 << 20)
    rate = copy_rate(bench, link, 256 << 20)
    data = Tensor.over(link, (256 << 20,), np.uint8)
    for offset in (0, 16):
        view = Tensor.over(link, (data.nbytes - 4096,), np.uint8, offset)
        shifted = Tensor(view.buffer, offset, view.shape, view.dtype)
        cases = [shifted_chain(bench, w, shifted, offset) for w in HOST_WAYS]
        report(bench, f"host at {offset}", cases, rate)


def shifted_chain(bench: Bench, way: Way, data: Tensor, offset: int) -> Case:
    outs = [empty(bench.device, (MOST_THREADS,), np.uint32) for _ in range(2)]
    for out in outs:
        bench.stream.fill(out, 0)
    nbytes = 16 << 20
    steps = []
    for i in range(8):
        part = Tensor.over(data.buffer, (nbytes,), np.uint8, offset + i * nbytes)
        launch = Launch(
            items=1,
            grid=(way.blocks, 1, 1),
            block=(32 * way.warps, 1, 1),
            shared_bytes=way.warps * way.depth * (way.span + 8),
            extents=(nbytes, 2560, way.span, way.piece, way.depth),
        )
        kernel = kernel_of(way.defines)
        steps.append(partial(bench.stream.launch, kernel, launch, part, outs[i % 2], outs[1]))
    return Case(f"16 MB {way.name}", record_graph(bench, steps), 8, nbytes * 8)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", default="cuda_copies.json")
    options = parser.parse_args(arguments)
    with open_device("cuda:0") as device:
        bench = Bench(device, device.stream("bench"))
        try:
            limit = read_rate(bench)
            device_copies(bench, limit)
            host_copies(bench)
        finally:
            Path(options.json).write_text(json.dumps(bench.rows, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
