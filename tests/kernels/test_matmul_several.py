"""Products that share a launch have the bits of the same products alone."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.kernels.gdn import causal_conv_silu, gated_norm
from strata_cli.engine.kernels.grouped_matmul import grouped_matmul
from strata_cli.engine.kernels.hyper import lowrank_silu
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.matmul_gated import (
    can_norm,
    can_route_beside,
    grouped_matmul_swiglu,
    matmul_normed,
    matmul_silu,
    matmul_swiglu,
    matmul_swiglu_route,
)
from strata_cli.engine.kernels.matmul_several import (
    Experts,
    Product,
    can_convolve,
    grouped_matmul_pair,
    matmul_several,
    matmul_several_conv,
)
from strata_cli.engine.kernels.moe import swiglu
from strata_cli.engine.kernels.routing import RouteOperands, route_in_order
from strata_cli.engine.kernels.weight import Weight, WeightLayout
from strata_cli.engine.model.quants import QuantType, row_bytes
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

Q = QuantType
SHARING = {
    "streams": ([(Q.Q8_0, 320), (Q.F32, 4)], 2560),
    "delta net": ([(Q.Q8_0, 400), (Q.Q6_K, 300), (Q.Q8_0, 48), (Q.Q8_0, 48)], 1280),
    "experts": ([(Q.F32, 512), (Q.F32, 1), (Q.Q6_K, 64), (Q.Q6_K, 64)], 256),
    "attention": ([(Q.Q8_0, 200), (Q.Q6_K, 52), (Q.Q5_K, 52), (Q.BF16, 51), (Q.BF16, 12)], 512),
    "two code books": ([(Q.IQ3_XXS, 40), (Q.IQ2_S, 52), (Q.IQ2_S, 9)], 512),
    "one": ([(Q.Q4_K, 33)], 256),
}


@pytest.mark.parametrize("tokens", [1, 3, 11])
@pytest.mark.parametrize("members", SHARING.values(), ids=SHARING)
def test_products_together_are_those_alone(
    lab: Lab, members: tuple[list[tuple[QuantType, int]], int], tokens: int
) -> None:
    types, cols = members
    x = lab.put(normal(1, tokens, cols))
    products, alone = [], []
    for seed, (qtype, rows) in enumerate(types):
        weight = Weight(lab.put(packed_rows(qtype, rows, cols, seed)), qtype, rows, cols)
        products.append(Product(weight, lab.empty((tokens, rows))))
        out = lab.empty((tokens, rows))
        matmul(lab.stream, x, weight, out)
        alone.append(lab.get(out))
    matmul_several(lab.stream, x, products)
    for product, expected in zip(products, alone, strict=True):
        np.testing.assert_array_equal(lab.get(product.out), expected)


@pytest.mark.parametrize("qtype", [Q.Q8_0, Q.IQ3_XXS])
@pytest.mark.parametrize("starts", [[0, 1, 1, 2, 3], [0, 3, 3, 4, 40]], ids=["one token", "many"])
def test_two_matrices_of_experts_together_are_those_alone(
    lab: Lab, qtype: QuantType, starts: list[int]
) -> None:
    rows, cols, pairs = 40, 1280, starts[-1]
    x, experts = lab.put(normal(1, 13, cols)), len(starts) - 1
    blobs = [lab.put(packed_rows(qtype, 2 * rows, cols, seed)) for seed in range(experts)]
    addresses = lab.put(np.array([blob.address for blob in blobs], np.int64))
    row_of = lab.put((np.arange(pairs) * 5 % 13).astype(np.int32))
    start = lab.put(np.array(starts, np.int32))
    first, second = (
        Experts(addresses, WeightLayout(qtype, rows, cols, offset), lab.empty((pairs, rows)))
        for offset in (0, rows * row_bytes(qtype, cols))
    )
    grouped_matmul_pair(lab.stream, x, first, second, row_of, start)
    for each in (first, second):
        out = lab.empty((pairs, rows))
        grouped_matmul(lab.stream, x, each.blobs, each.layout, row_of, start, out)
        np.testing.assert_array_equal(lab.get(each.out), lab.get(out))


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", [Q.Q8_0, Q.IQ4_NL, Q.F32])
@pytest.mark.parametrize("tokens", [1, 11])
def test_gates_as_they_are_loaded_have_the_bits_of_their_kernels(
    gpu_lab: Lab, qtype: QuantType, tokens: int
) -> None:
    lab, cols, rows = gpu_lab, 640, 70
    weight = Weight(lab.put(packed_rows(qtype, rows, cols, 3)), qtype, rows, cols)
    gate, up = lab.put(normal(1, tokens, cols)), lab.put(normal(2, tokens, cols))
    fused, out = lab.empty((tokens, rows)), lab.empty((tokens, rows))
    matmul_swiglu(lab.stream, gate, up, weight, fused)
    gated = lab.empty((tokens, cols))
    swiglu(lab.stream, gate, up, gated)
    matmul(lab.stream, gated, weight, out)
    np.testing.assert_array_equal(lab.get(fused), lab.get(out))
    matmul_silu(lab.stream, gate, 4, weight, fused)
    lowrank_silu(lab.stream, gate, 4)
    matmul(lab.stream, gate, weight, out)
    np.testing.assert_array_equal(lab.get(fused), lab.get(out))


@pytest.mark.gpu
def test_gated_experts_have_the_bits_of_swiglu_and_the_product(gpu_lab: Lab) -> None:
    lab, qtype, rows, cols, starts = gpu_lab, Q.IQ4_NL, 48, 640, [0, 1, 1, 2, 4]
    pairs = starts[-1]
    blobs = [lab.put(packed_rows(qtype, rows, cols, seed)) for seed in range(4)]
    addresses = lab.put(np.array([blob.address for blob in blobs], np.int64))
    gate, up = lab.put(normal(1, pairs, cols)), lab.put(normal(2, pairs, cols))
    order, start = lab.put(np.arange(pairs, dtype=np.int32)), lab.put(np.array(starts, np.int32))
    experts = Experts(addresses, WeightLayout(qtype, rows, cols, 0), lab.empty((pairs, rows)))
    grouped_matmul_swiglu(lab.stream, gate, up, experts, order, start, pairs)
    swiglu(lab.stream, gate, up, gate)
    out = lab.empty((pairs, rows))
    grouped_matmul(lab.stream, gate, addresses, experts.layout, order, start, out)
    np.testing.assert_array_equal(lab.get(experts.out), lab.get(out))


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 512, 10), (2, 40, 3), (4, 8, 8)])
def test_a_product_beside_the_routing_has_the_bits_of_both(
    gpu_lab: Lab, tokens: int, experts: int, top_k: int
) -> None:
    lab, rows, cols = gpu_lab, 2560, 640
    weight = Weight(lab.put(packed_rows(Q.Q8_0, rows, cols, 1)), Q.Q8_0, rows, cols)
    gate, up, logits = (
        lab.put(normal(s, tokens, n)) for s, n in ((2, cols), (3, cols), (4, experts))
    )
    pairs, i32 = (tokens, top_k), np.int32
    both, alone = (
        RouteOperands(
            logits,
            lab.empty(pairs, i32),
            lab.empty(pairs),
            lab.empty((experts + 1,), i32),
            lab.empty((tokens * top_k,), i32),
            lab.empty(pairs, i32),
        )
        for _ in range(2)
    )
    beside, expected = (lab.empty((tokens, rows)) for _ in range(2))
    assert can_route_beside(lab.stream, weight, both)
    matmul_swiglu_route(lab.stream, gate, up, weight, beside, both)
    matmul_swiglu(lab.stream, gate, up, weight, expected)
    route_in_order(lab.stream, *alone)
    np.testing.assert_array_equal(lab.get(beside), lab.get(expected))
    for own, other in zip(both, alone, strict=True):
        np.testing.assert_array_equal(lab.get(own), lab.get(other))


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "num_taps", "cols"), [(10_240, 4, 2560), (300, 2, 512)])
def test_a_product_that_is_convolved_has_the_bits_of_both_launches(
    gpu_lab: Lab, channels: int, num_taps: int, cols: int
) -> None:
    lab = gpu_lab
    weights = [
        Weight(lab.put(packed_rows(qtype, rows, cols, 1)), qtype, rows, cols)
        for qtype, rows in ((Q.Q8_0, channels), (Q.Q6_K, 700), (Q.Q8_0, 48), (Q.Q8_0, 48))
    ]
    x, taps = lab.put(normal(2, 1, cols)), lab.put(normal(3, channels, num_taps))
    past = normal(4, num_taps - 1, channels)
    history, expected_history = lab.put(past), lab.put(past)
    own, expected = (
        [Product(weight, lab.empty((1, weight.rows))) for weight in weights] for _ in range(2)
    )
    assert can_convolve(lab.stream, own, 1, taps)
    assert not can_convolve(lab.stream, own, 1, lab.empty((channels, 1)))
    matmul_several_conv(lab.stream, x, own, history, taps)
    matmul_several(lab.stream, x, expected)
    row = lab.empty((1, channels))
    causal_conv_silu(lab.stream, expected[0].out, expected_history, taps, row)
    np.testing.assert_array_equal(lab.get(own[0].out), lab.get(row))
    np.testing.assert_array_equal(lab.get(history), lab.get(expected_history))
    for mine, other in zip(own[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(lab.get(mine.out), lab.get(other.out))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "heads", "dim", "rows"),
    [(Q.Q8_0, 48, 128, 2560), (Q.Q6_K, 8, 96, 50), (Q.F32, 4, 32, 16), (Q.IQ4_NL, 7, 64, 33)],
)
def test_a_product_of_heads_normed_as_they_are_loaded_has_the_bits_of_both_launches(
    gpu_lab: Lab, qtype: QuantType, heads: int, dim: int, rows: int
) -> None:
    lab, cols = gpu_lab, heads * dim
    weight = Weight(lab.put(packed_rows(qtype, rows, cols, 1)), qtype, rows, cols)
    x, z, norm = lab.put(normal(2, 1, cols)), lab.put(normal(3, 1, cols)), lab.put(normal(4, dim))
    own, out, normed = (lab.empty((1, n)) for n in (rows, rows, cols))
    assert can_norm(lab.stream, x, dim)
    matmul_normed(lab.stream, x, z, norm, 1e-6, weight, own)
    gated_norm(lab.stream, x, z, norm, 1e-6, normed)
    matmul(lab.stream, normed, weight, out)
    np.testing.assert_array_equal(lab.get(own), lab.get(out))
