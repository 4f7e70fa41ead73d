"""Ways to make the products of prompts, in turns: times, rates, and whether they agree in bits.

    PYTHONPATH=. python benchmarks/cuda_prompts.py [check dense grouped] [--types Q8_0,...] \
        [--json FILE]

A way is a function for many rows. Shares are of the best rate that torch's bfloat16
product reaches in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.cuda_matmul import (
    CHECK_SHAPES,
    EXPERTS,
    NUM_EXPERTS,
    PROMPTS,
    TOP_K,
    Q,
    dense_result,
    fits,
    parse_types,
    repeated_rows,
    rounded,
    routed_by,
    routing,
    weights_of,
)
from benchmarks.graph_timing import Bench, Case, nothing, record_graph, report, torch_rate
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Kernel, Tensor, empty
from strata_cli.engine.device.transfer import download
from strata_cli.engine.kernels.few import few_plan
from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.products import (
    Matrix,
    Plan,
    Unit,
    alignment,
    dense_matrix,
    grouped_many_plan,
    many_plan,
)
from strata_cli.engine.kernels.prompt_plan import split_plan
from strata_cli.engine.kernels.warpgroup_plan import grouped_warpgroup_plan, warpgroup_plan
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from strata_cli.errors import StrataError
from tests.kernels.packed import packed_rows

Planner = Callable[[Gpu], Plan]


def many(matrix: Matrix, tokens: int, gpu: Gpu) -> Plan:
    return many_plan(matrix, tokens, gpu.shared_bytes)


def grouped_many(matrix: Matrix, pairs: int, experts: int, gpu: Gpu) -> Plan:
    return grouped_many_plan(matrix, pairs, experts, gpu.shared_bytes)


Ways = dict[str, Callable[..., Plan]]
DENSE_WAYS: Ways = {"many": many, "warpgroup": warpgroup_plan}
GROUPED_WAYS: Ways = {"many": grouped_many, "warpgroup": grouped_warpgroup_plan}
SHORT = tuple((tokens, 2560, 12288) for tokens in (64, 128, 512))


def gpu_of(bench: Bench) -> Gpu:
    stream = bench.stream
    return Gpu(stream.shared_bytes, stream.num_multiprocessors, stream.capability)


@cache
def kernel_of(unit: Unit) -> Kernel:
    """Always the same one for a unit: devices know kernels by identity."""
    return Kernel(unit.function, nothing, nothing, unit.source, unit.function, unit.defines)


def kernels_of(planners: Sequence[Planner], gpu: Gpu) -> Iterator[Kernel]:
    """The kernels of the ways that fit."""
    for planner in planners:
        with suppress(StrataError):
            yield kernel_of(planner(gpu).unit)


def dense_ways(bench: Bench, weights: Sequence[Weight], tokens: int, limit: float) -> None:
    """Weights of several types and one shape times as many tokens; launches of a way take turns."""
    rows, cols = weights[0].rows, weights[0].cols
    x, out = bench.normal(tokens, cols), empty(bench.device, (tokens, rows))
    half = rounded(bench, x)
    cases: list[Case] = []
    for weight in weights:
        matrix = dense_matrix(weight.qtype, rows, cols, weight.data.address)
        numbers = (int(weight.qtype), tokens, rows, cols)
        name = f"{weight.qtype.name} T{tokens} K{cols} N{rows}"
        planners = [(way, partial(plan, matrix, tokens)) for way, plan in DENSE_WAYS.items()]
        args = (x, half, weight.data, out, *numbers)
        cases += same_cases(bench, name, planners, args, out, 2.0 * tokens * cols * rows)
    report(bench, "many", cases, limit)
    for tensor in (x, out, half):
        tensor.buffer.close()


class Routed(NamedTuple):
    """Pairs of tokens and experts, and the experts' matrices."""

    layout: WeightLayout
    blobs: Tensor
    row_of: Tensor
    start: Tensor


def grouped_ways(bench: Bench, all_routed: Sequence[Routed], x: Tensor, limit: float) -> None:
    """One product per pair, for matrices of several types and one shape."""
    layout, _, row_of, start = all_routed[0]
    pairs, experts = row_of.shape[0], start.shape[0] - 1
    out, half = empty(bench.device, (pairs, layout.rows)), rounded(bench, x)
    cases: list[Case] = []
    for layout, blobs, row_of, start in all_routed:
        matrix = expert_matrix(layout.qtype, layout.cols, layout.rows)
        name = f"{layout.qtype.name} P{pairs} K{layout.cols} N{layout.rows}"
        planners = [
            (way, partial(plan, matrix, pairs, experts)) for way, plan in GROUPED_WAYS.items()
        ]
        numbers = (int(layout.qtype), layout.rows, layout.cols, 0)
        args = (x, half, blobs, row_of, start, out, *numbers)
        flops = 2.0 * pairs * layout.cols * layout.rows
        cases += same_cases(bench, name, planners, args, out, flops)
    report(bench, "grouped", cases, limit)
    for tensor in (out, half):
        tensor.buffer.close()


def expert_matrix(qtype: QuantType, cols: int, rows: int) -> Matrix:
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols)))


def same_cases(
    bench: Bench,
    name: str,
    planners: Sequence[tuple[str, Planner]],
    args: tuple[Any, ...],
    out: Tensor,
    flops: float,
) -> Iterator[Case]:
    """A case for each way that fits; its name tells whether it has the bits of the first one."""
    usual: np.ndarray | None = None
    for way, planner in planners:
        try:
            plan = planner(gpu_of(bench))
        except StrataError as error:
            bench.record(kind="does not fit", case=f"{name}: {way}", error=error.message[:120])
            continue
        bench.stream.fill(out, 0xFF)
        launch = partial(launch_plan, bench, plan, *args)
        launch()
        result = download(bench.device, bench.stream, out)
        usual = result if usual is None else usual
        same = "same bits" if np.array_equal(result, usual) else "OTHER BITS"
        graph = record_graph(bench, [launch] * 2)
        yield Case(f"{name}: {way} {plan.grid[0]} {same}", graph, 2, flops=2 * flops)


def launch_plan(bench: Bench, plan: Plan, *args: Any) -> None:
    """Launches a plan that a wrapper might not have chosen."""
    bench.stream.launch(kernel_of(plan.unit), plan.launch(1, 1), *args)


# -- the parts ------------------------------------------------------------------------------------


def check(bench: Bench, types: Sequence[QuantType]) -> bool:
    """The warpgroups' against few rows: dense, and with five experts that are the same matrix."""
    start = bench.tensor(np.array([0, 1, 1, 9, 80, 200], np.int32))
    all_right = check_split(bench) if Q.F32 in types else True
    for qtype in types:
        if qtype is Q.F32:
            continue
        cols, rows = CHECK_SHAPES[BLOCK[qtype].weights > 64]
        weight = Weight(bench.tensor(packed_rows(qtype, rows, cols, 3)), qtype, rows, cols)
        x = bench.random.standard_normal((300, cols)).astype(np.float32)
        few = dense_result(bench, x, weight, False)
        activations = bench.tensor(x)
        half, out = rounded(bench, activations), empty(bench.device, (300, rows))
        bench.stream.fill(out, 0xFF)
        matrix = dense_matrix(qtype, rows, cols, weight.data.address)
        plan = warpgroup_plan(matrix, 300, gpu_of(bench))
        launch_plan(bench, plan, activations, half, weight.data, out, int(qtype), 300, rows, cols)
        dense = np.array_equal(download(bench.device, bench.stream, out), few)
        pairs = empty(bench.device, (200, rows))
        bench.stream.fill(pairs, 0xFF)
        blobs = bench.tensor(np.full(5, weight.data.address, np.int64))
        row_of = bench.tensor(np.arange(200, dtype=np.int32))
        plan = grouped_warpgroup_plan(expert_matrix(qtype, cols, rows), 200, 5, gpu_of(bench))
        numbers = (int(qtype), rows, cols, 0)
        launch_plan(bench, plan, activations, half, blobs, row_of, start, pairs, *numbers)
        grouped = np.array_equal(download(bench.device, bench.stream, pairs), few[:200])
        bench.record(kind="check", case=qtype.name, dense=dense, grouped=grouped)
        all_right = all_right and dense and grouped
    return all_right


def check_split(bench: Bench) -> bool:
    """Float32 weights: the router, and the other cuts of a row."""
    all_right = True
    for cols, rows in ((2560, 512), (160, 70), (320, 33), (100, 64)):
        weight = Weight(bench.tensor(packed_rows(Q.F32, rows, cols, 3)), Q.F32, rows, cols)
        x = bench.random.standard_normal((300, cols)).astype(np.float32)
        few = dense_result(bench, x, weight, False)
        out = empty(bench.device, (300, rows))
        bench.stream.fill(out, 0xFF)
        plan = split_plan(dense_matrix(Q.F32, rows, cols, weight.data.address), 300)
        launch_plan(bench, plan, bench.tensor(x), weight.data, out, 0, 300, rows, cols)
        same = np.array_equal(download(bench.device, bench.stream, out), few)
        bench.record(kind="check", case=f"F32 K{cols} N{rows}", dense=same)
        all_right = all_right and same
    return all_right


def router(bench: Bench, limit: float) -> None:
    """The router of a prompt, by the few-row function and by that of split float32."""
    tokens, cols, rows = 4096, 2560, 512
    weight = weights_of(bench, Q.F32, rows, cols, 1)[0]
    x, out = bench.normal(tokens, cols), empty(bench.device, (tokens, rows))
    matrix = dense_matrix(Q.F32, rows, cols, weight.data.address)
    passes = tokens // 8
    planners: list[tuple[str, Planner]] = [
        ("few", lambda gpu: few_plan((matrix,), tokens, passes, gpu)),
        ("split", lambda _: split_plan(matrix, tokens)),
    ]
    args = (x, weight.data, out, int(Q.F32), tokens, rows, cols)
    name, flops = f"F32 T{tokens} K{cols} N{rows}", 2.0 * tokens * cols * rows
    report(bench, "router", list(same_cases(bench, name, planners, args, out, flops)), limit)


def dense(bench: Bench, types: Sequence[QuantType], limit: float) -> None:
    """All ways."""
    for tokens, cols, rows in (*PROMPTS, *SHORT):
        weights = [
            weights_of(bench, qtype, rows, cols, 1)[0] for qtype in types if fits(qtype, cols)
        ]
        dense_ways(bench, weights, tokens, limit)
        for weight in weights:
            weight.data.buffer.close()


def unequal_routing(bench: Bench, tokens: int, is_down: bool) -> tuple[Tensor, Tensor]:
    """As ``routing``, with experts of which some are chosen many times as often as others."""
    liking = bench.random.standard_normal(NUM_EXPERTS)
    scores = liking + bench.random.gumbel(size=(tokens, NUM_EXPERTS))
    return routed_by(bench, scores, is_down)


def grouped(bench: Bench, types: Sequence[QuantType], limit: float) -> None:
    """40 and 80 tokens per expert on average; the last as unequal as a model's routing."""
    for tokens, route in ((2048, routing), (4096, routing), (4096, unequal_routing)):
        for cols, rows in EXPERTS:
            is_down = cols < rows
            x = bench.normal(tokens * TOP_K if is_down else tokens, cols)
            row_of, start = route(bench, tokens, is_down)
            all_routed = []
            kept = []
            for qtype in filter(lambda t: fits(t, cols), types):
                layout = WeightLayout(qtype, rows, cols, 0)
                kept.append(repeated_rows(bench, qtype, rows, cols, NUM_EXPERTS))
                place = layout.nbytes * np.arange(NUM_EXPERTS, dtype=np.int64)
                blobs = bench.tensor(kept[-1].address + place)
                all_routed.append(Routed(layout, blobs, row_of, start))
            grouped_ways(bench, all_routed, x, limit)
            for data in (*kept, x):
                data.buffer.close()


def prepare(bench: Bench, parts: Sequence[str], types: Sequence[QuantType]) -> None:
    """Compiles everything at once, by all processors."""
    started = time.perf_counter()
    planners: list[Planner] = []
    for qtype in types:
        if qtype is Q.F32:
            continue
        if "check" in parts:
            cols, rows = CHECK_SHAPES[BLOCK[qtype].weights > 64]
            planners.append(partial(warpgroup_plan, dense_matrix(qtype, rows, cols, 0), 300))
            matrix = expert_matrix(qtype, cols, rows)
            planners.append(partial(grouped_warpgroup_plan, matrix, 200, 5))
        for tokens, cols, rows in (*PROMPTS, *SHORT) if "dense" in parts else ():
            if fits(qtype, cols):
                matrix = dense_matrix(qtype, rows, cols, 0)
                planners += [partial(plan, matrix, tokens) for plan in DENSE_WAYS.values()]
        for cols, rows in EXPERTS if "grouped" in parts else ():
            if fits(qtype, cols):
                matrix = expert_matrix(qtype, cols, rows)
                ways = GROUPED_WAYS.values()
                planners += [partial(plan, matrix, 20480, NUM_EXPERTS) for plan in ways]
    kernels = list(dict.fromkeys(kernels_of(planners, gpu_of(bench))))
    bench.device.prepare(kernels)
    seconds = time.perf_counter() - started
    bench.record(kind="time", case=f"compile {len(kernels)} kernels", seconds=seconds)


def run(bench: Bench, parts: Sequence[str], types: Sequence[QuantType]) -> bool:
    prepare(bench, parts, types)
    right = check(bench, types) if "check" in parts else True
    if not {"dense", "grouped"} & set(parts):
        return right
    limit = torch_rate(bench, ((8192, 8192, 8192), *PROMPTS))
    router(bench, limit)
    types = [qtype for qtype in types if qtype is not Q.F32]
    if "dense" in parts:
        dense(bench, types, limit)
    if "grouped" in parts:
        grouped(bench, types, limit)
    return right


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["check", "dense", "grouped"])
    default = (Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.IQ3_XXS, Q.IQ4_NL)
    parser.add_argument("--types", default=default, type=parse_types)
    parser.add_argument("--json", default="cuda_prompts.json")
    options = parser.parse_args(arguments)
    with open_device("cuda:0") as device:
        bench = Bench(device, device.stream("bench"))
        try:
            right = run(bench, options.parts or ["check", "dense", "grouped"], options.types)
        finally:
            Path(options.json).write_text(json.dumps(bench.rows, indent=1))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
