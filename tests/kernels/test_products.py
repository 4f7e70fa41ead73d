"""How a GPU cuts the matrix products: what decides bits, and what must fit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.kernels.few import GATED, can_share, few_plan
from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.products import (
    NARROW,
    WIDE,
    Matrix,
    Plan,
    Tile,
    alignment,
    code_book,
    dense_matrix,
    grouped_many_plan,
    lane_weights,
    many_plan,
    many_shared_bytes,
    slice_cols,
)
from strata_cli.engine.model.quants import BLOCK, QuantType, grid, row_bytes
from strata_cli.errors import DeviceError
from tests.kernels.compiling import ARCHITECTURES, FIRSTS, assert_they_compile

BLOCK_COLS = st.sampled_from(QuantType).flatmap(
    lambda qtype: st.tuples(
        st.just(qtype), st.integers(1, 64).map(lambda n: n * BLOCK[qtype].weights)
    )
)
SHARED_BYTES = {"turing": 64 << 10, "ampere": 99 << 10, "hopper": 227 << 10}
HOPPER = Gpu(227 << 10, 132)


def matrix_of(qtype: QuantType, rows: int, cols: int) -> Matrix:
    return dense_matrix(qtype, rows, cols, 0)


@given(BLOCK_COLS)
def test_lanes_and_slices_cut_a_row_into_whole_pieces(case: tuple[QuantType, int]) -> None:
    qtype, cols = case
    lane, slice_weights = lane_weights(qtype, cols), slice_cols(qtype, cols)
    assert -(-cols // 32) * 32 % (4 * lane) == 0
    assert slice_weights % 256 == 0
    span, block = 4 * lane, BLOCK[qtype].weights
    assert max(span, block) % min(span, block) == 0


def test_the_order_of_sums_is_the_one_that_was_published() -> None:
    """Changing it changes every model's bits."""
    cols = (32, 320, 640, 2560, 6144, 10240)
    assert [lane_weights(QuantType.Q8_0, c) for c in cols] == [8, 16, 32, 64, 64, 64]
    assert [slice_cols(QuantType.Q8_0, c) for c in cols] == [256, 512, 768, 512, 512, 512]
    assert slice_cols(QuantType.F32, 2560) == 256
    assert lane_weights(QuantType.F32, 2560) == 32


@pytest.mark.parametrize("limit", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_plans_fit_every_gpu(qtype: QuantType, limit: int) -> None:
    for cols in (256, 640, 2560, 10240):
        if cols % BLOCK[qtype].weights:
            continue
        for rows in (1, 40, 640, 12288):
            matrix = matrix_of(qtype, rows, cols)
            plans = [
                few_plan((matrix,), tokens, 3, Gpu(limit, 84), experts)
                for tokens in (1, 8, 100)
                for experts in (0, 512)
            ]
            if qtype is not QuantType.F32:
                plans += [many_plan(matrix, 4096, limit), many_plan(matrix, 40, limit)]
                plans += [grouped_many_plan(matrix, 40960, 512, limit)]
            for plan in plans:
                assert_launchable(plan, limit)


SHARING = (
    ((QuantType.Q8_0, 10240), (QuantType.Q6_K, 6144), (QuantType.Q8_0, 48), (QuantType.Q8_0, 48)),
    ((QuantType.F32, 512), (QuantType.F32, 1), (QuantType.IQ3_XXS, 640), (QuantType.Q6_K, 640)),
)


@pytest.mark.parametrize("limit", SHARED_BYTES.values(), ids=SHARED_BYTES)
@pytest.mark.parametrize("members", SHARING)
def test_matrices_that_share_a_launch_cut_sums_as_alone(
    members: tuple[tuple[QuantType, int], ...], limit: int
) -> None:
    matrices = tuple(matrix_of(qtype, rows, 2560) for qtype, rows in members)
    assert can_share(matrices)
    for tokens in (1, 8):
        plan = few_plan(matrices, tokens, 1, Gpu(limit, 132))
        assert_launchable(plan, limit)
        alone = few_plan(matrices[:1], tokens, 1, Gpu(limit, 132))
        assert plan.extents[19:21] == alone.extents[7:9]  # weights of a slice, slices of a row


def test_what_cannot_share_a_launch() -> None:
    one = matrix_of(QuantType.Q8_0, 40, 2560)
    assert not can_share((one,))
    assert not can_share((one,) * 7)
    assert not can_share((one, matrix_of(QuantType.Q8_0, 40, 320)))
    assert not can_share((matrix_of(QuantType.IQ3_S, 9, 2560), matrix_of(QuantType.IQ2_S, 9, 2560)))


def assert_launchable(plan: Plan, limit: int) -> None:
    assert plan.shared_bytes <= limit
    assert plan.block[0] <= 1024
    assert plan.block[0] % 32 == 0
    assert min(plan.grid) > 0
    assert plan.grid[1] < 65536


def test_wide_tiles_where_they_fill_a_gpu() -> None:
    large = many_plan(matrix_of(QuantType.Q8_0, 12288, 2560), 4096, 227 << 10)
    assert large.unit.function.endswith(f", {', '.join(map(str, WIDE[0]))}>")
    assert large.grid == (12288 // 128 * 32, 1, 1)
    small = many_plan(matrix_of(QuantType.Q8_0, 320, 10240), 4096, 227 << 10)
    assert small.unit.function.endswith(f", {', '.join(map(str, NARROW[0]))}>")


def test_two_blocks_of_experts_fit_a_multiprocessor_where_any_do() -> None:
    matrix = Matrix(QuantType.IQ3_XXS, 640, 2560, 4)
    assert grouped_many_plan(matrix, 20480, 512, 227 << 10).shared_bytes <= 113 << 10


def test_a_tile_that_does_not_fit_is_named() -> None:
    matrix = matrix_of(QuantType.Q6_K, 640, 2560)
    tile = Tile(8, 2, 3)
    assert many_shared_bytes(matrix, tile) > 227 << 10
    with pytest.raises(DeviceError, match="Q6_K product with 2560 columns does not fit"):
        many_plan(matrix, 4096, 227 << 10, (tile,))
    with pytest.raises(DeviceError, match=r"does not fit a block's 1000 bytes"):
        few_plan((matrix,), 8, 1, Gpu(1000, 132))


@pytest.mark.parametrize("qtype", [QuantType.IQ2_XS, QuantType.IQ3_S, QuantType.IQ1_M])
def test_a_code_book_names_the_magnitudes_of_its_entries(qtype: QuantType) -> None:
    values = np.unique(grid(qtype))
    words = np.array(code_book(qtype), np.uint32)
    digits = words[:, None] >> 4 * np.arange(grid(qtype).shape[1], dtype=np.uint32) & 15
    np.testing.assert_array_equal(values[digits], grid(qtype))


def test_alignment_is_the_power_of_two_that_divides_all() -> None:
    assert [alignment(n) for n in (0, 1, 34, 340, 1360, 96)] == [16, 1, 2, 4, 16, 16]
    assert alignment(32, 20) == 4
    assert dense_matrix(QuantType.Q8_0, 5, 2560, 1 << 20).align == 16
    assert row_bytes(QuantType.Q8_0, 2560) % 16 == 0


@pytest.mark.parametrize("multiprocessors", [46, 114, 132, 170])
def test_a_multiprocessor_holds_no_more_blocks_than_its_share(multiprocessors: int) -> None:
    """Early ones would take two, and leave others idle; with more blocks than room, some wait."""
    gpu = HOPPER._replace(num_multiprocessors=multiprocessors)
    limit = gpu.shared_bytes
    for rows, cols in ((12288, 2560), (2560, 6144), (320, 10240)):
        plan = few_plan((matrix_of(QuantType.Q8_0, rows, cols),), 1, 1, gpu)
        assert plan.shared_bytes > limit // 2 or plan.grid[1] < multiprocessors
        assert plan.grid[1] <= multiprocessors
    down = few_plan((matrix_of(QuantType.IQ4_NL, 2560, 640),), 10, 10, gpu, 512, extra=GATED)
    assert down.grid[0] * down.grid[1] <= 2 * multiprocessors
    assert limit // 3 < down.shared_bytes <= limit // 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_compile_for_every_architecture(architecture: str) -> None:
    matrix, gpu = matrix_of(QuantType.IQ3_XXS, 640, 2560), Gpu(99 << 10, 132)
    units = (
        few_plan((matrix,), 1, 1, gpu).unit,
        few_plan((matrix_of(QuantType.F32, 512, 2560), matrix), 1, 1, gpu).unit,
        few_plan((matrix, matrix), 1, 10, gpu, 512).unit,
        few_plan((matrix,), 1, 1, gpu, extra=GATED).unit,
        few_plan((matrix,), 10, 10, gpu, 512, extra=GATED).unit,
        grouped_many_plan(matrix, 20480, 512, 99 << 10).unit,
    )
    assert_they_compile(units if architecture in FIRSTS else units[:1], architecture)
