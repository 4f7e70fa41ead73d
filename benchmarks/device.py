"""What a device's own calls cost: launches, graphs, events, copies, pinned memory.

    PYTHONPATH=. python benchmarks/device.py [host|cuda:0] [--json]

Each figure is the median (minimum, maximum) of several runs. Kernels are empty ones, so a launch's
time is what it costs to say, not to do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.figures import Figure, figure, seconds
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from tests.device.kernels import affine

RUNS = 15
LAUNCHES = 250  # about one decode token of a small model
COPY_BYTES = 256 << 20
PIECES_BYTES = (8 << 20, 2_764_800, 1 << 20, 256 << 10)


def timed(action: Callable[[], object]) -> list[float]:
    action()
    return [seconds(action) for _ in range(RUNS)]


def per_call_us(what: str, calls: int, action: Callable[[], object]) -> Figure:
    return figure(what, "us", [taken / calls * 1e6 for taken in timed(action)])


def rate_gbps(what: str, nbytes: int, action: Callable[[], object]) -> Figure:
    return figure(what, "GB/s", [nbytes / taken / 1e9 for taken in timed(action)])


def launch_rows(device: Device, stream: Stream) -> list[Figure]:
    x = empty(device, (1,), np.int64)

    def launches() -> None:
        for _ in range(LAUNCHES):
            affine(stream, x, 1, 0)

    def eager() -> None:
        launches()
        stream.synchronize()

    with stream.capture() as graph:
        launches()

    def replay() -> None:
        stream.replay(graph)
        stream.synchronize()

    return [
        per_call_us("launch, enqueued and run", LAUNCHES, eager),
        per_call_us("operation of a replayed graph", LAUNCHES, replay),
        per_call_us("synchronize an idle stream", 1, stream.synchronize),
    ]


def event_rows(device: Device, stream: Stream) -> list[Figure]:
    event = device.event()

    def record() -> None:
        for _ in range(LAUNCHES):
            stream.record(event)

    def query() -> None:
        for _ in range(LAUNCHES):
            event.query()

    rows = [per_call_us("event record", LAUNCHES, record)]
    stream.synchronize()
    return [*rows, per_call_us("event query", LAUNCHES, query)]


def copy_rows(device: Device, stream: Stream) -> list[Figure]:
    shape = (COPY_BYTES,)
    pinned = Tensor.over(device.allocate_pinned(COPY_BYTES), shape, np.uint8)
    dst = Tensor.over(device.allocate(COPY_BYTES), shape, np.uint8)

    def whole(to: Tensor, source: Tensor) -> None:
        stream.copy(to, source)
        stream.synchronize()

    rows = [
        rate_gbps("pinned to device, one copy", COPY_BYTES, lambda: whole(dst, pinned)),
        rate_gbps("device to pinned, one copy", COPY_BYTES, lambda: whole(pinned, dst)),
    ]
    for piece in PIECES_BYTES:
        starts = range(0, COPY_BYTES - piece + 1, piece)
        pairs = [(dst.rows(at, at + piece), pinned.rows(at, at + piece)) for at in starts]
        rows += piece_rows(stream, pairs, piece)
    return rows


def piece_rows(stream: Stream, pairs: list[tuple[Tensor, Tensor]], piece: int) -> list[Figure]:
    nbytes = len(pairs) * piece

    def one_by_one() -> None:
        for dst, src in pairs:
            stream.copy(dst, src)
        stream.synchronize()

    def together() -> None:
        stream.copy_many(pairs)
        stream.synchronize()

    return [
        rate_gbps(f"pinned to device, {piece} bytes each", nbytes, one_by_one),
        rate_gbps(f"pinned to device, {piece} bytes each, together", nbytes, together),
    ]


def pinned_row(device: Device) -> Figure:
    def allocate() -> None:
        device.allocate_pinned(COPY_BYTES).close()

    return rate_gbps("pinned memory allocated", COPY_BYTES, allocate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("device", nargs="?", default="host")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with open_device(options.device) as device:
        stream = device.stream("compute")
        rows = launch_rows(device, stream) + event_rows(device, stream)
        rows += [*copy_rows(device, stream), pinned_row(device)]
    for entry in rows:
        if options.json:
            print(json.dumps({"device": options.device, **asdict(entry)}))
        else:
            print(entry.line())


if __name__ == "__main__":
    run_benchmark(main)
