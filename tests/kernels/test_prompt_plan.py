"""How a GPU cuts the products of prompts: what must fit, and that no multiprocessor waits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Tensor
from strata_cli.engine.kernels.gpu import Gpu
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.matmul_at_once import Output, matmul_at_once
from strata_cli.engine.kernels.products import (
    Matrix,
    Plan,
    Unit,
    alignment,
    dense_matrix,
    grouped_many_plan,
    many_plan,
)
from strata_cli.engine.kernels.prompt_plan import (
    has_split_plan,
    has_thin_plan,
    split_plan,
    thin_plan,
)
from strata_cli.engine.kernels.warpgroup_plan import (
    grouped_warpgroup_plan,
    has_warpgroup_plan,
    warpgroup_plan,
    warpgroup_several_plan,
    warpgroup_sliced_plan,
)
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from strata_cli.errors import DeviceError
from tests.kernels.compiling import FIRSTS, assert_they_compile
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

GPUS = {
    "ampere": Gpu(99 << 10, 82),
    "hopper": Gpu(227 << 10, 132, (9, 0)),
}
TYPES = [qtype for qtype in QuantType if qtype is not QuantType.F32]


def matrix_of(qtype: QuantType, rows: int, cols: int) -> Matrix:
    return dense_matrix(qtype, rows, cols, 0)


def expert_of(qtype: QuantType, rows: int, cols: int) -> Matrix:
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols)))


@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_warpgroups_have_room_for_every_type(qtype: QuantType) -> None:
    gpu = GPUS["hopper"]
    for rows, cols in ((70, 256), (640, 2560), (2560, 640), (320, 10240), (12288, 2560)):
        if cols % BLOCK[qtype].weights:
            continue
        expert = expert_of(qtype, rows, cols)
        assert has_warpgroup_plan(matrix_of(qtype, rows, cols), gpu)
        assert has_warpgroup_plan(expert, gpu, 512)
        for plan in (
            warpgroup_plan(matrix_of(qtype, rows, cols), 4096, gpu),
            grouped_warpgroup_plan(expert, 40960, 512, gpu),
        ):
            assert plan.shared_bytes <= gpu.shared_bytes
            assert 0 < plan.grid[0] <= gpu.num_multiprocessors


def test_warpgroups_take_fewer_tokens_where_all_multiprocessors_then_work() -> None:
    gpu = GPUS["hopper"]
    for rows, cols, tokens, size, num_blocks in (
        (12288, 2560, 2048, 128, 132),
        (320, 10240, 4096, 96, 129),
        (48, 2560, 4096, 32, 128),
    ):
        plan = warpgroup_plan(matrix_of(QuantType.Q8_0, rows, cols), tokens, gpu)
        assert plan.unit.function.endswith(f", {size}>")
        assert plan.grid == (num_blocks, 1, 1)


def test_warpgroups_multiply_on_one_kind_of_gpu() -> None:
    matrix = matrix_of(QuantType.Q8_0, 640, 2560)
    for capability in ((8, 9), (9, 0), (10, 0), (12, 0)):
        gpu = GPUS["hopper"]._replace(capability=capability)
        assert has_warpgroup_plan(matrix, gpu) == (capability == (9, 0))
    assert not has_warpgroup_plan(matrix, Gpu(99 << 10, 132, (9, 0)))
    with pytest.raises(DeviceError, match="Q8_0 product with 2560 columns does not fit"):
        warpgroup_plan(matrix, 4096, Gpu(99 << 10, 132, (9, 0)))


def test_warpgroups_of_few_tiles_are_few() -> None:
    gpu = GPUS["hopper"]
    plan = warpgroup_plan(matrix_of(QuantType.Q8_0, 256, 2560), 16, gpu)
    assert plan.grid == (2, 1, 1)
    assert plan.unit.function.endswith(", 32>")
    expert = expert_of(QuantType.Q8_0, 64, 2560)
    assert grouped_warpgroup_plan(expert, 3, 2, gpu).grid == (2, 1, 1)


def test_slices_by_warpgroups_are_whole_stages() -> None:
    gpu = GPUS["hopper"]
    low = matrix_of(QuantType.Q8_0, 320, 10_240)
    plan = warpgroup_sliced_plan(low, 100, gpu)
    assert plan is not None
    assert plan.slices.grid == (3, 20, 1)
    assert plan.slices.extents == (512,)
    assert plan.num_floats == 20 * 100 * 320
    assert warpgroup_sliced_plan(matrix_of(QuantType.Q8_0, 320, 10_272), 100, gpu) is None
    assert warpgroup_sliced_plan(matrix_of(QuantType.BF16, 320, 10_240), 100, gpu) is None
    assert warpgroup_sliced_plan(low, 100, GPUS["ampere"]) is None


def test_matrices_share_a_launch_where_each_tile_has_a_multiprocessor() -> None:
    gpu = GPUS["hopper"]
    qkv, gate, alpha = (matrix_of(QuantType.Q8_0, rows, 2560) for rows in (10_240, 6_144, 48))
    plan = warpgroup_several_plan((qkv, gate, alpha, alpha), 100, gpu)
    assert plan is not None
    assert plan.grid == (130, 1, 1)
    assert plan.extents[:8] == (10_240, 0, 6_144, 0, 48, 0, 48, 0)
    assert plan.unit.function.startswith("warpgroup_several<128, Side<Q8_0, ")
    assert warpgroup_several_plan((qkv, gate), 129, gpu) is None
    assert warpgroup_several_plan((alpha,) * 7, 40, gpu) is None
    narrow = warpgroup_several_plan((alpha, alpha), 4096, gpu)
    assert narrow is not None
    assert narrow.unit.function.startswith("warpgroup_several<64, ")
    assert narrow.grid == (128, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [33, 100])
def test_matrices_at_once_are_those_alone(gpu_lab: Lab, tokens: int) -> None:
    lab, cols = gpu_lab, 2_560
    x, rounded = lab.put(normal(1, tokens, cols)), lab.empty((tokens, cols), np.float16)
    round_rows(lab.stream, x, rounded)
    kinds = ((QuantType.Q8_0, 10_240), (QuantType.Q6_K, 5_100), (QuantType.Q8_0, 48))
    products = [
        Output(
            Weight(lab.put(packed_rows(qtype, rows, cols, rows)), qtype, rows, cols),
            lab.empty((tokens, rows)),
        )
        for qtype, rows in (*kinds, (QuantType.BF16, 128))
    ]
    if not matmul_at_once(lab.stream, rounded, products):
        pytest.skip("this GPU has no room for them")
    for weight, out in products:
        few = lab.empty((tokens, weight.rows))
        for begin in range(0, tokens, 25):  # so few that they go eight rows at a time
            own = slice(begin, min(begin + 25, tokens))
            matmul(lab.stream, x.rows(own.start, own.stop), weight, few.rows(own.start, own.stop))
        np.testing.assert_array_equal(lab.get(out), lab.get(few))


def test_float32_rows_in_pieces_of_16_bytes_have_a_function_of_their_own() -> None:
    router, gpu = matrix_of(QuantType.F32, 512, 2560), GPUS["ampere"]
    assert has_split_plan(router, 1 << 20, gpu)
    assert not has_split_plan(router, (1 << 20) + 4, gpu)
    assert not has_split_plan(router, 1 << 20, Gpu(64 << 10, 40))
    assert not has_split_plan(matrix_of(QuantType.F32, 4, 2560), 1 << 20, gpu)
    assert not has_split_plan(matrix_of(QuantType.F32, 512, 2562), 1 << 20, gpu)
    plan = split_plan(router, 4095)
    assert plan.grid == (64, 8, 1)
    assert plan.shared_bytes <= gpu.shared_bytes


def test_few_float32_rows_have_another() -> None:
    inject = matrix_of(QuantType.F32, 4, 10_240)
    assert has_thin_plan(inject, 1 << 20)
    assert not has_thin_plan(inject, (1 << 20) + 4)
    assert not has_thin_plan(matrix_of(QuantType.F32, 9, 10_240), 1 << 20)
    assert not has_thin_plan(matrix_of(QuantType.F32, 4, 2562), 1 << 20)
    assert not has_thin_plan(matrix_of(QuantType.BF16, 4, 10_240), 1 << 20)
    plan = thin_plan(inject, 4095)
    assert plan.grid == (256, 1, 1)
    assert plan.shared_bytes == 40 * 4 * 16 * 4
    few = thin_plan(inject, 100)
    assert (few.grid, few.block) == ((13, 1, 1), (640, 1, 1))
    assert few.shared_bytes == 40 * 4 * 8 * 4


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(4, 10_240), (1, 2_560), (8, 100), (3, 2_052)])
def test_few_float32_rows_have_the_bits_of_few_tokens(gpu_lab: Lab, rows: int, cols: int) -> None:
    tokens, together = 75, 25
    weight = Weight(
        gpu_lab.put(packed_rows(QuantType.F32, rows, cols, 1)), QuantType.F32, rows, cols
    )
    x = normal(2, tokens, cols)
    x[3] *= 1e3
    many = gpu_lab.empty((tokens, rows))
    matmul(gpu_lab.stream, gpu_lab.put(x), weight, many)
    for first in range(0, tokens, together):
        few = gpu_lab.empty((together, rows))
        matmul(gpu_lab.stream, gpu_lab.put(x[first : first + together]), weight, few)
        np.testing.assert_array_equal(gpu_lab.get(many)[first : first + together], gpu_lab.get(few))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FIRSTS)
def test_products_of_many_rows_compile(architecture: str) -> None:
    units = (
        split_plan(matrix_of(QuantType.F32, 512, 2560), 4096).unit,
        thin_plan(matrix_of(QuantType.F32, 4, 10_240), 4096).unit,
        thin_plan(matrix_of(QuantType.F32, 4, 10_240), 100).unit,
        *(
            plan.unit
            for plan in (
                warpgroup_plan(matrix_of(QuantType.IQ3_XXS, 640, 2560), 4096, GPUS["hopper"]),
                grouped_warpgroup_plan(expert_of(QuantType.BF16, 640, 104), 999, 9, GPUS["hopper"]),
            )
            if architecture == "sm_90a"
        ),
        *_several_units(architecture),
    )
    assert_they_compile(units, architecture)


def _several_units(architecture: str) -> tuple[Unit, ...]:
    types = (QuantType.Q8_0, QuantType.Q6_K, QuantType.BF16)
    matrices = tuple(matrix_of(qtype, 640, 2560) for qtype in types)
    plan = warpgroup_several_plan(matrices, 100, GPUS["hopper"])
    sliced = warpgroup_sliced_plan(matrix_of(QuantType.Q8_0, 320, 10_240), 100, GPUS["hopper"])
    assert plan is not None
    assert sliced is not None
    return (plan.unit, sliced.slices.unit) if architecture == "sm_90a" else ()


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_every_function_for_many_rows_has_the_bits_of_few(gpu_lab: Lab, qtype: QuantType) -> None:
    rows, cols, tokens = 200, 5 * max(256, BLOCK[qtype].weights), 150
    weight = Weight(gpu_lab.put(packed_rows(qtype, rows, cols, 1)), qtype, rows, cols)
    x, half, few = with_few(gpu_lab, weight, tokens)
    matrix, gpu = dense_matrix(qtype, rows, cols, weight.data.address), gpu_of(gpu_lab)
    plans = [many_plan(matrix, tokens, gpu.shared_bytes)]
    if has_warpgroup_plan(matrix, gpu):
        plans.append(warpgroup_plan(matrix, tokens, gpu))
    for plan in plans:
        out = gpu_lab.empty((tokens, rows))
        launch(gpu_lab, plan, x, half, weight.data, out, int(qtype), tokens, rows, cols)
        np.testing.assert_array_equal(gpu_lab.get(out), few, plan.unit.function)


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_every_function_for_pairs_has_the_bits_of_few(gpu_lab: Lab, qtype: QuantType) -> None:
    """Experts that are one matrix: some without pairs, others with less than a tile or several."""
    rows, cols, ends = 140, 3 * max(256, BLOCK[qtype].weights), [0, 20, 20, 60, 61, 140, 240, 500]
    weight = Weight(gpu_lab.put(packed_rows(qtype, rows, cols, 1)), qtype, rows, cols)
    x, half, few = with_few(gpu_lab, weight, ends[-1])
    order = np.arange(ends[-1], dtype=np.int32)[::-1].copy()
    row_of, matrix, gpu = gpu_lab.put(order), expert_of(qtype, rows, cols), gpu_of(gpu_lab)
    for first in (0, 4):  # all, and the last three alone
        experts = len(ends) - 1 - first
        blobs = gpu_lab.put(np.full(experts, weight.data.address, np.int64))
        start = gpu_lab.put(np.array(ends[first:], np.int32))
        plans = [grouped_many_plan(matrix, ends[-1], experts, gpu.shared_bytes)]
        if has_warpgroup_plan(matrix, gpu, experts):
            plans.append(grouped_warpgroup_plan(matrix, ends[-1], experts, gpu))
        for plan in plans:
            out = gpu_lab.empty((ends[-1], rows))
            untouched = gpu_lab.get(out)[: ends[first]]
            launch(gpu_lab, plan, x, half, blobs, row_of, start, out, int(qtype), rows, cols, 0)
            pairs, name = gpu_lab.get(out), plan.unit.function
            np.testing.assert_array_equal(pairs[ends[first] :], few[order[ends[first] :]], name)
            np.testing.assert_array_equal(pairs[: ends[first]], untouched, name)


def with_few(lab: Lab, weight: Weight, tokens: int) -> tuple[Tensor, Tensor, NDArray[np.float32]]:
    """Activations, those rounded, and what the function of few rows makes of them."""
    x, few = lab.put(normal(2, tokens, weight.cols)), lab.empty((tokens, weight.rows))
    half = lab.empty((tokens, weight.cols), np.float16)
    matmul(lab.stream, x, weight, few)
    round_rows(lab.stream, x, half)
    return x, half, lab.get(few)


def gpu_of(lab: Lab) -> Gpu:
    return Gpu(lab.stream.shared_bytes, lab.stream.num_multiprocessors, lab.stream.capability)


def launch(lab: Lab, plan: Plan, *args: Tensor | int) -> None:
    """A function that a wrapper may not choose."""
    source, function, defines = plan.unit
    kernel = Kernel(function, nothing, nothing, source, function, defines)
    lab.stream.launch(kernel, plan.launch(1, 1), *args)


def nothing(_begin: int, _end: int, *_: object) -> None:
    """No host body."""
