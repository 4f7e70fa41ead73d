"""Everything but the products on a GPU: right, the same bits however it is cut, and how fast.

    PYTHONPATH=. python benchmarks/cuda_kernels.py [check time variants once] [--only WORD]
        [--json FILE]

check runs the kernels' tests on the GPU; time measures every wrapper at the full model's extents
for 1 to 4,096 tokens; variants measures the delta rule's other block shapes; once launches every
kernel for 4,096 tokens a single time, for a profiler to look at (ncu --clock-control none). Shares
are of the bandwidth of a copy inside the device's memory, measured in the same run (bytes read and
written). Launches are replayed as a graph; the inputs of one token stay in the L2 cache, as a
decoder's do, except states, of which every layer has its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import DTypeLike

from benchmarks.arguments import run_benchmark
from benchmarks.timing import Clock, Row
from strata_cli.engine.device import cuda_kernels, open_device
from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.device.transfer import upload
from strata_cli.engine.kernels import (
    attention,
    cache_rows,
    gdn,
    hyper,
    indexer,
    moe,
    ngram,
    rope,
    routing,
)
from strata_cli.engine.kernels.delta_rule import DeltaRuleShape, delta_rule

# Extents of the full model.
STREAMS, HIDDEN, RANK, EPS = 4, 2560, 320, 1e-6
KEY_HEADS, VALUE_HEADS, GDN_DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * GDN_DIM
HEADS, KV_HEADS, HEAD_DIM, ROTARY = 24, 2, 256, 64
INDEX_HEADS, INDEX_DIM, RATIO, BUDGET = 4, 128, 4, 512
EXPERTS, TOP_K, WIDTH = 512, 10, 640
VOCAB = 248_320
GDN_LAYERS = 36

TOKENS = (1, 4096)

# Microseconds expected of (kernel, tokens) before the run; cuda_kernels.md says why.
EXPECTED = {
    ("smallest launch", 1): 1.3,
    ("stream_norm", 1): 2.1,
    ("stream_mix", 1): 1.4,
    ("stream_write", 1): 1.8,
    ("stream_write_norm", 1): 2.2,
    ("causal_conv_silu", 1): 1.3,
    ("delta_rule", 1): 5.0,
    ("gated_norm", 1): 1.2,
    ("head_norm_rope", 1): 2.0,
    ("route_in_order", 1): 3.5,
    ("swiglu", 1): 1.0,
    ("combine", 1): 2.1,
    ("select_blocks at 8192", 1): 9.0,
    ("select_blocks at 262144", 1): 60.0,
    ("attend at 2048", 1): 7.0,
    ("attend at 8192", 1): 11.0,
    ("attend at 262144", 1): 30.0,
    ("store_kv", 1): 1.4,
    ("ngram_gate", 1): 3.0,
    ("ngram_conv", 1): 6.0,
    ("ngram_gate", 4096): 160.0,
    ("ngram_conv", 4096): 250.0,
    ("select_blocks at 32768", 4096): 1800.0,
    ("stream_norm", 4096): 95.0,
    ("stream_mix", 4096): 90.0,
    ("stream_write", 4096): 105.0,
    ("stream_write_norm", 4096): 137.0,
    ("causal_conv_silu", 4096): 92.0,
    ("delta_rule", 4096): 850.0,
    ("gated_norm", 4096): 71.0,
    ("head_norm_rope", 4096): 65.0,
    ("route", 4096): 13.0,
    ("order_by_expert", 4096): 15.0,
    ("swiglu", 4096): 85.0,
    ("combine", 4096): 140.0,
    ("select_blocks at 4096", 4096): 90.0,
    ("attend at 8192", 64): 70.0,
    ("attend at 32768", 64): 260.0,
    ("attend at 32768", 4096): 12000.0,
    ("attend at 4096", 4096): 900.0,
}
TEST_FILES = tuple(
    f"tests/kernels/test_{name}.py"
    for name in ("hyper", "gdn", "rope", "attention", "indexer", "moe", "ngram")
)


@dataclass
class Bench:
    """Makes tensors on the device and gives them back after each group of measurements."""

    clock: Clock | Once
    only: str
    random: np.random.Generator

    def __post_init__(self) -> None:
        self._made: list[Tensor] = []

    def empty(self, *shape: int, dtype: DTypeLike = np.float32) -> Tensor:
        tensor = empty(self.clock.device, shape, dtype)
        self._made.append(tensor)
        return tensor

    def put(self, values: np.ndarray[Any, Any]) -> Tensor:
        tensor = self.empty(*values.shape, dtype=values.dtype)
        upload(self.clock.device, self.clock.stream, tensor, values)
        return tensor

    def normal(self, *shape: int, scale: float = 1.0, dtype: DTypeLike = np.float32) -> Tensor:
        """Normal values; large tensors repeat a million of them."""
        size = int(np.prod(shape))
        some = self.random.standard_normal(min(size, 1_000_003), np.float32) * np.float32(scale)
        return self.put(np.resize(some.astype(dtype), size).reshape(shape))

    def measure(
        self, name: str, tokens: int, moved_bytes: int, wrapper: Callable[..., None], *args: Any
    ) -> None:
        """Time one wrapper called with these arguments behind the stream."""
        self.measure_each(name, tokens, moved_bytes, [lambda: wrapper(self.clock.stream, *args)])

    def measure_each(
        self, name: str, tokens: int, moved_bytes: int, calls: list[Callable[[], None]]
    ) -> None:
        """Time calls that take turns."""
        self.clock.measure(name, tokens, moved_bytes, calls)

    def free(self) -> None:
        self.clock.stream.synchronize()
        for tensor in self._made:
            tensor.buffer.close()
        self._made.clear()


def streams(bench: Bench, tokens: int) -> None:
    x, weight = bench.normal(tokens, STREAMS, HIDDEN), bench.normal(STREAMS * HIDDEN)
    wide, normed = (bench.normal(tokens, STREAMS * HIDDEN) for _ in range(2))
    low, out = bench.normal(tokens, RANK), bench.normal(tokens, HIDDEN)
    inject = bench.normal(tokens, STREAMS)
    all_streams = 4 * tokens * STREAMS * HIDDEN
    one = all_streams // STREAMS
    bench.measure("stream_norm", tokens, 2 * all_streams, hyper.stream_norm, x, weight, EPS, normed)
    bench.measure("lowrank_silu", tokens, 8 * tokens * RANK, hyper.lowrank_silu, low, STREAMS)
    bench.measure("stream_mix", tokens, 2 * all_streams + one, hyper.stream_mix, wide, normed, out)
    bench.measure("stream_write", tokens, 2 * all_streams + one, hyper.stream_write, x, out, inject)
    bench.measure(
        "stream_write_norm",
        tokens,
        3 * all_streams + one,
        hyper.stream_write_norm,
        x,
        out,
        inject,
        weight,
        EPS,
        normed,
    )


def delta_net(bench: Bench, tokens: int) -> None:
    u, c = bench.normal(tokens, CHANNELS), bench.normal(tokens, CHANNELS)
    history, taps = bench.normal(TAPS - 1, CHANNELS), bench.normal(CHANNELS, TAPS)
    bench.measure(
        "causal_conv_silu", tokens, 8 * tokens * CHANNELS, gdn.causal_conv_silu, u, history, taps, c
    )
    bench.measure_each("delta_rule", tokens, delta_bytes(tokens), delta_calls(bench, tokens))
    o, z = (bench.normal(tokens, VALUE_HEADS * GDN_DIM) for _ in range(2))
    weight = bench.normal(GDN_DIM)
    bench.measure(
        "gated_norm",
        tokens,
        12 * tokens * VALUE_HEADS * GDN_DIM,
        gdn.gated_norm,
        o,
        z,
        weight,
        EPS,
        bench.empty(*o.shape),
    )


def delta_bytes(tokens: int) -> int:
    """Inputs and output of every token; the state once."""
    state = 8 * VALUE_HEADS * GDN_DIM**2
    return state + 4 * tokens * (CHANNELS + VALUE_HEADS * (GDN_DIM + 2))


def delta_calls(bench: Bench, tokens: int) -> list[Callable[[], None]]:
    """One call per layer, each with a state of its own; a single one where tokens are many."""
    stream = bench.clock.stream
    c = bench.normal(tokens, CHANNELS)
    alpha, beta = (bench.normal(tokens, VALUE_HEADS) for _ in range(2))
    a, dt = bench.put(-np.full(VALUE_HEADS, 0.1, np.float32)), bench.normal(VALUE_HEADS)
    out = bench.empty(tokens, VALUE_HEADS * GDN_DIM)
    layers = GDN_LAYERS if tokens < 64 else 1

    def call(state: Tensor) -> Callable[[], None]:
        return lambda: delta_rule(stream, c, alpha, beta, a, dt, state, out, KEY_HEADS, EPS)

    shape = (VALUE_HEADS, GDN_DIM, GDN_DIM)
    return [call(bench.normal(*shape, scale=0.1)) for _ in range(layers)]


@dataclass
class Cache:
    """What attention reads: a K/V cache whose next tokens stand at the end of the context."""

    q: Tensor
    gate: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    queries: Tensor
    pooled: Tensor
    scores: Tensor
    selected: Tensor
    num_selected: Tensor
    sums: Tensor
    out: Tensor

    def attended(self, ratio: int) -> tuple[Any, ...]:
        """Arguments of attend."""
        return (
            self.q, self.gate, self.keys, self.values, self.positions, self.selected,
            self.num_selected, ratio, self.sums, self.out,
        )  # fmt: skip


def cache(bench: Bench, tokens: int, context: int) -> Cache:
    positions = np.arange(context - tokens, context, dtype=np.int32)
    blocks = context // RATIO
    return Cache(
        q=bench.normal(tokens, HEADS, HEAD_DIM),
        gate=bench.normal(tokens, HEADS, 2 * HEAD_DIM),
        keys=bench.normal(context, KV_HEADS * HEAD_DIM, dtype=np.float16),
        values=bench.normal(context, KV_HEADS * HEAD_DIM, dtype=np.float16),
        positions=bench.put(positions),
        queries=bench.normal(tokens, INDEX_HEADS, INDEX_DIM),
        pooled=bench.normal(blocks, INDEX_DIM),
        scores=bench.empty(max(1, min(tokens, (1 << 22) // max(blocks, 1))), blocks),
        selected=bench.empty(tokens, BUDGET, dtype=np.int32),
        num_selected=bench.empty(tokens, dtype=np.int32),
        sums=bench.empty(1 << 22),
        out=bench.empty(tokens, HEADS * HEAD_DIM),
    )


def seen_positions(tokens: int, context: int) -> int:
    """Positions that all tokens together attend to."""
    total = 0
    for position in range(context - tokens, context):
        complete = (position + 1) // RATIO
        tail = position + 1 - complete * RATIO
        total += min(complete, BUDGET) * RATIO + tail
    return total


def sparse_attention(bench: Bench, tokens: int, context: int) -> None:
    it = cache(bench, tokens, context)
    scored = sum(
        (p + 1) // RATIO for p in range(context - tokens, context) if (p + 1) // RATIO > BUDGET
    )
    bench.measure(
        f"select_blocks at {context}",
        tokens,
        4 * INDEX_DIM * scored,
        indexer.select_blocks,
        it.queries,
        it.pooled,
        it.positions,
        RATIO,
        it.scores,
        it.selected,
        it.num_selected,
    )
    seen = 2 * 2 * KV_HEADS * HEAD_DIM * seen_positions(tokens, context)
    bench.measure(f"attend at {context}", tokens, seen, attention.attend, *it.attended(RATIO))


def dense_attention(bench: Bench, tokens: int, context: int) -> None:
    it = cache(bench, tokens, context)
    seen = sum(range(context - tokens + 1, context + 1))
    bench.measure(
        f"attend all at {context}",
        tokens,
        2 * 2 * KV_HEADS * HEAD_DIM * seen,
        attention.attend,
        *it.attended(0),
    )


def heads(bench: Bench, tokens: int) -> None:
    table = bench.put(rope.rope_table(4096, ROTARY, 1e7))
    positions = bench.put(np.arange(tokens, dtype=np.int32) % 4096)
    raw, q = bench.normal(tokens, HEADS, 2 * HEAD_DIM), bench.empty(tokens, HEADS, HEAD_DIM)
    k = bench.normal(tokens, KV_HEADS * HEAD_DIM)
    keys, values = (bench.empty(4096, KV_HEADS * HEAD_DIM, dtype=np.float16) for _ in range(2))
    weight, index_weight = bench.normal(HEAD_DIM), bench.normal(INDEX_DIM)
    index_keys, pooled = bench.normal(4096, INDEX_DIM), bench.empty(1024, INDEX_DIM)
    bench.measure(
        "head_norm_rope",
        tokens,
        8 * tokens * HEADS * HEAD_DIM,
        rope.head_norm_rope,
        raw,
        weight,
        table,
        positions,
        EPS,
        q,
    )
    bench.measure(
        "store_kv",
        tokens,
        12 * tokens * KV_HEADS * HEAD_DIM,
        cache_rows.store_kv,
        k.reshape(tokens, KV_HEADS, HEAD_DIM),
        k,
        positions,
        keys,
        values,
    )
    bench.measure(
        "pool_index_blocks",
        tokens,
        5 * tokens * INDEX_DIM,
        indexer.pool_index_blocks,
        index_keys,
        positions,
        RATIO,
        index_weight,
        table,
        EPS,
        pooled,
    )


def experts(bench: Bench, tokens: int) -> None:
    pairs = tokens * TOP_K
    logits = bench.normal(tokens, EXPERTS, scale=2.0)
    ids, weights = bench.empty(tokens, TOP_K, dtype=np.int32), bench.empty(tokens, TOP_K)
    start, row_of = bench.empty(EXPERTS + 1, dtype=np.int32), bench.empty(pairs, dtype=np.int32)
    pair_of = bench.empty(tokens, TOP_K, dtype=np.int32)
    bench.measure(
        "route", tokens, 4 * tokens * EXPERTS + 8 * pairs, routing.route, logits, ids, weights
    )
    bench.measure(
        "order_by_expert", tokens, 12 * pairs, routing.order_by_expert, ids, start, row_of, pair_of
    )
    bench.measure(
        "route_in_order",
        tokens,
        4 * tokens * EXPERTS + 20 * pairs,
        routing.route_in_order,
        logits,
        ids,
        weights,
        start,
        row_of,
        pair_of,
    )
    gate, up = bench.normal(pairs, WIDTH), bench.normal(pairs, WIDTH)
    bench.measure(
        "swiglu", tokens, 12 * pairs * WIDTH, moe.swiglu, gate, up, bench.empty(pairs, WIDTH)
    )
    expert_out, shared = bench.normal(pairs, HIDDEN), bench.normal(tokens, HIDDEN)
    logit, out = bench.normal(tokens, 1), bench.empty(tokens, HIDDEN)
    bench.measure(
        "combine",
        tokens,
        4 * (pairs + 2 * tokens) * HIDDEN,
        moe.combine,
        expert_out,
        pair_of,
        weights,
        shared,
        logit,
        out,
    )


def n_grams(bench: Bench, tokens: int) -> None:
    wide = STREAMS * HIDDEN
    ids = bench.put(np.arange(tokens, dtype=np.int32) * 7919 % VOCAB)
    history = bench.put(np.zeros(2, np.int32))
    multipliers = bench.put(np.array([23703573157769, 20109073645365, 8052911324071], np.int64))
    sizes = bench.put(np.full(16, 20_000_003, np.int64))
    offsets, rows = bench.put(np.arange(16) * 20_000_003), bench.empty(tokens, 16, dtype=np.int64)
    bench.measure(
        "ngram_rows",
        tokens,
        (4 + 128) * tokens,
        ngram.ngram_rows,
        ids,
        history,
        multipliers,
        offsets,
        sizes,
        248_044,
        rows,
    )
    key, value = bench.normal(tokens, wide), bench.normal(tokens, HIDDEN)
    x, gated = bench.normal(tokens, STREAMS, HIDDEN), bench.empty(tokens, wide)
    weights = [bench.normal(wide) for _ in range(3)]
    bench.measure(
        "ngram_gate",
        tokens,
        4 * tokens * (3 * wide + HIDDEN),
        ngram.ngram_gate,
        key,
        value,
        x,
        weights[0],
        weights[1],
        EPS,
        gated,
    )
    past, taps = bench.normal(9, wide), bench.normal(wide, TAPS)
    bench.measure(
        "ngram_conv",
        tokens,
        12 * tokens * wide,
        ngram.ngram_conv,
        gated,
        weights[2],
        past,
        taps,
        3,
        EPS,
        x,
    )


def empty_launches(bench: Bench) -> None:
    """What a launch costs that does next to nothing, in a graph of many."""
    low = bench.normal(1, 32)
    bench.measure("smallest launch", 1, 256, hyper.lowrank_silu, low, STREAMS)


def cases() -> Iterator[tuple[str, Callable[[Bench], None]]]:
    """Names and measurements, each with memory of its own."""
    yield "launch", empty_launches
    by_tokens = (streams, delta_net, heads, experts, n_grams)
    for tokens in TOKENS:
        for group in by_tokens:
            yield group.__name__, partial(group, tokens=tokens)
    for tokens, context in (
        (1, 200), (1, 2048), (1, 8192), (1, 262_144), (8, 8192), (64, 8192), (64, 32_768),
        (4096, 4096), (4096, 32_768),
    ):  # fmt: skip
        yield "attention", partial(sparse_attention, tokens=tokens, context=context)
    for tokens, context in ((1, 4096), (1, 65_536), (1024, 1024)):
        yield "attention", partial(dense_attention, tokens=tokens, context=context)


def delta_variants(bench: Bench) -> None:
    """Block shapes of the delta rule."""
    for tokens in (1, 2048):
        for warps in (2, 4, 8):
            shape = DeltaRuleShape(8, warps, tokens > 1)
            name, nbytes = f"delta_rule {warps} warps", delta_bytes(tokens)
            with mock.patch.object(DeltaRuleShape, "of", return_value=shape):
                bench.measure_each(name, tokens, nbytes, delta_calls(bench, tokens))
            bench.free()


def check() -> int:
    import pytest

    return int(pytest.main(["-q", "-m", "gpu", "--maxfail=20", *TEST_FILES]))


class Once:
    """Stands in for a clock: calls everything once and times nothing."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device = device
        self.stream = stream

    def measure(
        self, _name: str, _tokens: int, _moved_bytes: int, calls: Sequence[Callable[[], None]]
    ) -> None:
        calls[0]()
        self.stream.synchronize()


def once(device: Device, only: str) -> None:
    """Launch what reads a prompt of 4,096 tokens."""
    bench = Bench(Once(device, device.stream("once")), only, np.random.default_rng(0))
    for group in (streams, delta_net, heads, experts, n_grams):
        if only in group.__name__:
            group(bench, 4096)
            bench.free()
    if only in "attention":
        sparse_attention(bench, 4096, 4096)
        bench.free()


def against_expected(rows: list[Row]) -> Iterator[str]:
    """Lines of what was expected, beside what was measured."""
    for row in rows:
        expected = EXPECTED.get((row.name, row.tokens))
        if expected is not None:
            ratio = row.us / expected
            yield f"{row.name:28s} T {row.tokens:5d} {expected:8.1f} {row.us:9.2f} us {ratio:6.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", default=["check", "time", "variants"])
    parser.add_argument("--only", default="", help="groups or kernels whose name contains this")
    parser.add_argument(
        "--shared-percent", type=int, help="of a multiprocessor's memory that is shared memory"
    )
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.shared_percent is not None:
        cuda_kernels.SHARED_MEMORY_PERCENT = options.shared_percent
    status = check() if "check" in options.what else 0
    with open_device("cuda:0") as device:
        if "once" in options.what:
            once(device, options.only)
            return status
        clock = Clock(device, device.stream("bench"))
        print(f"copy inside device memory: {clock.copy_gbps:.0f} GB/s", flush=True)
        bench = Bench(clock, options.only, np.random.default_rng(0))
        if "time" in options.what:
            for name, case in cases():
                if options.only in name:
                    case(bench)
                    bench.free()
        if "variants" in options.what:
            delta_variants(bench)
        print("kernel, tokens, expected, measured, measured / expected")
        print("\n".join(against_expected(clock.rows)))
        result = {
            "copy_gbps": clock.copy_gbps,
            "tests_exit_status": status,
            "rows": [row.as_dict() for row in clock.rows],
        }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return status


if __name__ == "__main__":
    run_benchmark(main)
