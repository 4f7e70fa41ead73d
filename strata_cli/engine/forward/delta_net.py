"""A gated delta net as launches."""

from __future__ import annotations

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.batch import Batch, rows_of
from strata_cli.engine.forward.hyper_connections import LayerInput
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.weights import GdnWeights
from strata_cli.engine.kernels import gdn as gdn_kernels
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.matmul_several import Product, matmul_several
from strata_cli.engine.kernels.segments import conv_segments, delta_rule_segments


def gated_delta_net(
    model: ModelOnStream, index: int, weights: GdnWeights, batch: Batch, read: LayerInput
) -> Tensor:
    """Enqueue a layer's recurrence, its states advanced; its output [T, D], in the workspace."""
    take, num, stream = model.workspace.take, batch.num_tokens, model.stream
    qkv, conv, z = take("qkv", num), take("conv", num), take("z", num)
    alpha, beta, delta = take("alpha", num), take("beta", num), take("delta", num)
    y, rounded = read.values, read.rounded
    products = (
        *(Product(weights.qkv, qkv), Product(weights.gate, z)),
        *(Product(weights.alpha, alpha), Product(weights.beta, beta)),
    )
    matmul_several(stream, y, products, rounded)
    num_keys, eps = model.spec.gdn_num_key_heads, model.spec.rms_eps
    together = batch.together(index)
    if together is not None:
        conv_segments(stream, qkv, together, weights.conv, conv)
        delta_rule_segments(
            stream, conv, alpha, beta, weights.a, weights.dt, together, delta, num_keys, eps
        )
    for segment in () if together is not None else batch.segments:
        state = segment.gdn(index)
        part = slice(segment.start, segment.stop)
        gdn_kernels.causal_conv_silu(
            stream, rows_of(qkv, part), state.conv, weights.conv, rows_of(conv, part)
        )
        gdn_kernels.delta_rule(
            stream,
            rows_of(conv, part),
            rows_of(alpha, part),
            rows_of(beta, part),
            weights.a,
            weights.dt,
            state.matrix,
            rows_of(delta, part),
            num_keys,
            eps,
        )
    gated, out = take("gated", num), take("out", num)
    rounded = model.room_for_rounded(gated)
    gdn_kernels.gated_norm(stream, delta, z, weights.norm, eps, gated, rounded)
    matmul(stream, gated, weights.out, out, rounded, model.workspace.take_all("qkv"))
    return out
