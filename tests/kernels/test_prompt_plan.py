"""How a GPU cuts the products of prompts: what must fit, and that no multiprocessor waits."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.device.base import Kernel, Tensor
from strata_cli.engine.device.cuda_kernels import KERNELS_FOLDER
from strata_cli.engine.device.nvrtc import Compiler, read_unit
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.products import Matrix, Plan, alignment, dense_matrix
from strata_cli.engine.kernels.prompt_plan import (
    Gpu,
    Shape,
    grouped_prompt_plan,
    has_prompt_plan,
    has_split_plan,
    has_thin_plan,
    prompt_plan,
    prompt_shared_bytes,
    split_plan,
    thin_plan,
)
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from strata_cli.errors import ConfigError, DeviceError
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

GPUS = {
    "ampere": Gpu(99 << 10, 82),
    "hopper": Gpu(227 << 10, 132),
}
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
TYPES = [qtype for qtype in QuantType if qtype is not QuantType.F32]


def matrix_of(qtype: QuantType, rows: int, cols: int) -> Matrix:
    return dense_matrix(qtype, rows, cols, 0)


def expert_of(qtype: QuantType, rows: int, cols: int) -> Matrix:
    return Matrix(qtype, rows, cols, alignment(row_bytes(qtype, cols)))


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_plans_fit_every_gpu(qtype: QuantType, gpu: Gpu) -> None:
    for cols in (256, 640, 2560, 10240):
        if cols % BLOCK[qtype].weights:
            continue
        for rows in (1, 40, 320, 12288):
            for plan in (
                prompt_plan(matrix_of(qtype, rows, cols), 4096, gpu),
                prompt_plan(matrix_of(qtype, rows, cols), 40, gpu),
                grouped_prompt_plan(expert_of(qtype, rows, cols), 40960, 512, gpu),
            ):
                assert plan.shared_bytes <= gpu.shared_bytes
                assert 0 < plan.grid[0] <= 8 * gpu.num_multiprocessors
                assert plan.block[0] <= 256
                assert plan.grid[1:] == (1, 1)


def test_small_gpus_have_it_for_types_of_short_rows() -> None:
    turing = Gpu(64 << 10, 40)
    assert has_prompt_plan(matrix_of(QuantType.Q4_K, 640, 2560), turing)
    assert not has_prompt_plan(matrix_of(QuantType.Q8_0, 640, 2560), turing)
    assert has_prompt_plan(matrix_of(QuantType.Q8_0, 640, 2560), GPUS["ampere"])


def test_large_products_take_wide_tiles_and_narrow_ones_fill_the_gpu() -> None:
    gpu = GPUS["hopper"]
    large = prompt_plan(matrix_of(QuantType.Q8_0, 12288, 2560), 4096, gpu)
    assert large.unit.function.endswith(", 4, 2>")
    assert large.grid == (132, 1, 1)
    narrow = prompt_plan(matrix_of(QuantType.Q8_0, 320, 10240), 4096, gpu)
    assert narrow.grid[0] >= 128


def test_experts_take_tiles_whose_weights_are_decoded_once() -> None:
    for qtype, rows, cols in (
        (QuantType.IQ3_XXS, 640, 2560),
        (QuantType.IQ4_NL, 2560, 640),
        (QuantType.Q8_0, 2560, 640),
    ):
        plan = grouped_prompt_plan(expert_of(qtype, rows, cols), 20480, 512, GPUS["hopper"])
        assert plan.unit.function.endswith(", 4, 2>")
        assert plan.grid == (132, 1, 1)


def test_few_tiles_need_no_more_blocks() -> None:
    plan = prompt_plan(matrix_of(QuantType.Q8_0, 256, 2560), 64, GPUS["hopper"])
    assert plan.grid[0] <= 8
    grouped = grouped_prompt_plan(expert_of(QuantType.Q8_0, 64, 2560), 3, 2, GPUS["hopper"])
    assert grouped.grid[0] <= 4


def test_a_shape_that_does_not_fit_is_named() -> None:
    matrix, shape = matrix_of(QuantType.Q8_0, 640, 2560), Shape(8, 2)
    assert prompt_shared_bytes(matrix, shape) > 227 << 10
    with pytest.raises(DeviceError, match="Q8_0 product with 2560 columns does not fit"):
        prompt_plan(matrix, 4096, GPUS["hopper"], (shape,))


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
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_compile_for_every_architecture(architecture: str) -> None:
    try:
        compiler = Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    units = (
        split_plan(matrix_of(QuantType.F32, 512, 2560), 4096).unit,
        thin_plan(matrix_of(QuantType.F32, 4, 10_240), 4096).unit,
        prompt_plan(matrix_of(QuantType.BF16, 640, 104), 4096, GPUS["ampere"]).unit,
        grouped_prompt_plan(expert_of(QuantType.IQ3_XXS, 640, 2560), 999, 9, GPUS["ampere"]).unit,
    )
    for source, function, defines in units:
        unit = read_unit(KERNELS_FOLDER / source, defines=defines, instances=(function,))
        assert compiler.compile(unit, architecture).symbols


@pytest.mark.gpu
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_tiles_decoded_once_have_the_bits_of_few_rows(gpu_lab: Lab, qtype: QuantType) -> None:
    """Dense, and as pairs of four experts that are one matrix: one empty, one of many tokens."""
    rows, cols, tokens = 200, 5 * max(256, BLOCK[qtype].weights), 150
    weight = Weight(gpu_lab.put(packed_rows(qtype, rows, cols, 1)), qtype, rows, cols)
    x = gpu_lab.put(normal(2, tokens, cols))
    few, dense, pairs = (gpu_lab.empty((tokens, rows)) for _ in range(3))
    half = gpu_lab.empty((tokens, cols), np.float16)
    matmul(gpu_lab.stream, x, weight, few)
    round_rows(gpu_lab.stream, x, half)
    gpu = Gpu(gpu_lab.stream.shared_bytes, gpu_lab.stream.num_multiprocessors)
    matrix = dense_matrix(qtype, rows, cols, weight.data.address)
    numbers = (int(qtype), tokens, rows, cols)
    launch(gpu_lab, prompt_plan(matrix, tokens, gpu), x, half, weight.data, dense, *numbers)
    blobs = gpu_lab.put(np.full(4, weight.data.address, np.int64))
    start = gpu_lab.put(np.array([0, 7, 7, 20, tokens], np.int32))
    row_of = gpu_lab.put(np.arange(tokens, dtype=np.int32))
    plan = grouped_prompt_plan(expert_of(qtype, rows, cols), tokens, 4, gpu)
    launch(gpu_lab, plan, x, half, blobs, row_of, start, pairs, int(qtype), rows, cols, 0)
    np.testing.assert_array_equal(gpu_lab.get(dense), gpu_lab.get(few))
    np.testing.assert_array_equal(gpu_lab.get(pairs), gpu_lab.get(few))


def launch(lab: Lab, plan: Plan, *args: Tensor | int) -> None:
    """A function that no wrapper chooses yet."""
    source, function, defines = plan.unit
    kernel = Kernel(function, nothing, nothing, source, function, defines)
    lab.stream.launch(kernel, plan.launch(1, 1), *args)


def nothing(_begin: int, _end: int, *_: object) -> None:
    """No host body."""
