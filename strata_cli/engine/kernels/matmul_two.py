"""Two products of the same rows in one launch, where the tiles of neither fill a GPU.

For some rows, by warpgroups. Bits are those of ``matmul``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import few_is_faster
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import Matrix, dense_matrix, slice_cols
from strata_cli.engine.kernels.prompt_plan import Gpu, gpu_of
from strata_cli.engine.kernels.shapes import expect
from strata_cli.engine.kernels.warpgroup_plan import has_warpgroup_plan, warpgroup_two_plan
from strata_cli.engine.kernels.weight import Weight


class Output(NamedTuple):
    """One of two products: a weight, and where its output [T, N] goes."""

    weight: Weight
    out: Tensor


class _Way(NamedTuple):
    """The launch of two products."""

    kernel: Kernel
    launch: Launch


def matmul_two(stream: Stream, rounded: Tensor | None, first: Output, second: Output) -> bool:
    """Enqueue ``matmul`` with two weights in one launch, where all tiles of both run at once.

    Args:
        stream: where it runs.
        rounded: activations as ``round_rows`` left them, float16 [T, K]; None: there are none.
        first: one weight, and its output, overwritten.
        second: the other.

    Returns:
        False where nothing was done: they are to be made one by one.

    Raises:
        ShapeError: extents or types do not fit.
    """
    if not stream.shared_bytes or rounded is None or rounded.address % 16:
        return False
    matrices = _matrix(first.weight), _matrix(second.weight)
    tokens, cols = rounded.shape[0], first.weight.cols
    way = _way(*matrices, tokens, gpu_of(stream))
    if way is None:
        return False
    expect("matmul_two rounded", rounded, (tokens, cols), np.float16)
    for weight, out in (first, second):
        expect("matmul_two out", out, (tokens, weight.rows))
    operands = (rounded, first.weight.data, first.out, second.weight.data, second.out)
    stream.launch(way.kernel, way.launch, *operands, tokens, cols)
    return True


@lru_cache(maxsize=1024)
def _way(first: Matrix, second: Matrix, tokens: int, gpu: Gpu) -> _Way | None:
    """None: other ways are faster, or there is no room."""
    if first.cols != second.cols or first.cols % 8:
        return None
    for each in (first, second):
        if few_is_faster(each, tokens) or not has_warpgroup_plan(each, gpu):
            return None
    plan = warpgroup_two_plan(first, second, tokens, gpu)
    if plan is None:
        return None
    slices = (slice_cols(each.qtype, each.cols) for each in (first, second))
    launch = plan.launch(1, 1, early=True)
    extents = (first.rows, second.rows, *plan.extents, *slices)
    return _Way(gpu_kernel(plan.unit), launch._replace(extents=extents))


def _matrix(weight: Weight) -> Matrix:
    return dense_matrix(weight.qtype, weight.rows, weight.cols, weight.data.address)
