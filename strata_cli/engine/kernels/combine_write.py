"""Writes of few or some tokens to the streams on a GPU, perhaps of experts' outputs; their norm."""

from __future__ import annotations

import numpy as np

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import SOME_TOKENS
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.hyper import expect_inject
from strata_cli.engine.kernels.moe import CombineOperands
from strata_cli.engine.kernels.products import WARP, Unit
from strata_cli.engine.kernels.shapes import blocks, expect

NORM_THREADS = 256
MOST_COLUMNS = 12 * NORM_THREADS
MOST_PARTS = 256  # of an inject
SOURCE = "combine_write.cu"
COMBINE_WRITE_NORM = Unit(SOURCE, "combine_write_norm", ())
WRITE_NORM = Unit(SOURCE, "write_norm_few", ())
COMBINE_WRITE_SOME = Unit(SOURCE, "combine_write_some", ())
WRITE_NORM_SOME = Unit(SOURCE, "write_norm_some", ())


def can_write_few(stream: Stream, x: Tensor, inject: Tensor, weight: Tensor) -> bool:
    """Whether the functions here take streams x, an inject and a norm's weight."""
    num_tokens, _, size = x.shape
    is_few = stream.shared_bytes > 0 and 0 < num_tokens <= SOME_TOKENS
    is_aligned = size % 4 == 0 and (x.address | weight.address) % 16 == 0
    return is_few and is_aligned and size <= MOST_COLUMNS and inject.shape[0] <= MOST_PARTS


def write_norm_few(
    stream: Stream,
    x: Tensor,
    out: Tensor,
    inject: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Enqueue ``stream_write_norm``, where ``can_write_few``: the same arguments, the same bits."""
    num_tokens, _, size = x.shape
    expect("write_norm_few out", out, (num_tokens, size))
    launch = _launch(x, inject, weight, normed)
    kernel, both = _outputs(WRITE_NORM, WRITE_NORM_SOME, normed, rounded)
    stream.launch(kernel, launch, x, out, inject, weight, eps, *both)


def combine_write_norm(
    stream: Stream,
    operands: CombineOperands,
    x: Tensor,
    inject: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Enqueue ``combine``, then ``stream_write_norm`` of its output: the same bits.

    Args:
        stream: where it runs; ``can_write_few`` said yes.
        operands: of ``combine``.
        x: as of ``stream_write_norm``.
        inject: as of ``stream_write_norm``.
        weight: as of ``stream_write_norm``.
        eps: as of ``stream_write_norm``.
        normed: as of ``stream_write_norm``.
        rounded: as of ``stream_write_norm``.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    num_tokens, _, size = x.shape
    launch = _launch(x, inject, weight, normed, operands.check(num_tokens, size))
    kernel, both = _outputs(COMBINE_WRITE_NORM, COMBINE_WRITE_SOME, normed, rounded)
    stream.launch(kernel, launch, *operands, x, inject, weight, eps, *both)


def _outputs(
    plain: Unit, rounding: Unit, normed: Tensor, rounded: Tensor | None
) -> tuple[Kernel, tuple[Tensor, ...]]:
    """The function that writes a norm, or it and its rounded copy, and where to."""
    if rounded is None:
        return gpu_kernel(plain), (normed,)
    expect("few tokens' rounded norm", rounded, normed.shape, np.float16)
    return gpu_kernel(rounding), (normed, rounded)


def _launch(x: Tensor, inject: Tensor, weight: Tensor, normed: Tensor, *more: int) -> Launch:
    """A block for each row of the streams, a thread for four of its columns."""
    num_tokens, num_streams, size = x.shape
    parts = expect_inject("few tokens' inject", inject, num_tokens, num_streams)
    expect("few tokens' norm weight", weight, (num_streams * size,))
    expect("few tokens' norm", normed, (num_tokens, num_streams * size))
    threads = max(NORM_THREADS, WARP * blocks(size, 4 * WARP))
    return Launch(
        items=1,
        grid=(num_tokens * num_streams, 1, 1),
        block=(threads, 1, 1),
        extents=(*more, num_streams, size, *parts),
        early=True,
    )
