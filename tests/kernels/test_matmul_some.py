"""Some rows, and experts with some pairs each: the bits of product after product."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.kernels.float_pair import can_split_pair, route_by_slices
from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.grouped_matmul import grouped_matmul
from strata_cli.engine.kernels.hyper import stream_mix
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.matmul_several import Experts, Product, grouped_matmul_pair
from strata_cli.engine.kernels.matmul_some import (
    ExpertMlp,
    can_make_some,
    can_mix_some,
    can_take_some,
    experts_of_some,
    matmul_mix_some,
    matmul_some,
    matmul_swiglu_some,
    some_plan,
)
from strata_cli.engine.kernels.moe import swiglu
from strata_cli.engine.kernels.products import Matrix, alignment
from strata_cli.engine.kernels.routing import route
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from strata_cli.errors import DeviceError
from tests.kernels.compiling import assert_they_compile
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

Q = QuantType
HOPPER = Gpu(227 << 10, 132, (9, 0))
PACKED = [qtype for qtype in Q if BLOCK[qtype].weights >= 32]
OFFSET = 32


def expert_of(qtype: QuantType, rows: int, cols: int) -> Matrix:
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols), OFFSET))


@pytest.mark.parametrize("qtype", PACKED, ids=lambda qtype: qtype.name)
def test_experts_fit_a_block_whose_teams_look_ahead(qtype: QuantType) -> None:
    for matrices, rows, cols in ((2, 640, 2560), (1, 2560, 640), (2, 1408, 4096)):
        if cols % BLOCK[qtype].weights:
            continue
        plan = some_plan(expert_of(qtype, rows, cols), matrices, 512, HOPPER)
        _, teams, team_warps, slots, _, depth, slice_weights, *_ = plan.extents
        assert plan.shared_bytes <= HOPPER.shared_bytes
        assert plan.block == (32 * (teams * team_warps + 1), 1, 1)
        assert teams < slots <= teams * depth
        assert (team_warps - 1) * slice_weights < cols <= team_warps * slice_weights
        assert plan.grid == (132, 1, 1)


def test_few_rows_are_taken_a_few_at_a_time() -> None:
    """Else half of the teams would have no tile."""
    down = expert_of(Q.Q8_0, 2560, 640)
    functions = [some_plan(down, 1, 0, HOPPER, tokens).unit.function for tokens in (40, 100, 256)]
    assert [function.rpartition(", ")[2] for function in functions] == ["1>", "2>", "4>"]


def test_what_does_not_fit_is_not_taken() -> None:
    for matrix, gpu in (
        (expert_of(Q.Q8_0, 640, 2560), HOPPER._replace(capability=(8, 9))),
        (expert_of(Q.Q8_0, 640, 2560), Gpu(64 << 10, 132, (9, 0))),
        (expert_of(Q.Q8_0, 640, 12800), HOPPER),
        (expert_of(Q.BF16, 640, 2560), HOPPER),
    ):
        with pytest.raises(DeviceError, match="columns for pairs of 512 experts does not fit"):
            some_plan(matrix, 2, 512, gpu)


def test_the_host_has_no_such_products(lab: Lab) -> None:
    blobs = lab.put(np.zeros(2, np.int64))
    each = Experts(blobs, WeightLayout(Q.Q8_0, 64, 64, 0), lab.empty((9, 64)))
    assert can_take_some(lab.stream, ExpertMlp(each, each, each), 9) == (
        lab.stream.capability >= (9, 0)
    )


@pytest.mark.slow
def test_they_compile_where_they_run() -> None:
    plans = (
        some_plan(expert_of(Q.IQ3_XXS, 640, 2560), 2, 512, HOPPER),
        some_plan(expert_of(Q.IQ4_NL, 2560, 640), 1, 512, HOPPER),
        some_plan(expert_of(Q.Q6_K, 640, 2560), 2, 0, HOPPER, 100),
        some_plan(expert_of(Q.Q8_0, 10240, 320), 1, 0, HOPPER, 100),
    )
    assert_they_compile([plan.unit for plan in plans], "sm_90a")


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", PACKED, ids=lambda qtype: qtype.name)
def test_some_pairs_have_the_bits_of_product_after_product(gpu_lab: Lab, qtype: QuantType) -> None:
    """Experts without pairs, with less than eight, and with more than a block takes at once."""
    lab, cols, hidden, tokens = gpu_lab, 5 * max(256, BLOCK[qtype].weights), 256, 75
    for starts in ([0, 7, 7, 40, 41, 55, 55, 64], [0] * 13 + [75], [5, 5, 9, 30, 30, 30, 31]):
        experts, pairs = len(starts) - 1, starts[-1]
        fused = [packed_rows(qtype, 2 * hidden, cols, seed) for seed in range(experts)]
        gates = [lab.put(np.pad(each.ravel(), (OFFSET, 0))) for each in fused]
        downs = [lab.put(packed_rows(Q.IQ4_NL, 70, hidden, seed)) for seed in range(experts)]
        first, second = (
            lab.put(np.array([blob.address for blob in blobs], np.int64))
            for blobs in (gates, downs)
        )
        x, rounded = lab.put(normal(1, tokens, cols)), lab.empty((tokens, cols), np.float16)
        round_rows(lab.stream, x, rounded)
        row_of = lab.put((np.arange(pairs) * 7 % tokens).astype(np.int32))
        start = lab.put(np.array(starts, np.int32))
        up_offset = OFFSET + hidden * row_bytes(qtype, cols)
        mlps = [
            ExpertMlp(
                Experts(
                    first, WeightLayout(qtype, hidden, cols, OFFSET), lab.empty((pairs, hidden))
                ),
                Experts(
                    first, WeightLayout(qtype, hidden, cols, up_offset), lab.empty((pairs, hidden))
                ),
                Experts(second, WeightLayout(Q.IQ4_NL, 70, hidden, 0), lab.empty((pairs, 70))),
            )
            for _ in range(2)
        ]
        if not can_take_some(lab.stream, mlps[0], pairs):
            pytest.skip("this GPU has no room for them")
        experts_of_some(lab.stream, rounded, mlps[0], row_of, start)
        gate, up, down = mlps[1]
        grouped_matmul_pair(lab.stream, x, gate, up, row_of, start)
        swiglu(lab.stream, gate.out, up.out, gate.out)
        order = lab.put(np.arange(pairs, dtype=np.int32))
        grouped_matmul(lab.stream, gate.out, down.blobs, down.layout, order, start, down.out)
        np.testing.assert_array_equal(lab.get(mlps[0].down.out), lab.get(down.out))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "rows", "cols"),
    [(Q.Q8_0, 10_240, 320), (Q.Q6_K, 644, 1_280), (Q.Q8_0, 2_560, 640), (Q.IQ3_S, 100, 768)],
)
@pytest.mark.parametrize("tokens", [33, 100, 256])
def test_some_rows_have_the_bits_of_few(
    gpu_lab: Lab, qtype: QuantType, rows: int, cols: int, tokens: int
) -> None:
    lab = gpu_lab
    first, second = (
        Weight(lab.put(packed_rows(qtype, rows, cols, seed)), qtype, rows, cols) for seed in (1, 2)
    )
    if not can_make_some(lab.stream, first, tokens, matrices=2):
        pytest.skip("this GPU has no room for them")
    x, rounded = lab.put(normal(3, tokens, cols)), lab.empty((tokens, cols), np.float16)
    round_rows(lab.stream, x, rounded)
    gate, up, own = (lab.empty((tokens, rows)) for _ in range(3))
    matmul(lab.stream, x, first, gate)
    matmul(lab.stream, x, second, up)
    matmul_some(lab.stream, rounded, first, own)
    np.testing.assert_array_equal(lab.get(own), lab.get(gate))
    hidden, expected = (lab.empty((tokens, rows), np.float16) for _ in range(2))
    matmul_swiglu_some(lab.stream, rounded, first, second, hidden)
    swiglu(lab.stream, gate, up, gate)
    round_rows(lab.stream, gate, expected)
    np.testing.assert_array_equal(lab.get(hidden), lab.get(expected))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "tokens"), [(512, 100), (40, 33), (130, 300), (600, 34)])
def test_two_float32_matrices_slice_by_slice_have_the_bits_of_few(
    gpu_lab: Lab, rows: int, tokens: int
) -> None:
    lab, cols = gpu_lab, 2_560
    x, scratch = lab.put(normal(1, tokens, cols)), lab.empty((1 << 22,))
    router, logit = (
        Weight(lab.put(packed_rows(Q.F32, n, cols, seed)), Q.F32, n, cols)
        for seed, n in enumerate((rows, 1))
    )
    assert can_split_pair(lab.stream, x, router, logit, scratch)
    first, second = (Product(each, lab.empty((tokens, each.rows))) for each in (router, logit))
    top_k = 10
    routed, expected = (
        (lab.empty((tokens, top_k), np.int32), lab.empty((tokens, top_k))) for _ in range(2)
    )
    route_by_slices(lab.stream, x, first, second, scratch, *routed)
    for weight, out in (first, second):
        few = lab.empty((tokens, weight.rows))
        for begin in range(0, tokens, 25):  # so few that they go eight rows at a time
            own = slice(begin, min(begin + 25, tokens))
            matmul(lab.stream, x.rows(own.start, own.stop), weight, few.rows(own.start, own.stop))
        np.testing.assert_array_equal(lab.get(out), lab.get(few))
    route(lab.stream, first.out, *expected)
    for own_choice, other in zip(routed, expected, strict=True):
        np.testing.assert_array_equal(lab.get(own_choice), lab.get(other))


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "rank", "tokens"), [(2_560, 320, 100), (70, 256, 33)])
def test_a_mix_by_gates_as_they_are_made_has_its_bits(
    gpu_lab: Lab, size: int, rank: int, tokens: int
) -> None:
    lab, rows = gpu_lab, 4 * size
    up = Weight(lab.put(packed_rows(Q.Q8_0, rows, rank, 1)), Q.Q8_0, rows, rank)
    if not can_mix_some(lab.stream, up, 4, tokens):
        pytest.skip("this GPU has no room for them")
    low = lab.put(normal(2, tokens, rank).astype(np.float16))
    normed, gate = lab.put(normal(3, tokens, rows)), lab.empty((tokens, rows))
    mixed, expected = (
        (lab.empty((tokens, size)), lab.empty((tokens, size), np.float16)) for _ in range(2)
    )
    matmul_mix_some(lab.stream, low, up, normed, *mixed)
    matmul_some(lab.stream, low, up, gate)
    stream_mix(lab.stream, gate, normed, *expected)
    for own, other in zip(mixed, expected, strict=True):
        np.testing.assert_array_equal(lab.get(own), lab.get(other))
