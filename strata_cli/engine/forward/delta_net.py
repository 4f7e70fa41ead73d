"""A gated delta net as launches."""

from __future__ import annotations

from strata_cli.engine.forward.batch import Batch, rows_of
from strata_cli.engine.forward.hyper_connections import LastProduct, LayerInput
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.state import GdnState
from strata_cli.engine.forward.weights import GdnWeights
from strata_cli.engine.kernels.delta_rule import delta_rule
from strata_cli.engine.kernels.gdn import causal_conv_silu
from strata_cli.engine.kernels.matmul_several import (
    Product,
    can_convolve,
    matmul_several,
    matmul_several_conv,
)
from strata_cli.engine.kernels.state_segments import conv_segments, delta_rule_segments
from strata_cli.engine.kernels.stream_write import HeadNorm


def gated_delta_net(
    model: ModelOnStream, index: int, weights: GdnWeights, batch: Batch, read: LayerInput
) -> LastProduct:
    """Enqueue a layer's recurrence, its states advanced.

    Returns:
        the product that makes its output, not enqueued yet.
    """
    take, num, stream = model.workspace.take, batch.num_tokens, model.stream
    qkv, conv, z = take("qkv", num), take("conv", num), take("z", num)
    others = (
        Product(weights.gate, z),
        Product(weights.alpha, take("alpha", num)),
        Product(weights.beta, take("beta", num)),
    )
    convolved = (Product(weights.qkv, conv), *others)
    if len(batch.segments) == 1 and can_convolve(stream, convolved, num, weights.conv):
        state = batch.segments[0].gdn(index)
        matmul_several_conv(stream, read.values, convolved, state.conv, weights.conv)
        _go_on(model, weights, state, slice(0, num))
    else:
        products = (Product(weights.qkv, qkv), *others)
        matmul_several(stream, read.values, products, read.rounded)
        _recur(model, index, weights, batch)
    heads = HeadNorm(z, weights.norm, model.spec.rms_eps)
    scratch = model.workspace.take_all("qkv")
    return LastProduct(take("delta", num), weights.out, scratch, heads)


def _recur(model: ModelOnStream, index: int, weights: GdnWeights, batch: Batch) -> None:
    """Enqueue the convolution and the delta rule of all segments."""
    take, num, stream = model.workspace.take, batch.num_tokens, model.stream
    qkv, conv = take("qkv", num), take("conv", num)
    together = batch.together(index)
    if together is not None:
        conv_segments(stream, qkv, together, weights.conv, conv)
        alpha, beta, delta = take("alpha", num), take("beta", num), take("delta", num)
        num_keys, eps = model.spec.gdn_num_key_heads, model.spec.rms_eps
        delta_rule_segments(
            stream, conv, alpha, beta, weights.a, weights.dt, together, delta, num_keys, eps
        )
        return
    for segment in batch.segments:
        state, part = segment.gdn(index), slice(segment.start, segment.stop)
        rows, own_conv = rows_of(qkv, part), rows_of(conv, part)
        causal_conv_silu(stream, rows, state.conv, weights.conv, own_conv)
        _go_on(model, weights, state, part)


def _go_on(model: ModelOnStream, weights: GdnWeights, state: GdnState, part: slice) -> None:
    """Enqueue the delta rule of a segment's rows, convolved."""
    conv, alpha, beta, delta = (
        rows_of(model.workspace.take(name, part.stop), part)
        for name in ("conv", "alpha", "beta", "delta")
    )
    delta_rule(
        model.stream,
        conv,
        alpha,
        beta,
        weights.a,
        weights.dt,
        state.matrix,
        delta,
        model.spec.gdn_num_key_heads,
        model.spec.rms_eps,
    )
