"""The low-rank product of some tokens' streams, and their inject: the bits of each launch."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.engine.device.cuda_kernels import KERNELS_FOLDER
from strata_cli.engine.device.nvrtc import Compiler, read_unit
from strata_cli.engine.kernels.hyper import lowrank_silu, stream_write
from strata_cli.engine.kernels.matmul import matmul, round_rows
from strata_cli.engine.kernels.stream_read import inject_parts
from strata_cli.engine.kernels.stream_squeeze import Inject, can_squeeze_some, squeeze_some
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType
from strata_cli.errors import ConfigError
from tests.kernels.lab import Lab, normal
from tests.kernels.packed import packed_rows

STREAMS, SIZE, RANK = 4, 2_560, 320


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_it_compiles(architecture: str) -> None:
    try:
        compiler = Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    source = KERNELS_FOLDER / "stream_squeeze.cu"
    unit = read_unit(source, defines=(), instances=("join_squeeze<Q8_0, 32>",))
    assert compiler.compile(unit, architecture).symbols


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [33, 100, 256])
@pytest.mark.parametrize("has_inject", [True, False])
def test_a_squeeze_has_the_bits_of_its_launches(
    gpu_lab: Lab, tokens: int, has_inject: bool
) -> None:
    lab, width = gpu_lab, STREAMS * SIZE
    down, weight = (
        Weight(lab.put(packed_rows(qtype, rows, width, rows)), qtype, rows, width)
        for qtype, rows in ((QuantType.Q8_0, RANK), (QuantType.F32, STREAMS))
    )
    normed, rounded = lab.put(normal(1, tokens, width)), lab.empty((tokens, width), np.float16)
    round_rows(lab.stream, normed, rounded)
    scratch, low = lab.empty((20 * tokens * RANK,)), lab.empty((tokens, RANK), np.float16)
    parts = lab.empty((inject_parts(width), tokens, STREAMS))
    inject = Inject(weight, parts) if has_inject else None
    own = weight if has_inject else None
    assert can_squeeze_some(lab.stream, rounded, down, own, scratch)
    squeeze_some(lab.stream, normed, rounded, down, inject, STREAMS, scratch, low)
    plain, expected = lab.empty((tokens, RANK)), lab.empty((tokens, RANK), np.float16)
    matmul(lab.stream, normed, down, plain, rounded)
    lowrank_silu(lab.stream, plain, STREAMS)
    round_rows(lab.stream, plain, expected)
    np.testing.assert_array_equal(lab.get(low), lab.get(expected))
    if not has_inject:
        return
    whole, out = lab.empty((tokens, STREAMS)), lab.put(normal(2, tokens, SIZE))
    matmul(lab.stream, normed, weight, whole)
    written = []
    for each in (parts, whole):
        x = lab.put(normal(3, tokens, STREAMS, SIZE))
        stream_write(lab.stream, x, out, each)
        written.append(lab.get(x))
    np.testing.assert_array_equal(written[0], written[1])
