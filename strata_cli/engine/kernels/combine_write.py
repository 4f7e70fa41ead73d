"""The experts' outputs straight into the streams, for few tokens on a GPU: one launch for three."""

from __future__ import annotations

from strata_cli.engine.device.base import Launch, Stream, Tensor
from strata_cli.engine.kernels.hyper import expect_inject
from strata_cli.engine.kernels.matmul import FEW_TOKENS
from strata_cli.engine.kernels.matmul_several import gpu_kernel
from strata_cli.engine.kernels.moe import CombineOperands
from strata_cli.engine.kernels.products import Unit
from strata_cli.engine.kernels.shapes import expect

NORM_THREADS = 256
MOST_COLUMNS = 12 * NORM_THREADS
UNIT = Unit("hyper.cu", "combine_write_norm", ())


def can_combine_write(stream: Stream, x: Tensor, weight: Tensor) -> bool:
    """Whether ``combine_write_norm`` takes streams x and a norm's weight."""
    num_tokens, _, size = x.shape
    is_few = stream.shared_bytes > 0 and 0 < num_tokens <= FEW_TOKENS
    is_aligned = size % 4 == 0 and (x.address | weight.address) % 16 == 0
    return is_few and is_aligned and size <= MOST_COLUMNS


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
        stream: where it runs; ``can_combine_write`` said yes.
        operands: of ``combine``.
        x: as of ``stream_write_norm``.
        inject: as of ``stream_write_norm``.
        weight: as of ``stream_write_norm``.
        eps: as of ``stream_write_norm``.
        normed: as of ``stream_write_norm``.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    num_tokens, num_streams, size = x.shape
    num_pairs_each = operands.check(num_tokens, size)
    parts = expect_inject("combine_write_norm inject", inject, num_tokens, num_streams)
    expect("combine_write_norm weight", weight, (num_streams * size,))
    expect("combine_write_norm normed", normed, (num_tokens, num_streams * size))
    launch = Launch(
        items=1,
        grid=(num_tokens * num_streams, 1, 1),
        block=(NORM_THREADS, 1, 1),
        extents=(num_pairs_each, num_streams, size, *parts),
        early=True,
    )
    stream.launch(gpu_kernel(UNIT), launch, *operands, x, inject, weight, eps, normed)
