"""The inject of the streams for few tokens on a GPU: beside the mix, in parts for the write.

Its bits are those of ``matmul`` with the same weights. As one of several products of the normed
streams its four long rows of float32 took longer than the three hundred of the others.
"""

from __future__ import annotations

from functools import lru_cache

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.hyper import COLUMNS, THREADS
from strata_cli.engine.kernels.products import Unit, dense_matrix, slice_cols
from strata_cli.engine.kernels.prompt_plan import has_thin_plan
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import QuantType

EIGHT = 8  # tokens of a warp
WARPS = THREADS // 32


def inject_parts(cols: int) -> int:
    """Parts of the inject of so many columns."""
    return blocks(cols, slice_cols(QuantType.F32, cols))


def can_mix_inject(stream: Stream, normed: Tensor, weight: Weight) -> bool:
    """Whether ``stream_mix_inject`` takes them: float32 weights, few tokens, and on a GPU."""
    matrix = dense_matrix(weight.qtype, weight.rows, weight.cols, weight.data.address)
    is_few = stream.shared_bytes > 0 and normed.shape[0] <= FEW_TOKENS
    return is_few and has_thin_plan(matrix, normed.address)


def stream_mix_inject(
    stream: Stream, gate: Tensor, normed: Tensor, out: Tensor, weight: Weight, parts: Tensor
) -> None:
    """Enqueue ``stream_mix``, and the product of the normed streams with the inject's weights.

    Args:
        stream: where it runs; ``can_mix_inject`` said yes.
        gate: float32 [T, S * D], before the sigmoid.
        normed: float32 [T, S * D].
        out: float32 [T, D], overwritten.
        weight: float32, N rows of S * D.
        parts: float32 [P, T, N], P as ``inject_parts``, overwritten: what ``stream_write`` takes.

    Raises:
        ShapeError: extents or types do not fit.
    """
    num_tokens, width = normed.shape
    size = out.shape[1]
    expect("stream_mix_inject normed", normed, (num_tokens, weight.cols))
    expect("stream_mix_inject gate", gate, normed.shape)
    expect("stream_mix_inject out", out, (num_tokens, size))
    num_parts = inject_parts(width)
    expect("stream_mix_inject parts", parts, (num_parts, num_tokens, weight.rows))
    slice_blocks = blocks(num_parts, WARPS) * blocks(num_tokens, EIGHT)
    launch = Launch(
        items=1,
        grid=(num_tokens * blocks(size, COLUMNS) + slice_blocks, 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_tokens, width // size, size, weight.rows, slice_cols(QuantType.F32, width)),
        early=True,
    )
    kernel = _kernel(dense_matrix(weight.qtype, weight.rows, width, 0).lane)
    stream.launch(kernel, launch, gate, normed, weight.data, out, parts)


@lru_cache(maxsize=8)
def _kernel(lane: int) -> Kernel:
    return gpu_kernel(Unit("inject.cu", f"stream_mix_inject<{lane}>", ()))
