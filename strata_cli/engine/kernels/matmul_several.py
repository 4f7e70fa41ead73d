"""Several products of the same activations: on a GPU, with few rows, one launch for all of them.

A product of few rows is over in a few microseconds, of which starting it, waiting for the launch
ahead and reading the activations are more than half; together they pay for that once. Bits are
those of ``matmul`` and ``grouped_matmul``; with many rows and on the host these run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_PAIRS_PER_EXPERT, all_few
from strata_cli.engine.kernels.few import MOST_MATRICES, Extra, can_share, few_plan
from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS
from strata_cli.engine.kernels.gpu import gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.grouped_matmul import grouped_matmul
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.matmul_at_once import Output, matmul_at_once
from strata_cli.engine.kernels.products import Matrix, alignment, matrix_of
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.quants import row_bytes

Product = Output  # one of several


class Experts(NamedTuple):
    """One of two grouped products, as the arguments of ``grouped_matmul``."""

    blobs: Tensor
    layout: WeightLayout
    out: Tensor


def matmul_several(
    stream: Stream,
    x: Tensor,
    products: Sequence[Product],
    rounded: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Enqueue ``matmul`` of x with each weight. No output may overlap x or another.

    Args:
        stream: where it runs.
        x: activations, float32 [T, K].
        products: weights with K columns, and their outputs.
        rounded: x as ``round_rows`` left it; makes many rows fast.
        scratch: as of ``matmul``.

    Raises:
        ShapeError: extents or types do not fit.
    """
    if len(products) > 1 and scratch is None and matmul_at_once(stream, rounded, products):
        return
    matrices = tuple(matrix_of(product.weight) for product in products)
    for start, stop in _launches(matrices, x.shape[0] if stream.shared_bytes else 0):
        if stop - start == 1:
            matmul(stream, x, products[start].weight, products[start].out, rounded, scratch)
        else:
            _launch_several(stream, x, tuple(products[start:stop]), matrices[start:stop])


def matmul_several_conv(
    stream: Stream, x: Tensor, products: Sequence[Product], history: Tensor, taps: Tensor
) -> None:
    """Enqueue ``matmul_several`` of a token, and ``causal_conv_silu`` of what the first one makes.

    A product's thread has all that a channel of the convolution needs, so that no launch is.

    Args:
        stream: where it runs, where ``can_convolve``.
        x: activations, float32 [1, K].
        products: weights with K columns, and their outputs; the first one's is the convolution's.
        history: as of ``causal_conv_silu``.
        taps: weights as of ``causal_conv_silu``.

    Raises:
        ShapeError: extents or types do not fit.
    """
    channels, num_taps = taps.shape
    matrices = tuple(matrix_of(product.weight) for product in products)
    expect("convolved product", products[0].out, (1, channels))
    expect("convolved product history", history, (num_taps - 1, channels))
    expect("convolved product taps", taps, (channels, num_taps))
    _launch_several(stream, x, tuple(products), matrices, history, taps)


def can_convolve(stream: Stream, products: Sequence[Product], tokens: int, taps: Tensor) -> bool:
    """Whether ``matmul_several_conv`` takes the products: of one token, in one launch, on a GPU."""
    has_past = taps.shape[1] > 1 and len(products) > 1
    return tokens == 1 and has_past and can_launch_together(stream, products, tokens)


def can_launch_together(stream: Stream, products: Sequence[Product], tokens: int) -> bool:
    """Whether ``matmul_several`` makes all of them in one launch, in about the longest's time."""
    matrices = tuple(matrix_of(product.weight) for product in products)
    return stream.shared_bytes > 0 and tokens > 0 and len(_launches(matrices, tokens)) == 1


@lru_cache(maxsize=4096)
def _launches(matrices: tuple[Matrix, ...], tokens: int) -> tuple[tuple[int, int], ...]:
    """The products in order, as many to a launch as can share it; of no tokens, each alone.

    Returns:
        The first of each launch, and the one behind its last.
    """
    found, start = list[tuple[int, int]](), 0
    for index in range(1, len(matrices) + 1):
        longer = matrices[start : index + 1]
        is_last = index == len(matrices)
        if is_last or not (tokens and can_share(longer) and all_few(longer, tokens)):
            found.append((start, index))
            start = index
    return tuple(found)


def _launch_several(
    stream: Stream,
    x: Tensor,
    products: tuple[Product, ...],
    matrices: tuple[Matrix, ...],
    history: Tensor | None = None,
    taps: Tensor | None = None,
) -> None:
    tokens, cols = x.shape[0], products[0].weight.cols
    expect("matmul x", x, (tokens, cols))
    for product in products:
        expect("matmul out", product.out, (tokens, product.weight.rows))
    passes, num_taps = blocks(tokens, FEW_COLUMNS), 0 if taps is None else taps.shape[1]
    plan = few_plan(matrices, tokens, passes, gpu_of(stream), extra=Extra(taps=num_taps))
    filled = products + (products[0],) * (MOST_MATRICES - len(products))  # without rows of its own
    tensors = [tensor for each in filled for tensor in (each.weight.data, each.out)]
    if taps is not None and history is not None:
        tensors += [taps, history]
    stream.launch(gpu_kernel(plan.unit), plan.launch(1, 1, early=True), x, *tensors, tokens, cols)


def grouped_matmul_pair(
    stream: Stream,
    x: Tensor,
    first: Experts,
    second: Experts,
    row_of: Tensor,
    expert_start: Tensor,
    rounded: Tensor | None = None,
    num_pairs: int | None = None,
) -> None:
    """Enqueue ``grouped_matmul`` of x with two matrices of every expert, such as gate and up.

    Args:
        stream: where it runs.
        x: activations, float32 [R, K].
        first: one of them.
        second: the other; the outputs may not overlap.
        row_of: row of x that each pair reads, int32 [P], pairs sorted by expert.
        expert_start: as of ``grouped_matmul``.
        rounded: x as ``round_rows`` left it; makes many pairs fast.
        num_pairs: of all these experts; None: P.

    Raises:
        ShapeError: extents or types do not fit.
    """
    pairs, experts = row_of.shape[0], first.blobs.shape[0]
    matrices = matrix_of_experts(first.layout), matrix_of_experts(second.layout)
    own_pairs = pairs if num_pairs is None else min(pairs, num_pairs)
    is_few = stream.shared_bytes > 0 and 0 < own_pairs <= FEW_PAIRS_PER_EXPERT * experts
    if not is_few or matrices[0] != matrices[1]:
        for each in (first, second):
            operands = (row_of, expert_start, each.out, rounded, num_pairs)
            grouped_matmul(stream, x, each.blobs, each.layout, *operands)
        return
    rows, cols = first.layout.rows, first.layout.cols
    expect("grouped_matmul x", x, (x.shape[0], cols))
    for each in (first, second):
        expect("grouped_matmul blobs", each.blobs, (experts,), first.blobs.dtype)
        expect("grouped_matmul out", each.out, (pairs, rows))
    expect("grouped_matmul row_of", row_of, (pairs,), row_of.dtype)
    expect("grouped_matmul expert_start", expert_start, (experts + 1,), row_of.dtype)
    plan = few_plan(matrices, x.shape[0], own_pairs, gpu_of(stream), experts)
    tensors = (first.blobs, second.blobs, row_of, expert_start, first.out, second.out)
    offsets = first.layout.offset_bytes, second.layout.offset_bytes
    numbers = (int(first.layout.qtype), rows, cols, *offsets)
    stream.launch(gpu_kernel(plan.unit), plan.launch(1, 1, early=True), x, *tensors, *numbers)


def matrix_of_experts(layout: WeightLayout) -> Matrix:
    """What a grouped product is compiled for."""
    align = alignment(row_bytes(layout.qtype, layout.cols), layout.offset_bytes)
    return Matrix(layout.qtype, layout.rows, layout.cols, align)
