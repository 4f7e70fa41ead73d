"""How fast a model loads, reads prompts and decodes, and its share of the device's limits.

    PYTHONPATH=. python benchmarks/cuda_model.py MODEL.gguf [--device cuda:0] [--json FILE]

Everything that a figure is compared with is measured in the same run. Rates are median (least to
most) of several runs. A prompt's tokens are random, so its routing is as even as the model allows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.launch_times import Row, TimedStream
from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.experts.resident import ExpertMatrix
from strata_cli.engine.forward.planning import Homes
from strata_cli.engine.forward.rows import single
from strata_cli.engine.forward.weights import NgramWeights
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.quants import row_bytes

COPY_BYTES = 1 << 30
READ_BYTES = 4 << 30
READ_PIECE_BYTES = 16 << 20
REPLAYS = 16
MIN_RUNS, MAX_RUNS, RUNS_S = 3, 9, 6.0


def timed(action: Callable[[], object], runs_s: float = RUNS_S) -> list[float]:
    """Seconds of each run, after one that warms up."""
    action()
    seconds: list[float] = []
    while len(seconds) < MIN_RUNS or (len(seconds) < MAX_RUNS and sum(seconds) < runs_s):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


def rates(amount: float, seconds: list[float]) -> dict[str, float]:
    values = [amount / s for s in seconds]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def machine(device: str) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "device": device,
        "commit": commit or "unknown",
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
    }


def copy_rates(device: Device, stream: Stream) -> dict[str, Any]:
    """Memory of the device read and written by copies, and the link, in GB/s."""
    nbytes = min(COPY_BYTES, device.memory().free_bytes // 4)
    src, dst = empty(device, (nbytes,), np.uint8), empty(device, (nbytes,), np.uint8)
    stream.fill(src, 1)
    pinned = Tensor.over(device.allocate_pinned(nbytes), (nbytes,), np.uint8)

    def copy(to: Tensor, source: Tensor) -> Callable[[], None]:
        def run() -> None:
            for _ in range(4):
                stream.copy(to, source)
            stream.synchronize()

        return run

    try:
        return {
            "memory_gbps": rates(8 * nbytes / 1e9, timed(copy(dst, src), 1.0)),
            "host_to_device_gbps": rates(4 * nbytes / 1e9, timed(copy(dst, pinned), 1.0)),
        }
    finally:
        for tensor in (src, dst, pinned):
            tensor.buffer.close()


def file_rate_gbps(path: Path) -> float:
    """The file's bytes into memory, by eight threads, as the machine has them now."""
    total = min(path.stat().st_size, READ_BYTES)
    starts = range(0, total, READ_PIECE_BYTES)

    def read(start: int) -> int:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            return len(file.read(READ_PIECE_BYTES))

    begin = time.perf_counter()
    with ThreadPoolExecutor(8) as threads:
        nbytes = sum(threads.map(read, starts))
    return nbytes / (time.perf_counter() - begin) / 1e9


def weights_in(value: Any) -> Iterator[Any]:
    """Every Weight, ExpertMatrix and NgramWeights under a dataclass of weights."""
    if isinstance(value, Weight | ExpertMatrix):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from weights_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, Tensor):
        for item in dataclasses.fields(value):
            if not (isinstance(value, NgramWeights) and item.name == "table"):  # read row by row
                yield from weights_in(getattr(value, item.name))


class Bytes(NamedTuple):
    """Weights that one decoded token reads: routed experts, and everything else."""

    experts: int
    others: int


def bytes_per_token(engine: Engine) -> Bytes:
    """All matrices, top_k experts of each layer, a row of the embedding."""
    weights, k = engine._forward.weights, engine.spec.num_experts_per_tok
    others = row_bytes(weights.embed.qtype, weights.embed.cols) + weights.head.nbytes
    experts = 0
    for weight in weights_in((weights.final_read, weights.layers)):
        if isinstance(weight, Weight):
            others += weight.nbytes
        else:
            experts += k * weight.layout.nbytes
    return Bytes(experts, others)


def open_timed(options: EngineOptions) -> tuple[Engine, dict[str, Any]]:
    done: list[int] = [0]

    def progress(nbytes: int, _total: int) -> None:
        done[0] = nbytes

    begin = time.perf_counter()
    engine = Engine.open(options, progress, notice=lambda text: print(text, file=sys.stderr))
    seconds = time.perf_counter() - begin
    with open_gguf(options.model) as file:
        nbytes = sum(info.nbytes for info in file.tensors.values())
    return engine, {"seconds": seconds, "bytes": nbytes, "gbps": nbytes / seconds / 1e9}


def prompt_rows(engine: Engine, lengths: list[int], until: float) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        if length > engine.context_tokens or time.monotonic() > until:
            continue
        ids = rng.integers(0, engine.spec.vocab_size - 64, length).tolist()
        with engine.sequence() as sequence:

            def read(sequence: Sequence = sequence, ids: list[int] = ids) -> None:
                sequence.reset()
                sequence.prefill(ids)

            seconds = timed(read)
        rows.append({"tokens": length, "tokens_per_s": rates(length, seconds)})
        print(f"prompt {length:6} tokens: {rows[-1]['tokens_per_s']['median']:10.1f} tokens/s")
    return rows


def decode_row(
    engine: Engine, prompt: int, steps: int, copies: dict[str, Any], experts: str
) -> dict[str, Any]:
    """Tokens per second of steps, and of the recorded pass alone, behind a prompt."""
    ids = np.random.default_rng(2).integers(0, engine.spec.vocab_size - 64, prompt).tolist()
    with engine.sequence() as sequence:
        sequence.prefill(ids)
        sequence.step(ids[0])
        steps = min(steps, engine.context_tokens - sequence.position)
        step_seconds = []
        for index in range(steps):
            begin = time.perf_counter()
            sequence.step(ids[index % prompt])
            step_seconds.append(time.perf_counter() - begin)
        (recorded,), stream = engine._decoder._recorded.values(), engine._stream

        def replay() -> None:
            for _ in range(REPLAYS):
                stream.replay(recorded.graph)
            stream.synchronize()

        replay_seconds = [seconds / REPLAYS for seconds in timed(replay, 2.0)]
    nbytes = bytes_per_token(engine)
    row: dict[str, Any] = {
        "position": prompt,
        "steps": steps,
        "tokens_per_s": rates(1, step_seconds),
        "replays_per_s": rates(1, replay_seconds),
        "expert_bytes": nbytes.experts,
        "other_bytes": nbytes.others,
        "least_seconds": least_seconds(nbytes, copies, experts),
    }
    row["share_of_limit"] = row["least_seconds"] * row["replays_per_s"]["median"]
    print(
        f"decode at {prompt}: {row['tokens_per_s']['median']:.1f} tokens/s, pass alone "
        f"{row['replays_per_s']['median']:.1f}/s = "
        f"{sum(nbytes) * row['replays_per_s']['median'] / 1e9:.1f} GB/s of weights, "
        f"{row['share_of_limit']:.0%} of what memory and link allow"
    )
    return row


def least_seconds(nbytes: Bytes, copies: dict[str, Any], experts: str) -> float:
    """What reading a token's weights takes at the measured rates: mapped ones over the link."""
    over_link = {"device": 0.0, "mixed": 0.5, "mapped": 1.0}[experts] * nbytes.experts
    in_memory = sum(nbytes) - over_link
    keys = ("memory_gbps", "host_to_device_gbps")
    memory, link = (float(copies[key]["median"]) * 1e9 for key in keys)
    return max(over_link / link, in_memory / memory)


def kernel_rows(engine: Engine, num_tokens: int, before: int) -> list[dict[str, Any]]:
    """Time of each kernel in a pass of num_tokens, behind a prompt of before tokens."""
    rng = np.random.default_rng(3)
    port = engine._port
    with engine.sequence() as sequence:
        for count in (before, num_tokens):  # the second one warms up what the timed pass runs
            if count:
                sequence.prefill(rng.integers(0, engine.spec.vocab_size - 64, count).tolist())
        position = before
        port.stage(
            rng.integers(0, engine.spec.vocab_size - 64, num_tokens).tolist(),
            range(position, position + num_tokens),
        )
        port.enqueue_inputs(num_tokens)
        port.mark_inputs()
        stream = TimedStream(engine._device, engine._stream)
        forward = dataclasses.replace(engine._forward, stream=stream)
        forward.run(single(sequence._state, num_tokens))
        forward.head(num_tokens - 1, num_tokens)
        rows = stream.rows()
    print_kernels(rows, num_tokens)
    return [{**row._asdict(), "gbps": row.gbps} for row in rows]


def print_kernels(rows: list[Row], num_tokens: int) -> None:
    total = sum(row.us for row in rows)
    print(f"\npass of {num_tokens} tokens: {total / 1e3:.3f} ms in kernels")
    for row in rows:
        print(
            f"  {row.us / total:6.1%} {row.us:10.1f} us {row.launches:5} launches "
            f"{row.gbps:8.1f} GB/s  {row.kernel}"
        )


def measure(arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Names and results, each as soon as it is there."""
    until = time.monotonic() + arguments.budget_s
    yield "machine", machine(arguments.device)
    options = EngineOptions(
        model=arguments.model,
        device=arguments.device,
        max_context=arguments.context,
        prefill=arguments.chunk,
        homes=Homes(experts=ExpertHome(arguments.experts)),
    )
    engine, load = open_timed(options)
    with engine:
        load["file_gbps"] = file_rate_gbps(arguments.model)
        print(
            f"load: {load['seconds']:.2f} s, {load['gbps']:.2f} GB/s; "
            f"the file can be read at {load['file_gbps']:.2f} GB/s now"
        )
        yield "load", load
        yield (
            "model",
            {
                "name": engine.model_name,
                "context": engine.context_tokens,
                "chunk": engine.chunk_tokens,
                "experts": arguments.experts,
            },
        )
        copies = copy_rates(engine._device, engine._stream)
        yield "copies", copies
        memory, link = (copies[f"{key}_gbps"]["median"] for key in ("memory", "host_to_device"))
        print(f"memory {memory:.1f} GB/s read and written by copies, link {link:.1f} GB/s")
        most = min(engine.chunk_tokens, engine.context_tokens // 4)
        at = min(arguments.at, engine.context_tokens // 2)
        more = (arguments.steps, copies, arguments.experts)
        yield "decode", [decode_row(engine, position, *more) for position in sorted({16, at})]
        yield "kernels_decode", kernel_rows(engine, 1, at)
        yield "prompts", prompt_rows(engine, arguments.lengths, until)
        if time.monotonic() < until:
            yield "kernels_prompt", kernel_rows(engine, most, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--context", type=int, default=0, help="tokens; 0 is automatic")
    parser.add_argument("--chunk", type=int, default=0, help="tokens; 0 is automatic")
    parser.add_argument("--experts", default="device", choices=[home.value for home in ExpertHome])
    parser.add_argument("--lengths", default="128,512,1024,2048,4096,8192", help="of prompts")
    parser.add_argument("--steps", type=int, default=64, help="tokens decoded")
    parser.add_argument("--at", type=int, default=4096, help="position of the second decode")
    parser.add_argument("--budget-s", type=float, default=300.0, help="begin nothing new after it")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    arguments.lengths = [int(text) for text in arguments.lengths.split(",")]
    results: dict[str, Any] = {}
    for name, value in measure(arguments):
        results[name] = value
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
