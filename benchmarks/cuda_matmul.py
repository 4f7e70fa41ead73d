"""Matrix products on a GPU: right for every type, and their share of memory and tensor-core rates.

    PYTHONPATH=. python benchmarks/cuda_matmul.py [check few layer host many grouped variants \
        compare compare-host profile] [--types published|all|Q8_0,...] [--json FILE]

Limits are measured in the same run: reading memory with a plain kernel, torch's bfloat16 product.
Launches are replayed as a graph over so many copies of a matrix that the L2 cache holds none of
them; cases take turns, and each figure is the median of their turns.
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
from typing import Any

import numpy as np

from benchmarks.graph_timing import (
    Bench,
    Case,
    Collector,
    copy_rate,
    imagined,
    nothing,
    read_rate,
    record_graph,
    report,
    torch_rate,
)
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Graph, Kernel, Tensor, empty
from strata_cli.engine.device.transfer import download
from strata_cli.engine.kernels.few import few_plan
from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS, Way
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.grouped_matmul import grouped_matmul
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.matmul_several import (
    Experts,
    Product,
    grouped_matmul_pair,
    matmul_several,
)
from strata_cli.engine.kernels.products import (
    Matrix,
    Plan,
    Tile,
    Unit,
    alignment,
    dense_matrix,
    grouped_many_plan,
    many_plan,
)
from strata_cli.engine.kernels.shapes import blocks
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize, row_bytes
from strata_cli.errors import StrataError
from tests.kernels.packed import packed_rows

Q = QuantType
PUBLISHED = (
    *(Q.Q8_0, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q2_K, Q.Q3_K, Q.Q2_0, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS),
    *(Q.IQ3_S, Q.IQ4_NL, Q.IQ4_XS, Q.Q5_1, Q.BF16, Q.F32),
)
FOR_PROMPTS = (Q.Q8_0, Q.Q4_K, Q.Q6_K, Q.IQ3_XXS, Q.IQ4_NL, Q.Q2_0)
# Columns and rows of a full-width layer's matrices.
DENSE = ((2560, 12288), (2560, 10240), (2560, 6144), (10240, 320), (320, 10240), (6144, 2560))
EXPERTS = ((2560, 640), (640, 2560))
# What the launches of a delta-net layer multiply: columns, then types and rows.
STREAMS = (
    (10240, ((Q.Q8_0, 320), (Q.F32, 4))),
    (320, ((Q.Q8_0, 10240),)),
)
LAYER_LAUNCHES = (
    *STREAMS,
    (2560, ((Q.Q8_0, 10240), (Q.Q6_K, 6144), (Q.Q8_0, 48), (Q.Q8_0, 48))),
    (6144, ((Q.Q8_0, 2560),)),
    *STREAMS,
    (2560, ((Q.F32, 512), (Q.F32, 1), (Q.Q6_K, 640), (Q.Q6_K, 640))),
    (640, ((Q.Q8_0, 2560),)),
)
PROMPTS = (
    *((2048, 2560, 12288), (4096, 2560, 6144), (4096, 6144, 2560)),
    *((4096, 10240, 320), (4096, 320, 10240)),
)
NUM_EXPERTS, TOP_K = 512, 10
FLUSH_BYTES = 400 << 20  # several times any L2 cache
CHECK_SHAPES = {True: (1280, 1100), False: (640, 1100)}  # blocks above 64 weights or not
WAYS = (
    Way(),
    Way(warps=20),
    Way(warps=15, shared_bytes=150 << 10),
    *(Way(shared_bytes=n << 10) for n in (150, 180, 220)),
    *(Way(resident=1, shared_bytes=n << 10) for n in (112, 180, 220)),
    Way(resident=1, warps=20, shared_bytes=180 << 10),
    Way(resident=2, warps=15, shared_bytes=110 << 10),
    Way(rows=8, resident=2),
    Way(rows=8, resident=3, warps=10),
)
# Of experts in host memory: how much is on its way at once.
HOST_WAYS = (
    Way(),
    *(Way(rows=r, resident=n, slots=1) for r, n in ((8, 1), (16, 1), (8, 2), (16, 3))),
    Way(rows=8, resident=1, warps=5, slots=2),
    Way(resident=3),
)
COMPARED = (
    *((Q.Q8_0, shape, 1) for shape in DENSE),
    *((Q.Q8_0, DENSE[0], 8), (Q.F32, (2560, 512), 1)),
    *((qtype, DENSE[0], 1) for qtype in (Q.Q4_K, Q.Q6_K, Q.IQ3_XXS, Q.IQ4_NL)),
)
COMPARED_EXPERTS = (
    *((Q.IQ3_XXS, EXPERTS[0]), (Q.Q8_0, EXPERTS[0]), (Q.IQ4_NL, EXPERTS[1]), (Q.Q8_0, EXPERTS[1])),
)
TILED, TILED_EXPERTS = (Q.Q8_0, Q.IQ3_XXS), (Q.IQ3_XXS, Q.IQ4_NL)
MANY_TILES = tuple(
    Tile(*t) for t in ((4, 2, 3), (4, 2, 2), (8, 1, 2), (4, 1, 3), (4, 1, 2), (2, 2, 3), (2, 1, 3))
)
GROUPED_TILES = tuple(
    Tile(*t) for t in ((4, 1, 3), (4, 1, 2), (2, 1, 3), (2, 1, 2), (8, 1, 2), (4, 2, 2))
)


def fits(qtype: QuantType, cols: int) -> bool:
    return cols % BLOCK[qtype].weights == 0


# -- compiling everything at once, by all processors ----------------------------------------------


def dense_kernels(stream: Any, qtype: QuantType, cols: int, rows: int, tokens: int) -> None:
    weight = Weight(imagined(rows * row_bytes(qtype, cols), dtype=np.uint8), qtype, rows, cols)
    half = imagined(tokens, cols, dtype=np.float16) if tokens > 300 else None
    matmul(stream, imagined(tokens, cols), weight, imagined(tokens, rows), half)


def expert_kernels(stream: Any, qtype: QuantType, cols: int, rows: int, pairs: int) -> None:
    i32 = partial(imagined, dtype=np.int32)
    half = imagined(pairs, cols, dtype=np.float16) if pairs > TOP_K else None
    blobs = imagined(NUM_EXPERTS, dtype=np.int64)
    layout = WeightLayout(qtype, rows, cols, 0)
    x, out, start = imagined(pairs, cols), imagined(pairs, rows), i32(NUM_EXPERTS + 1)
    grouped_matmul(stream, x, blobs, layout, i32(pairs), start, out, half)


def layer_kernels(stream: Any) -> None:
    for cols, members in LAYER_LAUNCHES:
        products = []
        for qtype, rows in members:
            nbytes = rows * row_bytes(qtype, cols)
            weight = Weight(imagined(nbytes, dtype=np.uint8), qtype, rows, cols)
            products.append(Product(weight, imagined(1, rows)))
            matmul(stream, imagined(1, cols), weight, products[-1].out)
        matmul_several(stream, imagined(1, cols), products)
    i32 = partial(imagined, dtype=np.int32)
    layout, blobs = WeightLayout(Q.IQ3_XXS, 640, 2560, 0), imagined(NUM_EXPERTS, dtype=np.int64)
    one = Experts(blobs, layout, imagined(TOP_K, 640))
    grouped_matmul_pair(stream, imagined(1, 2560), one, one, i32(TOP_K), i32(NUM_EXPERTS + 1))


def prepare(bench: Bench, parts: Sequence[str], types: Sequence[QuantType]) -> None:
    started = time.perf_counter()
    stream: Any = Collector(bench.stream.shared_bytes)
    one = [(qtype, 1, *shape) for qtype in types for shape in DENSE if "few" in parts]
    prompts = [(t, *shape) for t in FOR_PROMPTS for shape in PROMPTS if "many" in parts]
    for qtype, tokens, cols, rows in one + prompts:
        if fits(qtype, cols):
            dense_kernels(stream, qtype, cols, rows, tokens)
    ten = [(qtype, TOP_K, *shape) for qtype in types for shape in EXPERTS if "few" in parts]
    all_pairs = [(t, 20480, *shape) for t in FOR_PROMPTS for shape in EXPERTS if "grouped" in parts]
    for qtype, pairs, cols, rows in ten + all_pairs:
        if fits(qtype, cols):
            expert_kernels(stream, qtype, cols, rows, pairs)
    if "layer" in parts:
        layer_kernels(stream)
    kernels = list(stream.kernels)
    kernels += check_kernels(bench, types) if "check" in parts else []
    kernels += variant_kernels(bench.stream.shared_bytes) if "variants" in parts else []
    kernels += (
        compared_kernels(gpu_of(bench.stream)) if {"compare", "compare-host"} & set(parts) else []
    )
    bench.device.prepare(kernels)
    seconds = time.perf_counter() - started
    bench.record(kind="time", case=f"compile {len(kernels)} kernels", seconds=seconds)


def check_kernels(bench: Bench, types: Sequence[QuantType]) -> list[Kernel]:
    stream: Any = Collector(bench.stream.shared_bytes)
    for qtype in types:
        cols, rows = CHECK_SHAPES[BLOCK[qtype].weights > 64]
        weight = Weight(imagined(rows * row_bytes(qtype, cols), dtype=np.uint8), qtype, rows, cols)
        x, out = imagined(300, cols), imagined(300, rows)
        i32 = partial(imagined, dtype=np.int32)
        layout = WeightLayout(qtype, rows, cols, 32)
        for half in (None, imagined(300, cols, dtype=np.float16)):
            matmul(stream, x, weight, out, half)
            blobs, out_200 = imagined(5, dtype=np.int64), imagined(200, rows)
            grouped_matmul(stream, x, blobs, layout, i32(200), i32(6), out_200, half)
    return list(stream.kernels)


def variant_kernels(limit: int) -> list[Kernel]:
    kernels: list[Kernel] = []
    for qtype in TILED:
        for tokens, cols, rows in PROMPTS[:3]:
            matrix = dense_matrix(qtype, rows, cols, 0)
            plans = [partial(many_plan, matrix, tokens, limit, (tile,)) for tile in MANY_TILES]
            kernels += [kernel_of(unit, ()) for unit in units_that_fit(plans)]
    for qtype in TILED_EXPERTS:
        for cols, rows in filter(lambda shape: fits(qtype, shape[0]), EXPERTS):
            matrix = Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols)))
            plans = [
                partial(grouped_many_plan, matrix, 20480, NUM_EXPERTS, limit, (tile,))
                for tile in GROUPED_TILES
            ]
            kernels += [kernel_of(unit, ()) for unit in units_that_fit(plans)]
    return list(dict.fromkeys(kernels))


def units_that_fit(plans: Sequence[Callable[[], Plan]]) -> Iterator[Unit]:
    for plan in plans:
        with suppress(StrataError):
            yield plan().unit


# -- correctness ----------------------------------------------------------------------------------


def check(bench: Bench, types: Sequence[QuantType]) -> None:
    """Few rows against numpy, many against few, rows alone, and grouped against dense."""
    for qtype in types:
        cols, rows = CHECK_SHAPES[BLOCK[qtype].weights > 64]
        packed = packed_rows(qtype, rows, cols, 3)
        weight = Weight(bench.tensor(packed), qtype, rows, cols)
        x = bench.random.standard_normal((300, cols)).astype(np.float32)
        few, many = dense_result(bench, x, weight, False), dense_result(bench, x, weight, True)
        decoded = dequantize(qtype, packed, cols).astype(np.float64)
        error = np.abs(few - x @ decoded.T) / (np.abs(x) @ np.abs(decoded).T)
        alone = [dense_result(bench, x[i : i + 1], weight, False) for i in (0, 77)]
        grouped = grouped_results(bench, x, packed, qtype)
        bench.record(
            kind="check",
            case=qtype.name,
            worst=float(np.nanmax(error)),
            nan=int(np.isnan(few).sum()),
            many_is_few=bool(np.array_equal(few, many)),
            alone=bool(np.array_equal(np.concatenate(alone), few[[0, 77]])),
            grouped=all(np.array_equal(result, few[:200]) for result in grouped),
        )


def is_right(row: dict[str, Any]) -> bool:
    good = row["many_is_few"] and row["alone"] and row["grouped"]
    return bool(good and row["worst"] < 4e-4 and not row["nan"])


def dense_result(bench: Bench, x: np.ndarray, weight: Weight, is_many: bool) -> np.ndarray:
    out, activations = empty(bench.device, (len(x), weight.rows)), bench.tensor(x)
    bench.stream.fill(out, 0xFF)
    half = rounded(bench, activations) if is_many else None
    matmul(bench.stream, activations, weight, out, half)
    return download(bench.device, bench.stream, out)


def rounded(bench: Bench, x: Tensor) -> Tensor:
    half = empty(bench.device, x.shape, np.float16)
    round_rows(bench.stream, x, half)
    return half


def grouped_results(
    bench: Bench, x: np.ndarray, packed: np.ndarray, qtype: QuantType
) -> list[np.ndarray]:
    """200 pairs of five experts that are all the same matrix: few, then many."""
    blob = bench.tensor(np.pad(packed.ravel(), (32, 0)))
    layout = WeightLayout(qtype, len(packed), x.shape[1], 32)
    blobs = bench.tensor(np.full(5, blob.address, np.int64))
    start = bench.tensor(np.array([0, 1, 1, 9, 80, 200], np.int32))
    row_of, activations = bench.tensor(np.arange(200, dtype=np.int32)), bench.tensor(x)
    results = []
    for half in (None, rounded(bench, activations)):
        out = empty(bench.device, (200, layout.rows))
        bench.stream.fill(out, 0xFF)
        grouped_matmul(bench.stream, activations, blobs, layout, row_of, start, out, half)
        results.append(download(bench.device, bench.stream, out))
    return results


# -- one token ------------------------------------------------------------------------------------


def repeated_rows(bench: Bench, qtype: QuantType, rows: int, cols: int, copies: int) -> Tensor:
    """copies matrices [rows, cols] one after the other, from a few random rows."""
    few = packed_rows(qtype, 64, cols, 1)
    total = copies * rows * few.shape[1]
    data = empty(bench.device, (total,), np.uint8)
    source = bench.tensor(np.tile(few.ravel(), max(1, (16 << 20) // few.size)))
    for at in range(0, total, source.size):
        length = min(source.size, total - at)
        view = Tensor.over(source.buffer, (length,), np.uint8)
        bench.stream.copy(Tensor.over(data.buffer, (length,), np.uint8, at), view)
    bench.stream.synchronize()
    source.buffer.close()
    return data


def weights_of(
    bench: Bench, qtype: QuantType, rows: int, cols: int, copies: int = 0
) -> list[Weight]:
    """Copies of a matrix, by default so many that no cache holds them."""
    nbytes = rows * row_bytes(qtype, cols)
    copies = copies or max(2, -(-FLUSH_BYTES // nbytes))
    data = repeated_rows(bench, qtype, rows, cols, copies).buffer
    views = [Tensor.over(data, (nbytes,), np.uint8, i * nbytes) for i in range(copies)]
    return [Weight(view, qtype, rows, cols) for view in views]


def few(bench: Bench, types: Sequence[QuantType], limit: float) -> None:
    """One token times each matrix of a layer; also two and eight times the largest."""
    for cols, rows in DENSE:
        for qtype in filter(lambda t: fits(t, cols), types):
            weights = weights_of(bench, qtype, rows, cols)
            cases = []
            for tokens in (1, 2, 8) if rows == 12288 else (1,):
                x, out = bench.normal(tokens, cols), empty(bench.device, (tokens, rows))
                launches = [partial(matmul, bench.stream, x, w, out) for w in weights]
                name = f"{qtype.name} K{cols} N{rows} T{tokens}"
                nbytes = sum(w.nbytes for w in weights)
                cases.append(Case(name, record_graph(bench, launches), len(weights), nbytes))
            report(bench, "few", cases, limit)
            weights[0].data.buffer.close()


def experts_few(bench: Bench, types: Sequence[QuantType], limit: float) -> None:
    """Ten experts of one token, other ones in every launch."""
    for cols, rows in EXPERTS:
        for qtype in filter(lambda t: fits(t, cols), types):
            layout = WeightLayout(qtype, rows, cols, 0)
            data = repeated_rows(bench, qtype, rows, cols, NUM_EXPERTS)
            addresses = data.address + layout.nbytes * np.arange(NUM_EXPERTS, dtype=np.int64)
            graph = decode_graph(bench, layout, addresses, 40)
            name = f"{qtype.name} K{cols} N{rows} 10 experts"
            report(bench, "experts few", [Case(name, graph, 40, 400 * layout.nbytes)], limit)
            data.buffer.close()


def decode_graph(bench: Bench, layout: WeightLayout, addresses: np.ndarray, launches: int) -> Graph:
    is_down = layout.cols < layout.rows
    blobs, x = bench.tensor(addresses), bench.normal(TOP_K if is_down else 1, layout.cols)
    row_of = bench.tensor((np.arange(TOP_K) if is_down else np.zeros(TOP_K)).astype(np.int32))
    out = empty(bench.device, (TOP_K, layout.rows))
    return record_graph(
        bench,
        [
            partial(grouped_matmul, bench.stream, x, blobs, layout, row_of, start, out)
            for start in decode_starts(bench, launches)
        ],
    )


def decode_starts(bench: Bench, launches: int) -> Iterator[Tensor]:
    """For each launch the expert_start of ten experts with one pair each."""
    order = bench.random.permutation(NUM_EXPERTS)
    for i in range(launches):
        chosen = np.take(order, range(TOP_K * i, TOP_K * (i + 1)), mode="wrap")
        yield bench.tensor(starts_of(chosen))


def starts_of(experts: np.ndarray) -> np.ndarray:
    counts = np.bincount(experts, minlength=NUM_EXPERTS)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def layer(bench: Bench, limit: float) -> None:
    """All products of a delta-net layer for one token, types as in a pack with IQ3_XXS experts.

    One by one; and as a layer makes them, those of the same activations together.
    """
    layers, nbytes = 4, 0
    alone: list[Callable[[], None]] = []
    together: list[Callable[[], None]] = []
    for _ in range(layers):
        for cols, members in LAYER_LAUNCHES:
            products = []
            x = bench.normal(1, cols)
            for qtype, rows in members:
                weight = weights_of(bench, qtype, rows, cols, 1)[0]
                products.append(Product(weight, empty(bench.device, (1, rows))))
                alone.append(partial(matmul, bench.stream, x, *products[-1]))
                nbytes += weight.nbytes
            together.append(partial(matmul_several, bench.stream, x, products))
        gate_up = WeightLayout(Q.IQ3_XXS, 640, 2560, 0)
        together.append(expert_pair(bench, gate_up))
        alone += [expert_launch(bench, gate_up), expert_launch(bench, gate_up)]
        nbytes += 2 * TOP_K * gate_up.nbytes
        down = WeightLayout(Q.IQ4_NL, 2560, 640, 0)
        alone.append(expert_launch(bench, down))
        together.append(alone[-1])
        nbytes += TOP_K * down.nbytes
    cases = []
    for name, launches in (("alone", alone), ("together", together)):
        graph = record_graph(bench, launches)
        cases.append(Case(f"{len(launches) // layers} launches {name}", graph, layers, nbytes))
    report(bench, "layer", cases, limit)


def expert_pair(bench: Bench, layout: WeightLayout) -> Callable[[], None]:
    """Gate and up of ten experts."""
    experts = []
    for _ in range(2):
        blobs = expert_blobs(bench, layout)
        experts.append(Experts(blobs, layout, empty(bench.device, (TOP_K, layout.rows))))
    x, row_of = bench.normal(1, layout.cols), bench.tensor(np.zeros(TOP_K, np.int32))
    start = bench.tensor(starts_of(np.arange(TOP_K)))
    return partial(grouped_matmul_pair, bench.stream, x, experts[0], experts[1], row_of, start)


def expert_blobs(bench: Bench, layout: WeightLayout) -> Tensor:
    """Addresses of experts that share ten matrices; the bench keeps these."""
    data = repeated_rows(bench, layout.qtype, layout.rows, layout.cols, TOP_K)
    bench.kept.append(data)  # nothing else does: launches know them by their addresses alone
    place = np.arange(NUM_EXPERTS, dtype=np.int64) % TOP_K
    return bench.tensor(data.address + layout.nbytes * place)


def expert_launch(bench: Bench, layout: WeightLayout) -> Callable[[], None]:
    blobs = expert_blobs(bench, layout)
    x, row_of = bench.normal(TOP_K, layout.cols), bench.tensor(np.arange(TOP_K, dtype=np.int32))
    start = bench.tensor(starts_of(np.arange(TOP_K)))
    out = empty(bench.device, (TOP_K, layout.rows))
    return partial(grouped_matmul, bench.stream, x, blobs, layout, row_of, start, out)


def rounding(bench: Bench, limit: float) -> None:
    x = empty(bench.device, (4096, 10240))
    bench.stream.fill(x, 0)
    half = empty(bench.device, (4096, 10240), np.float16)
    graph = record_graph(bench, [partial(round_rows, bench.stream, x, half)] * 4)
    report(bench, "round_rows", [Case("4096 x 10240", graph, 4, 4 * 6 * x.size)], limit)


def host(bench: Bench, types: Sequence[QuantType]) -> None:
    """Ten experts of one token out of mapped host memory, against one large copy from there."""
    link = bench.device.allocate_pinned(1 << 30)
    rate = copy_rate(bench, link, 1 << 30)
    assert link.host_bytes is not None
    for cols, rows in EXPERTS:
        for qtype in filter(lambda t: fits(t, cols), types):
            layout = WeightLayout(qtype, rows, cols, 0)
            few = packed_rows(qtype, 64, cols, 1).ravel()
            total = NUM_EXPERTS * layout.nbytes
            link.host_bytes[:total] = np.tile(few, -(-total // few.size))[:total]
            addresses = link.address + layout.nbytes * np.arange(NUM_EXPERTS, dtype=np.int64)
            graph = decode_graph(bench, layout, addresses, 20)
            name = f"{qtype.name} K{cols} N{rows} 10 experts in host memory"
            report(bench, "host", [Case(name, graph, 20, 200 * layout.nbytes)], rate)


# -- prompts --------------------------------------------------------------------------------------


def many(bench: Bench, types: Sequence[QuantType], limit: float, tiles: Sequence[Tile]) -> None:
    """Prompts times dense matrices; with tiles, each of those instead of the usual one."""
    for tokens, cols, rows in PROMPTS[:3] if tiles else PROMPTS:
        x, out = bench.normal(tokens, cols), empty(bench.device, (tokens, rows))
        cases: list[Case] = []
        half = rounded(bench, x)
        for qtype in filter(lambda t: fits(t, cols), types):
            weight = weights_of(bench, qtype, rows, cols, 1)[0]
            for tile in tiles or (None,):
                launch = partial(many_launch, bench, x, half, weight, out, tile)
                name = f"{qtype.name} T{tokens} K{cols} N{rows} {tuple(tile) if tile else ''}"
                add_case(bench, cases, "many", name, launch, 2 * tokens * cols * rows)
        report(bench, "many", cases, limit)


def add_case(
    bench: Bench, cases: list[Case], kind: str, name: str, launch: Callable[[], None], flops: int
) -> None:
    """A tile that does not fit is a result too."""
    try:
        cases.append(Case(name, record_graph(bench, [launch] * 2), 2, flops=2.0 * flops))
    except StrataError as error:
        bench.record(kind=kind, case=name, error=error.message[:200])


def many_launch(
    bench: Bench, x: Tensor, half: Tensor, weight: Weight, out: Tensor, tile: Tile | None
) -> None:
    if tile is None:
        matmul(bench.stream, x, weight, out, half)
        return
    matrix = dense_matrix(weight.qtype, weight.rows, weight.cols, weight.data.address)
    plan = many_plan(matrix, x.shape[0], bench.stream.shared_bytes, (tile,))
    numbers = (int(weight.qtype), x.shape[0], weight.rows, weight.cols)
    launch_plan(bench, plan, (), x, half, weight.data, out, *numbers)


def launch_plan(
    bench: Bench, plan: Plan, defines: tuple[str, ...], *args: Any, early: bool = False
) -> None:
    """Launches a plan that a wrapper would not have chosen."""
    launch = plan.launch(1, 1, early=early)
    bench.stream.launch(kernel_of(plan.unit, defines), launch, *args)


@cache
def kernel_of(unit: Unit, defines: tuple[str, ...]) -> Kernel:
    """Always the same one for a unit: devices know kernels by identity."""
    defines = unit.defines + defines
    return Kernel(unit.function, nothing, nothing, unit.source, unit.function, defines)


def experts_many(
    bench: Bench, types: Sequence[QuantType], limit: float, tiles: Sequence[Tile]
) -> None:
    """All pairs of prompts with 40 and 80 tokens per expert on average."""
    for tokens in (2048, 4096):
        for cols, rows in EXPERTS:
            experts_prompt(bench, tokens, cols, rows, types, limit, tiles)


def experts_prompt(
    bench: Bench,
    tokens: int,
    cols: int,
    rows: int,
    types: Sequence[QuantType],
    limit: float,
    tiles: Sequence[Tile],
) -> None:
    pairs, is_down = tokens * TOP_K, cols < rows
    x, out = bench.normal(pairs if is_down else tokens, cols), empty(bench.device, (pairs, rows))
    half, (row_of, start) = rounded(bench, x), routing(bench, tokens, is_down)
    cases: list[Case] = []
    kept = []
    for qtype in filter(lambda t: fits(t, cols), types):
        layout = WeightLayout(qtype, rows, cols, 0)
        kept.append(repeated_rows(bench, qtype, rows, cols, NUM_EXPERTS))
        place = layout.nbytes * np.arange(NUM_EXPERTS, dtype=np.int64)
        blobs = bench.tensor(kept[-1].address + place)
        for tile in tiles or (None,):
            launch = partial(
                experts_launch, bench, x, half, blobs, layout, row_of, start, out, tile
            )
            name = f"{qtype.name} T{tokens} K{cols} N{rows} {tuple(tile) if tile else ''}"
            add_case(bench, cases, "experts many", name, launch, 2 * pairs * cols * rows)
    report(bench, "experts many", cases, limit)
    for data in (*kept, x, out, half):
        data.buffer.close()


def routing(bench: Bench, tokens: int, is_down: bool) -> tuple[Tensor, Tensor]:
    """Random experts, ten different ones per token: row_of and expert_start."""
    return routed_by(bench, bench.random.random((tokens, NUM_EXPERTS)), is_down)


def routed_by(bench: Bench, scores: np.ndarray, is_down: bool) -> tuple[Tensor, Tensor]:
    """The ten experts of the largest scores, [tokens, NUM_EXPERTS]."""
    chosen = np.argpartition(-scores, TOP_K, axis=1)[:, :TOP_K].ravel()
    order = np.argsort(chosen, kind="stable")
    row_of = np.arange(order.size) if is_down else order // TOP_K
    return bench.tensor(row_of.astype(np.int32)), bench.tensor(starts_of(chosen))


def experts_launch(
    bench: Bench,
    x: Tensor,
    half: Tensor,
    blobs: Tensor,
    layout: WeightLayout,
    row_of: Tensor,
    start: Tensor,
    out: Tensor,
    tile: Tile | None,
) -> None:
    if tile is None:
        grouped_matmul(bench.stream, x, blobs, layout, row_of, start, out, half)
        return
    align = alignment(row_bytes(layout.qtype, layout.cols))
    matrix = Matrix(layout.qtype, layout.rows, layout.cols, align)
    limit = bench.stream.shared_bytes
    plan = grouped_many_plan(matrix, row_of.shape[0], NUM_EXPERTS, limit, (tile,))
    numbers = (int(layout.qtype), layout.rows, layout.cols, 0)
    launch_plan(bench, plan, (), x, half, blobs, row_of, start, out, *numbers)


def profile(bench: Bench) -> None:
    """One launch of some prompt products, for a profiler to look at."""
    tokens, cols, rows = PROMPTS[0]
    x, out = bench.normal(tokens, cols), empty(bench.device, (tokens, rows))
    half = rounded(bench, x)
    for qtype in TILED:
        weight = weights_of(bench, qtype, rows, cols, 1)[0]
        many_launch(bench, x, half, weight, out, None)
    cols, rows = EXPERTS[0]
    out, (row_of, start) = (
        empty(bench.device, (tokens * TOP_K, rows)),
        routing(bench, tokens, False),
    )
    layout = WeightLayout(Q.IQ3_XXS, rows, cols, 0)
    data = repeated_rows(bench, layout.qtype, rows, cols, NUM_EXPERTS)
    blobs = bench.tensor(data.address + layout.nbytes * np.arange(NUM_EXPERTS, dtype=np.int64))
    experts_launch(bench, x, half, blobs, layout, row_of, start, out, None)
    bench.stream.synchronize()


# -- ways compared --------------------------------------------------------------------------------


def plan_of(matrix: Matrix, tokens: int, gpu: Gpu, way: Way, experts: int = 0) -> Plan | None:
    """A way's plan; None where it does not fit."""
    segments = TOP_K if experts else blocks(tokens, FEW_COLUMNS)
    with suppress(StrataError):
        return few_plan((matrix,), tokens, segments, gpu, experts, way)
    return None


def expert_matrix(qtype: QuantType, cols: int, rows: int) -> Matrix:
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols)))


def compared_kernels(gpu: Gpu) -> list[Kernel]:
    plans = [
        plan_of(dense_matrix(qtype, rows, cols, 0), tokens, gpu, way)
        for qtype, (cols, rows), tokens in COMPARED
        for way in WAYS
    ]
    plans += [
        plan_of(expert_matrix(qtype, *shape), TOP_K, gpu, way, NUM_EXPERTS)
        for qtype, shape in COMPARED_EXPERTS
        for way in (*WAYS, *HOST_WAYS)
    ]
    return list(dict.fromkeys(kernel_of(plan.unit, ()) for plan in plans if plan))


def compare(bench: Bench, limit: float) -> None:
    """Each way of the few-row function in turns, and whether its results are the usual bits."""
    for qtype, (cols, rows), tokens in COMPARED:
        weights = weights_of(bench, qtype, rows, cols)
        x = bench.normal(tokens, cols)
        matrix = dense_matrix(qtype, rows, cols, weights[0].data.address)
        shape, numbers = (tokens, rows), (int(qtype), tokens, rows, cols)
        name, nbytes = f"{qtype.name} K{cols} N{rows} T{tokens}", sum(w.nbytes for w in weights)
        plans = [plan_of(matrix, tokens, gpu_of(bench.stream), way) for way in WAYS]
        operands: list[tuple[Any, ...]] = [(x, w.data) for w in weights]
        compare_plans(bench, "compare", name, WAYS, plans, operands, shape, numbers, nbytes, limit)
        weights[0].data.buffer.close()


def compare_experts(
    bench: Bench, data: Any, address: int, kind: str, limit: float, ways: Sequence[Way] = WAYS
) -> None:
    """Ten experts of one token in device or in mapped host memory."""
    for qtype, (cols, rows) in COMPARED_EXPERTS:
        layout = WeightLayout(qtype, rows, cols, 0)
        if data is None:
            tensor = repeated_rows(bench, qtype, rows, cols, NUM_EXPERTS)
            address = tensor.address
        else:
            packed = packed_rows(qtype, 64, cols, 1).ravel()
            total = NUM_EXPERTS * layout.nbytes
            data[:total] = np.tile(packed, -(-total // packed.size))[:total]
        blobs = bench.tensor(address + layout.nbytes * np.arange(NUM_EXPERTS, dtype=np.int64))
        is_down = cols < rows
        x = bench.normal(TOP_K if is_down else 1, cols)
        row_of = bench.tensor((np.arange(TOP_K) if is_down else np.zeros(TOP_K)).astype(np.int32))
        operands = [(x, blobs, row_of, start) for start in decode_starts(bench, 20)]
        plans = [
            plan_of(
                expert_matrix(qtype, cols, rows),
                *(x.shape[0], gpu_of(bench.stream), way, NUM_EXPERTS),
            )
            for way in ways
        ]
        name, nbytes = f"{qtype.name} K{cols} N{rows} 10 experts", 200 * layout.nbytes
        numbers = (int(qtype), rows, cols, 0)
        compare_plans(
            bench, kind, name, ways, plans, operands, (TOP_K, rows), numbers, nbytes, limit
        )
        if data is None:
            tensor.buffer.close()


def compare_plans(
    bench: Bench,
    kind: str,
    name: str,
    ways: Sequence[Way],
    plans: Sequence[Plan | None],
    operands: Sequence[tuple[Any, ...]],
    shape: tuple[int, ...],
    numbers: tuple[int, ...],
    nbytes: int,
    limit: float,
) -> None:
    """Replays each plan over the operands of all launches; the first plan's bits are right."""
    cases: list[Case] = []
    usual: np.ndarray | None = None
    for way, plan in zip(ways, plans, strict=True):
        if plan is None:
            continue
        out = empty(bench.device, shape)
        bench.stream.fill(out, 0xFF)
        launches = [
            partial(launch_plan, bench, plan, (), *each, out, *numbers, early=True)
            for each in operands
        ]
        launches[0]()
        result = download(bench.device, bench.stream, out)
        usual = result if usual is None else usual
        same = "same bits" if np.array_equal(result, usual) else "OTHER BITS"
        told = f"{' '.join(map(str, way))} grid {plan.grid} {plan.shared_bytes} bytes {same}"
        cases.append(Case(f"{name}: {told}", record_graph(bench, launches), len(launches), nbytes))
    report(bench, kind, cases, limit)


def compare_host(bench: Bench) -> None:
    """As compare_experts, out of mapped host memory."""
    link = bench.device.allocate_pinned(1 << 30)
    rate = copy_rate(bench, link, 1 << 30)
    compare_experts(bench, link.host_bytes, link.address, "compare host", rate, HOST_WAYS)


def run_compare(bench: Bench, limit: float) -> None:
    compare(bench, limit)
    compare_experts(bench, None, 0, "compare experts", limit)


def parse_types(text: str) -> tuple[QuantType, ...]:
    named = {"published": PUBLISHED, "all": tuple(QuantType)}
    return named.get(text) or tuple(QuantType[name] for name in text.split(","))


def run(bench: Bench, parts: Sequence[str], types: Sequence[QuantType]) -> None:
    prepare(bench, parts, types)
    if "check" in parts:
        check(bench, types)
    limit = read_rate(bench) if {"few", "layer", "variants", "compare"} & set(parts) else 1.0
    if "few" in parts:
        few(bench, types, limit)
        experts_few(bench, types, limit)
    if "layer" in parts:
        layer(bench, limit)
        rounding(bench, limit)
    others = {
        "host": partial(host, bench, (Q.IQ3_XXS, Q.IQ4_NL, Q.Q8_0)),
        "compare": partial(run_compare, bench, limit),
        "compare-host": partial(compare_host, bench),
        "profile": partial(profile, bench),
    }
    for part in filter(others.__contains__, parts):
        others[part]()
    if not {"many", "grouped", "variants"} & set(parts):
        return
    rate = torch_rate(bench, ((8192, 8192, 8192), *PROMPTS))
    if "many" in parts:
        many(bench, FOR_PROMPTS, rate, ())
    if "grouped" in parts:
        experts_many(bench, FOR_PROMPTS, rate, ())
    if "variants" in parts:
        many(bench, TILED, rate, MANY_TILES)
        experts_many(bench, TILED_EXPERTS, rate, GROUPED_TILES)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["check", "few", "layer", "many", "grouped"])
    parser.add_argument("--types", default=PUBLISHED, type=parse_types)
    parser.add_argument("--json", default="cuda_matmul.json")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    with open_device("cuda:0") as device:
        bench = Bench(device, device.stream("bench"))
        try:
            run(bench, options.parts, options.types)
        finally:
            bench.record(kind="time", case="whole run", seconds=time.perf_counter() - started)
            Path(options.json).write_text(json.dumps(bench.rows, indent=1))
    wrong = [row for row in bench.rows if row["kind"] == "check" and not is_right(row)]
    for row in wrong:
        print("WRONG:", row)
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
