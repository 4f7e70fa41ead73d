"""Kernels that carry the running states of all segments on in one launch, on a GPU.

Convolutions and recurrences of gated delta nets and of the n-gram embedding, with the bits of one
segment at a time.
"""

from __future__ import annotations

import numpy as np

from strata_cli.engine.device.base import Launch, Stream, Tensor
from strata_cli.engine.kernels import delta_rule, gdn, ngram
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.products import WARP, Unit
from strata_cli.engine.kernels.segments import Segments
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank


def conv_segments(
    stream: Stream, u: Tensor, segments: Segments, weight: Tensor, out: Tensor
) -> None:
    """Enqueue ``causal_conv_silu`` of every segment, with its running state's first part.

    Args:
        stream: enqueues here.
        u: float32 [T, channels].
        segments: of a layer with a running state.
        weight: taps, oldest first, float32 [channels, K].
        out: float32 [T, channels], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("conv_segments u", u, 2)
    expect_rank("conv_segments weight", weight, 2)
    (num_tokens, channels), num_taps = u.shape, weight.shape[1]
    expect("conv_segments weight", weight, (channels, num_taps))
    expect("conv_segments out", out, u.shape)
    segments.check("conv_segments", num_tokens)
    run = max(gdn.RUN_TOKENS, num_taps - 1)
    launch = Launch(
        items=1,
        grid=(blocks(channels, gdn.THREADS), blocks(segments.longest, run), len(segments.counts)),
        block=(gdn.THREADS, 1, 1),
        extents=(channels, run),
        early=True,
    )
    kernel = gpu_kernel(Unit(gdn.SOURCE, f"causal_conv_silu_segments<{num_taps}>", ()))
    stream.launch(kernel, launch, u, segments.table, weight, out)


def delta_rule_segments(
    stream: Stream,
    c: Tensor,
    alpha: Tensor,
    beta: Tensor,
    a: Tensor,
    dt: Tensor,
    segments: Segments,
    out: Tensor,
    num_key_heads: int,
    eps: float,
) -> None:
    """Enqueue ``delta_rule`` of every segment, with its running state's second part.

    Running states of steps begin at multiples of 16 bytes.

    Args:
        stream: enqueues here.
        c: float32 [T, 2 kd + vd]; used up.
        alpha: float32 [T, nv]; used up.
        beta: float32 [T, nv]; used up.
        a: float32 [nv].
        dt: float32 [nv].
        segments: of a layer with a running state.
        out: float32 [T, nv * dim], overwritten.
        num_key_heads: nk.
        eps: added to the sum of squares.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("delta_rule_segments alpha", alpha, 2)
    expect_rank("delta_rule_segments out", out, 2)
    num_tokens, num_values = alpha.shape
    dim = out.shape[1] // num_values
    expect("delta_rule_segments out", out, (num_tokens, num_values * dim))
    expect("delta_rule_segments c", c, (num_tokens, (2 * num_key_heads + num_values) * dim))
    expect("delta_rule_segments beta", beta, alpha.shape)
    expect("delta_rule_segments a", a, (num_values,))
    expect("delta_rule_segments dt", dt, (num_values,))
    segments.check("delta_rule_segments", num_tokens)
    rows = (c, alpha, beta, a, dt, segments.table, out)
    if segments.are_steps and delta_rule.can_step(dim, c, out):
        launch = Launch(
            items=1,
            grid=(dim // delta_rule.STEP_COLUMNS, num_values, num_tokens),
            block=(delta_rule.STEP_THREADS, 1, 1),
            extents=(num_key_heads, num_values),
            early=True,
        )
        kernel = gpu_kernel(
            Unit(delta_rule.SOURCE, f"delta_step_segments<{dim // delta_rule.SLICES}>", ())
        )
        stream.launch(kernel, launch, *rows, eps)
        return
    delta_rule.prepare_delta_rule(stream, c, alpha, beta, a, dt, num_key_heads, dim, eps)
    shape = delta_rule.DeltaRuleShape.of(delta_rule.STEPS, dim)
    launch = Launch(
        items=1,
        grid=(blocks(dim, shape.block_columns), num_values, len(segments.counts)),
        block=(WARP * shape.warps, 1, 1),
        shared_bytes=shape.shared_bytes,
        extents=(num_key_heads, num_values, dim),
        early=True,
    )
    function = f"delta_rule_segments<{shape.keys}, {shape.warps}>"
    kernel = gpu_kernel(Unit(delta_rule.SOURCE, function, ()))
    stream.launch(kernel, launch, c, alpha, beta, segments.table, out)


def ngram_rows_segments(
    stream: Stream,
    ids: Tensor,
    segments: Segments,
    multipliers: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    eos_token_id: int,
    rows_out: Tensor,
) -> None:
    """Enqueue ``ngram_rows`` of every segment, with its running state's first part.

    Args:
        stream: enqueues here.
        ids: int32 [T].
        segments: of the n-gram embedding.
        multipliers: int64 [max_n].
        offsets: int64 [H].
        sizes: int64 [H].
        eos_token_id: the id that cuts n-grams.
        rows_out: int64 [T, H], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    look_back, num_heads = multipliers.size - 1, offsets.size
    expect("ngram_rows_segments ids", ids, (ids.size,), np.int32)
    for name, numbers in (("offsets", offsets), ("sizes", sizes)):
        expect(f"ngram_rows_segments {name}", numbers, (num_heads,), np.int64)
    expect("ngram_rows_segments multipliers", multipliers, (look_back + 1,), np.int64)
    expect("ngram_rows_segments rows_out", rows_out, (ids.size, num_heads), np.int64)
    segments.check("ngram_rows_segments", ids.size)
    launch = Launch(
        items=1,
        grid=(blocks(segments.longest, ngram.THREADS), len(segments.counts), 1),
        block=(ngram.THREADS, 1, 1),
        extents=(look_back, num_heads),
        early=True,
    )
    hashes = (multipliers, offsets, sizes, eos_token_id)
    kernel = gpu_kernel(Unit(ngram.SOURCE, "ngram_rows_segments", ()))
    stream.launch(kernel, launch, ids, segments.table, *hashes, rows_out)


def ngram_conv_segments(
    stream: Stream,
    gated: Tensor,
    w_conv: Tensor,
    segments: Segments,
    weight: Tensor,
    dilation: int,
    eps: float,
    x: Tensor,
) -> None:
    """Enqueue ``ngram_conv`` of every segment, with its running state's second part.

    Args:
        stream: enqueues here.
        gated: float32 [T, S * D].
        w_conv: norm weight, float32 [S * D].
        segments: of the n-gram embedding.
        weight: taps, oldest first, float32 [S * D, K].
        dilation: tokens from one tap to the next, at least 1.
        eps: added to the mean square.
        x: residual streams, float32 [T, S, D], in place.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("ngram_conv_segments x", x, 3)
    expect_rank("ngram_conv_segments weight", weight, 2)
    num_tokens, num_streams, size = x.shape
    channels, num_taps = num_streams * size, weight.shape[1]
    expect("ngram_conv_segments gated", gated, (num_tokens, channels))
    expect("ngram_conv_segments w_conv", w_conv, (channels,))
    expect("ngram_conv_segments weight", weight, (channels, num_taps))
    segments.check("ngram_conv_segments", num_tokens)
    past = (num_taps - 1) * dilation
    run = max(ngram.RUN_TOKENS, past)
    launch = Launch(
        items=1,
        grid=(num_streams, blocks(segments.longest, run), len(segments.counts)),
        block=(ngram.THREADS, 1, 1),
        shared_bytes=4 * (run + past),
        extents=(num_streams, size, num_taps, run),
        early=True,
    )
    kernel = gpu_kernel(Unit(ngram.SOURCE, "ngram_conv_segments", ()))
    stream.launch(kernel, launch, gated, w_conv, segments.table, weight, dilation, eps, x)
