"""Writes to the streams of one token on a GPU, inside the product whose output is written.

The norm of what was written is left to the read behind it (``stream_read.read_few``). Bits are
those of the launches one by one.
"""

from __future__ import annotations

from typing import NamedTuple

from strata_cli.engine.device.base import KernelArgument, Launch, Stream, Tensor
from strata_cli.engine.kernels.few import Extra, few_plan
from strata_cli.engine.kernels.gpu import gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.hyper import expect_inject
from strata_cli.engine.kernels.moe import CombineOperands
from strata_cli.engine.kernels.products import WARP, Unit, matrix_of
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight

MOST_STREAMS = 8
MOST_INJECT_FLOATS = 192  # of a token: parts times streams
COMBINE_COLUMNS = 256  # of a block that adds up experts
SOURCE = "combine_write.cu"


class HeadNorm(NamedTuple):
    """What ``gated_norm`` makes of heads: their gates z, the weight [dim], eps."""

    z: Tensor
    weight: Tensor
    eps: float


class StreamWrite(NamedTuple):
    """Where an output goes: streams, float32 [T, S, D], by an inject as of ``stream_write``."""

    x: Tensor
    inject: Tensor


def can_write_beside(stream: Stream, write: StreamWrite) -> bool:
    """Whether the functions here take the write: one token's, and on a GPU."""
    num_tokens, num_streams, size = write.x.shape
    is_one = stream.shared_bytes > 0 and num_tokens == 1
    is_aligned = size % 4 == 0 and write.x.address % 16 == 0
    fits = num_streams <= MOST_STREAMS and write.inject.size <= MOST_INJECT_FLOATS
    return is_one and is_aligned and fits


def matmul_write(
    stream: Stream, x: Tensor, weight: Weight, write: StreamWrite, heads: HeadNorm | None = None
) -> None:
    """Enqueue ``matmul``, or ``matmul_normed``, and ``stream_write`` of its output.

    Args:
        stream: where it runs; ``can_write_beside`` said yes.
        x: activations, float32 [1, K].
        weight: D rows of K.
        write: where the output goes.
        heads: of x, which are normed first, where ``can_norm``; None: x as it is.

    Raises:
        ShapeError: extents or types do not fit.
    """
    _, num_streams, size = write.x.shape
    expect("matmul_write x", x, (1, weight.cols))
    expect("matmul_write streams", write.x, (1, num_streams, weight.rows))
    parts = expect_inject("matmul_write inject", write.inject, 1, num_streams)
    matrix = matrix_of(weight)
    dim = 0 if heads is None else heads.weight.shape[0]
    extra = Extra(head_dim=dim, written=num_streams)
    plan = few_plan((matrix,), 1, 1, gpu_of(stream), extra=extra)
    arguments: list[KernelArgument] = [x]
    numbers = [int(weight.qtype), 1, size, weight.cols]
    if heads is not None:
        expect("matmul_write z", heads.z, x.shape)
        arguments += heads
        numbers.append(dim)
    arguments += (weight.data, write.x, write.x, write.inject)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, *arguments, *numbers, *parts)


def combine_write(stream: Stream, operands: CombineOperands, write: StreamWrite) -> None:
    """Enqueue ``combine``, then ``stream_write`` of its output, where ``can_write_beside``.

    Raises:
        ShapeError: extents or types do not fit.
    """
    num_tokens, num_streams, size = write.x.shape
    parts = expect_inject("combine_write inject", write.inject, num_tokens, num_streams)
    threads = COMBINE_COLUMNS // 4
    launch = Launch(
        items=1,
        grid=(blocks(size, COMBINE_COLUMNS), num_tokens, 1),
        block=(threads + WARP, 1, 1),
        extents=(operands.check(num_tokens, size), size, *parts),
        early=True,
    )
    kernel = gpu_kernel(Unit(SOURCE, f"combine_write<{num_streams}>", ()))
    stream.launch(kernel, launch, *operands, *write)
