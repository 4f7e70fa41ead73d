"""Where the time of one decoded token goes: the recorded pass, whole and with launches left out.

    PYTHONPATH=. python benchmarks/decode_parts.py MODEL.gguf [--device cuda:0] [--at 4096] \
        [--plan NAME=VALUE,...]... [--json FILE]

For each kind of launch: what the pass takes less without it, and what its launches take alone, one
after the other, of all layers. A launch that fills gaps of its neighbours costs less in the pass
than alone; one that keeps them from overlapping costs more. Also the pass without early starts, and
with another share of shared memory for every kernel. What is computed without some launches is
noise; addresses and counts are those of a whole pass before.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.arguments import run_benchmark
from benchmarks.graph_timing import Bench, Case, record_graph, take_turns
from benchmarks.launch_times import bytes_moved, label
from strata_cli.engine.device.base import Kernel, KernelArgument, Launch, Stream
from strata_cli.engine.device.cuda_kernels import CROWDING_SHARED_BYTES
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.forward.rows import single
from strata_cli.engine.kernels import few, few_shapes

SHARES = (-1, 100)  # percent of shared memory; -1: the driver's choice


class Launched(NamedTuple):
    """A launch of a pass."""

    name: str
    kernel: Kernel
    launch: Launch
    args: tuple[KernelArgument, ...]


class Recorder:
    """A stream that keeps launches instead of making them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.launches: list[Launched] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        self.launches.append(Launched(label(kernel, args), kernel, launch, args))


def pass_of(engine: Engine, sequence: Any) -> list[Launched]:
    """The launches of one token's pass, behind what the sequence has read."""
    stream: Any = Recorder(engine._stream)
    forward = replace(engine._forward, stream=stream)
    forward.run(single(sequence._state, 1))
    forward.head(0, 1)
    launches: list[Launched] = stream.launches
    return launches


def graph_case(bench: Bench, name: str, launches: Sequence[Launched]) -> Case:
    calls: list[Callable[[], None]] = [
        partial(bench.stream.launch, own.kernel, own.launch, *own.args) for own in launches
    ]
    return Case(name, record_graph(bench, calls), len(launches))


def median_us(bench: Bench, cases: Sequence[Case]) -> dict[str, float]:
    """Of one replay, by name; closes the graphs."""
    times = take_turns(bench, cases)
    for case in cases:
        case.graph.close()
    return {name: 1e3 * statistics.median(each) for name, each in times.items()}


def functions(engine: Engine, launches: Sequence[Launched]) -> Iterator[Any]:
    """The loaded functions of the pass."""
    loader: Any = engine._stream._loader  # type: ignore[attr-defined]  # a GPU's
    for kernel in dict.fromkeys(own.kernel for own in launches):
        yield loader.function(kernel)


def with_share(engine: Engine, launches: Sequence[Launched], percent: int | None) -> None:
    """Ask for so much of each multiprocessor's memory as shared memory; None: as usual."""
    for function in functions(engine, launches):
        keys = function._context.gpu.driver.CUfunction_attribute
        key = keys.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        is_crowding = function.shared_bytes > CROWDING_SHARED_BYTES
        usual = 100 if is_crowding and not function.kernel.keeps_cache else -1
        function._set(key, usual if percent is None else percent, "percent of shared memory")


def resident_blocks(engine: Engine, own: Launched) -> int:
    """Blocks of a launch that a multiprocessor holds at once."""
    (function,) = functions(engine, [own])
    driver = function._context.gpu.driver
    threads = int(np.prod(own.launch.block))
    answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
        function.handle, threads, own.launch.shared_bytes
    )
    return -1 if int(answer[0]) else int(answer[1])


def whole_pass(bench: Bench, engine: Engine, launches: list[Launched]) -> dict[str, float]:
    """The pass as it is, without early starts, and with each share for all kernels."""
    late = [own._replace(launch=own.launch._replace(early=False)) for own in launches]
    found = median_us(
        bench, [graph_case(bench, "all", launches), graph_case(bench, "none early", late)]
    )
    for percent in SHARES:
        with_share(engine, launches, percent)
        name = f"shared memory {percent} %"
        found |= median_us(bench, [graph_case(bench, name, launches)])
    with_share(engine, launches, None)
    return found


def parts(bench: Bench, engine: Engine, launches: list[Launched]) -> list[dict[str, Any]]:
    """Each kind of launch left out, and alone; what costs most comes first."""
    names = list(dict.fromkeys(own.name for own in launches))
    cases = [graph_case(bench, "all", launches)]
    for name in names:
        others = [own for own in launches if own.name != name]
        own = [own for own in launches if own.name == name]
        cases += [graph_case(bench, f"- {name}", others), graph_case(bench, f"+ {name}", own)]
    us = median_us(bench, cases)
    rows = []
    for name in names:
        own = [own for own in launches if own.name == name]
        rows.append(
            {
                "kernel": name,
                "launches": len(own),
                "us_in_pass": (us["all"] - us[f"- {name}"]) / len(own),
                "us_alone": us[f"+ {name}"] / len(own),
                "kib": bytes_moved(own[0].kernel, own[0].args) / 1024,
                "grid": own[0].launch.grid,
                "threads": own[0].launch.block[0],
                "shared_bytes": own[0].launch.shared_bytes,
                "resident_blocks": resident_blocks(engine, own[0]),
            }
        )
    return sorted(rows, key=lambda row: -row["us_in_pass"] * row["launches"])


def other_plans(
    bench: Bench, engine: Engine, sequence: Any, plans: Sequence[str]
) -> dict[str, float]:
    """The pass with products of few rows cut by other constants of few_shapes.py."""
    found: dict[str, float] = {}
    for plan in plans:
        values = {name: int(value) for name, value in (each.split("=") for each in plan.split(","))}
        usual = {name: getattr(few_shapes, name) for name in values}
        try:
            change(values)
            launches = pass_of(engine, sequence)
        finally:
            change(usual)
        bench.device.prepare(dict.fromkeys(own.kernel for own in launches))
        found |= median_us(bench, [graph_case(bench, plan, launches)])
    return found


def change(values: dict[str, int]) -> None:
    for name, value in values.items():
        for module in (few_shapes, few):
            if hasattr(module, name):
                setattr(module, name, value)
    few.few_plan.cache_clear()


def show(whole: dict[str, float], rows: list[dict[str, Any]]) -> None:
    for name, us in whole.items():
        print(f"{us:10.1f} us  {name}")
    print("    us in pass = launches x each      alone  blocks/SM  kernel")
    for row in rows:
        total = row["us_in_pass"] * row["launches"]
        print(
            f"  {total:10.1f} {row['launches']:5} x {row['us_in_pass']:7.2f} "
            f"{row['us_alone']:9.2f} {row['resident_blocks']:5}  {row['grid']} "
            f"{row['threads']} {row['kernel']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--at", type=int, default=4096, help="position of the token")
    parser.add_argument("--plan", action="append", default=[], help="constants of few_shapes.py")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    options = EngineOptions(model=arguments.model, device=arguments.device)
    with Engine.open(options) as engine, engine.sequence() as sequence:
        rng = np.random.default_rng(3)
        ids = rng.integers(0, engine.spec.vocab_size - 64, arguments.at).tolist()
        sequence.prefill(ids, logits="none")
        sequence.step(ids[0])
        bench = Bench(engine._device, engine._stream)
        launches = pass_of(engine, sequence)
        whole = whole_pass(bench, engine, launches)
        whole |= other_plans(bench, engine, sequence, arguments.plan)
        rows = parts(bench, engine, launches)
    show(whole, rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"whole": whole, "parts": rows}, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
