"""Which function makes a product: a choice of speed alone; whatever is chosen, the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.kernels import matmul as products
from strata_cli.engine.kernels.choice import (
    GATED_TOKENS,
    all_few,
    few_is_faster,
    slices_are_faster,
)
from strata_cli.engine.kernels.hyper import lowrank_silu
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.matmul_gated import can_gate, matmul_silu
from strata_cli.engine.kernels.products import Matrix, sliced_plan
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

LOW = Matrix(QuantType.Q8_0, 320, 10_240, 16)
WIDE = Matrix(QuantType.Q8_0, 10_240, 2_560, 16)
SHARED = Matrix(QuantType.Q6_K, 640, 2_560, 4)


def test_short_passes_take_narrow_matrices_a_few_rows_at_a_time() -> None:
    assert all(few_is_faster(matrix, 32) for matrix in (LOW, WIDE, SHARED))
    assert few_is_faster(LOW, 100)
    assert few_is_faster(SHARED, 100)
    assert not few_is_faster(WIDE, 100)
    assert not few_is_faster(LOW, 4_096)


def test_matrices_share_a_launch_where_their_activations_fit_a_block() -> None:
    assert all_few((SHARED, SHARED), 100)
    assert all_few((LOW, LOW), 32)
    assert not all_few((LOW, LOW), 100)
    assert not all_few((SHARED, WIDE), 100)


def test_few_tiles_of_long_rows_are_made_slice_by_slice() -> None:
    assert slices_are_faster(LOW, 1_046)
    assert slices_are_faster(LOW, 100)
    assert not slices_are_faster(LOW, 4_096)
    assert not slices_are_faster(WIDE, 1_046)
    assert not slices_are_faster(Matrix(QuantType.Q8_0, 320, 320, 4), 1_046)
    plan = sliced_plan(LOW, 1_046, 227 << 10)
    assert plan.slices.grid == (3 * 17, 20, 1)
    assert plan.num_floats == 20 * 1_046 * 320


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("qtype", "rows", "cols"),
    [
        (QuantType.Q8_0, 320, 10_240),
        (QuantType.IQ3_XXS, 70, 2_816),
        (QuantType.Q6_K, 33, 1_280),
        (QuantType.BF16, 130, 1_096),
    ],
)
def test_every_function_has_the_same_bits(
    gpu_lab: Lab, monkeypatch: pytest.MonkeyPatch, qtype: QuantType, rows: int, cols: int
) -> None:
    tokens = 75
    weight = Weight(gpu_lab.put(packed_rows(qtype, rows, cols, 1)), qtype, rows, cols)
    x = gpu_lab.put(normal(2, tokens, cols))
    rounded, scratch = gpu_lab.empty((tokens, cols), np.float16), gpu_lab.empty((1 << 19,))
    round_rows(gpu_lab.stream, x, rounded)
    found = []
    for is_few, are_slices in ((True, False), (False, False), (False, True)):
        monkeypatch.setattr(products, "few_is_faster", lambda *_, few=is_few, **_more: few)
        monkeypatch.setattr(products, "slices_are_faster", lambda *_, own=are_slices: own)
        products.forget_choices()
        out = gpu_lab.empty((tokens, rows))
        matmul(gpu_lab.stream, x, weight, out, rounded, scratch)
        found.append(gpu_lab.get(out))
    products.forget_choices()
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.gpu
def test_gates_of_a_short_pass_have_the_bits_of_their_own_kernel(gpu_lab: Lab) -> None:
    tokens, rows, cols = GATED_TOKENS - 1, 640, 320
    weight = Weight(
        gpu_lab.put(packed_rows(QuantType.Q8_0, rows, cols, 1)), QuantType.Q8_0, rows, cols
    )
    x = gpu_lab.put(normal(2, tokens, cols))
    together, apart = gpu_lab.empty((tokens, rows)), gpu_lab.empty((tokens, rows))
    assert can_gate(gpu_lab.stream, tokens)
    matmul_silu(gpu_lab.stream, x, 4, weight, together)
    lowrank_silu(gpu_lab.stream, x, 4)
    matmul(gpu_lab.stream, x, weight, apart)
    np.testing.assert_array_equal(gpu_lab.get(together), gpu_lab.get(apart))
