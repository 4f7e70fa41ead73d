"""Experts with some pairs each: the same bits as gate, up, swiglu and down by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.device.cuda_kernels import KERNELS_FOLDER
from strata_cli.engine.device.nvrtc import Compiler, read_unit
from strata_cli.engine.kernels.matmul import grouped_matmul, round_rows
from strata_cli.engine.kernels.matmul_several import Experts, grouped_matmul_pair
from strata_cli.engine.kernels.matmul_some import (
    ExpertMlp,
    can_take_some,
    experts_of_some,
    some_plan,
)
from strata_cli.engine.kernels.moe import swiglu
from strata_cli.engine.kernels.products import Matrix, alignment
from strata_cli.engine.kernels.prompt_plan import Gpu
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from strata_cli.errors import ConfigError, DeviceError
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
    try:
        compiler = Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    for plan in (
        some_plan(expert_of(Q.IQ3_XXS, 640, 2560), 2, 512, HOPPER),
        some_plan(expert_of(Q.IQ4_NL, 2560, 640), 1, 512, HOPPER),
    ):
        source, function, defines = plan.unit
        unit = read_unit(KERNELS_FOLDER / source, defines=defines, instances=(function,))
        assert compiler.compile(unit, "sm_90a").symbols


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
