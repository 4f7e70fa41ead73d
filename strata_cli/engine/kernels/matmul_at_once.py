"""Several products of the same rows in one launch, where all their tiles do not fill a GPU.

For some rows, by warpgroups. Bits are those of ``matmul``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import few_is_faster
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import Matrix, matrix_of
from strata_cli.engine.kernels.shapes import expect
from strata_cli.engine.kernels.warpgroup_plan import (
    MOST_MATRICES,
    has_warpgroup_plan,
    warpgroup_several_plan,
)
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType


class Output(NamedTuple):
    """One of several products: a weight, and where its output [T, N] goes."""

    weight: Weight
    out: Tensor


class _Way(NamedTuple):
    """The launch of several products."""

    kernel: Kernel
    launch: Launch


def matmul_at_once(stream: Stream, rounded: Tensor | None, products: Sequence[Output]) -> bool:
    """Enqueue ``matmul`` with each weight in one launch, where all tiles of all run at once.

    Args:
        stream: where it runs.
        rounded: activations as ``round_rows`` left them, float16 [T, K]; None: there are none.
        products: weights, and their outputs, overwritten.

    Returns:
        False where nothing was done: they are to be made in other ways.

    Raises:
        ShapeError: extents or types do not fit.
    """
    if not stream.shared_bytes or rounded is None or rounded.address % 16:
        return False
    tokens, cols = rounded.shape[0], products[0].weight.cols
    way = _way(tuple(matrix_of(each.weight) for each in products), tokens, gpu_of(stream))
    if way is None:
        return False
    expect("matmul_at_once rounded", rounded, (tokens, cols), np.float16)
    for weight, out in products:
        expect("matmul_at_once out", out, (tokens, weight.rows))
    filled = (*products, *(products[0],) * (MOST_MATRICES - len(products)))  # without rows
    tensors = [tensor for each in filled for tensor in (each.weight.data, each.out)]
    stream.launch(way.kernel, way.launch, rounded, *tensors, tokens, cols)
    return True


@lru_cache(maxsize=1024)
def _way(matrices: tuple[Matrix, ...], tokens: int, gpu: Gpu) -> _Way | None:
    """None: other ways are faster, or there is no room."""
    if matrices[0].cols % 8 or all(few_is_faster(each, tokens) for each in matrices):
        return None
    if not all(
        each.qtype is not QuantType.F32 and has_warpgroup_plan(each, gpu) for each in matrices
    ):
        return None
    plan = warpgroup_several_plan(matrices, tokens, gpu)
    return None if plan is None else _Way(gpu_kernel(plan.unit), plan.launch(1, 1, early=True))
