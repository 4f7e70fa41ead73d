"""Writes to the streams of few tokens on a GPU, perhaps of the experts' outputs, and their norm."""

from __future__ import annotations

from strata_cli.engine.device.base import Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS
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


def can_write_few(stream: Stream, x: Tensor, inject: Tensor, weight: Tensor) -> bool:
    """Whether the functions here take streams x, an inject and a norm's weight."""
    num_tokens, _, size = x.shape
    is_few = stream.shared_bytes > 0 and 0 < num_tokens <= FEW_TOKENS
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
) -> None:
    """Enqueue ``stream_write_norm``, where ``can_write_few``: the same arguments, the same bits."""
    num_tokens, _, size = x.shape
    expect("write_norm_few out", out, (num_tokens, size))
    launch = _launch(x, inject, weight, normed)
    stream.launch(gpu_kernel(WRITE_NORM), launch, x, out, inject, weight, eps, normed)


def combine_write_norm(
    stream: Stream,
    operands: CombineOperands,
    x: Tensor,
    inject: Tensor,
    weight: Tensor,
    eps: float,
    normed: Tensor,
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

    Raises:
        ShapeError: an argument has another shape or type.
    """
    num_tokens, _, size = x.shape
    launch = _launch(x, inject, weight, normed, operands.check(num_tokens, size))
    kernel = gpu_kernel(COMBINE_WRITE_NORM)
    stream.launch(kernel, launch, *operands, x, inject, weight, eps, normed)


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
