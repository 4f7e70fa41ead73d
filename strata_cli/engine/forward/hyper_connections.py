"""Reads from the residual streams, and writes to them, as launches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.weights import ReadWeights
from strata_cli.engine.kernels import hyper, moe
from strata_cli.engine.kernels.combine_write import (
    can_write_few,
    combine_write_norm,
    write_norm_few,
)
from strata_cli.engine.kernels.gdn import gated_norm
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.matmul_gated import (
    can_gate,
    can_norm,
    matmul_normed,
    matmul_silu,
)
from strata_cli.engine.kernels.matmul_several import Product, matmul_several
from strata_cli.engine.kernels.matmul_some import can_mix_some, matmul_mix_some
from strata_cli.engine.kernels.stream_read import (
    can_inject_beside,
    can_mix_beside,
    can_norm_beside,
    inject_parts,
    matmul_inject,
    matmul_silu_mix,
    read_few,
)
from strata_cli.engine.kernels.stream_squeeze import Inject, can_squeeze_some, squeeze_some
from strata_cli.engine.kernels.stream_write import (
    HeadNorm,
    StreamWrite,
    can_write_beside,
    combine_write,
    matmul_write,
)
from strata_cli.engine.kernels.weight import Weight


class LayerInput(NamedTuple):
    """What a mixer or the experts read, float32 [T, D], perhaps also f16; inject for the write."""

    values: Tensor
    rounded: Tensor | None
    inject: Tensor


class LastProduct(NamedTuple):
    """A mixer's last product, whose output is written to the streams.

    Attributes:
        x: float32 [T, K]; of a delta net, its heads before their norm.
        weight: D rows of K.
        scratch: as of ``matmul``.
        heads: how they are normed; None: x is multiplied as it is.
    """

    x: Tensor
    weight: Weight
    scratch: Tensor
    heads: HeadNorm | None = None


def norms_itself(model: ModelOnStream, weights: ReadWeights, x: Tensor) -> bool:
    """Whether a read of streams x [T, S, D] norms them itself: nobody need have done it before."""
    stream = model.stream
    can_read = weights.inject is None or can_inject_beside(stream, x, weights.inject)
    return can_read and can_norm_beside(stream, x, weights.norm, weights.down)


def read_streams(
    model: ModelOnStream, weights: ReadWeights, x: Tensor, *, is_normed: bool
) -> LayerInput:
    """Enqueue the mix that a layer part reads of streams x [T, S, D], and its write's weights.

    Args:
        model: on its stream.
        weights: of the read.
        x: the streams.
        is_normed: the workspace holds their norm already.
    """
    take, num, stream = model.workspace.take, x.shape[0], model.stream
    normed, y, eps = take("normed", num), take("y", num), model.spec.rms_eps
    if not is_normed and norms_itself(model, weights, x):
        low, inject = take("low", num), _inject_parts(model, weights, num)
        read_few(stream, x, weights.norm, eps, normed, weights.down, low, weights.inject, inject)
    else:
        if not is_normed:
            hyper.stream_norm(stream, x, weights.norm, eps, normed, model.room_for_rounded(normed))
        some = _read_some(model, weights, normed, y)
        if some is not None:
            return some
        low, inject = _squeeze(model, weights, normed)
    if can_mix_beside(stream, low, model.spec.num_streams, weights.up):
        matmul_silu_mix(stream, low, model.spec.num_streams, weights.up, normed, y)
        return LayerInput(y, None, inject)
    gate = take("stream_gate", num)
    if can_gate(stream, num):
        matmul_silu(stream, low, model.spec.num_streams, weights.up, gate)
    else:
        hyper.lowrank_silu(stream, low, model.spec.num_streams)
        matmul(stream, low, weights.up, gate, model.rounded(low))
    rounded = model.room_for_rounded(y)
    hyper.stream_mix(stream, gate, normed, y, rounded)
    return LayerInput(y, rounded, inject)


def _read_some(
    model: ModelOnStream, weights: ReadWeights, normed: Tensor, y: Tensor
) -> LayerInput | None:
    """Enqueue a read of the normed streams [T, S * D] of some tokens; None: not so many."""
    take, num, stream = model.workspace.take, normed.shape[0], model.stream
    rounded, num_streams = model.room_for_rounded(normed), model.spec.num_streams
    if rounded is None or not can_mix_some(stream, weights.up, num_streams, num):
        return None
    scratch = model.workspace.take_all("stream_gate")
    if not can_squeeze_some(stream, rounded, weights.down, weights.inject, scratch):
        return None
    room, inject = take("low", num), None
    low = Tensor.over(room.buffer, room.shape, np.float16, room.offset_bytes)
    if weights.inject is not None:
        shape = (inject_parts(normed.shape[1]), num, weights.inject.rows)
        parts = model.workspace.take_shaped("inject_parts", *shape)
        inject = Inject(weights.inject, parts)
    squeeze_some(stream, normed, rounded, weights.down, inject, num_streams, scratch, low)
    half = model.room_for_rounded(y)  # over normed's, which is used up
    assert half is not None
    matmul_mix_some(stream, low, weights.up, normed, y, half)
    return LayerInput(y, half, take("inject", num) if inject is None else inject.parts)


def _squeeze(model: ModelOnStream, weights: ReadWeights, normed: Tensor) -> tuple[Tensor, Tensor]:
    """Enqueue the products of the normed streams [T, S * D]: low [T, R], and the inject."""
    take, num, stream = model.workspace.take, normed.shape[0], model.stream
    low, inject = take("low", num), take("inject", num)
    if weights.inject is not None and can_inject_beside(stream, normed, weights.inject):
        parts = _inject_parts(model, weights, num)
        matmul_inject(stream, normed, weights.down, low, weights.inject, parts)
        return low, parts
    products = [Product(weights.down, low)]
    if weights.inject is not None:
        products.append(Product(weights.inject, inject))
    rounded = model.room_for_rounded(normed)
    matmul_several(stream, normed, products, rounded, model.workspace.take_all("stream_gate"))
    return low, inject


def _inject_parts(model: ModelOnStream, weights: ReadWeights, num_tokens: int) -> Tensor:
    """Room for the parts of an inject, float32 [P, T, S]; for that of none, any."""
    if weights.inject is None:
        return model.workspace.take("inject", num_tokens)
    shape = (inject_parts(weights.inject.cols), num_tokens, weights.inject.rows)
    return model.workspace.take_shaped("inject_parts", *shape)


def write_product(
    model: ModelOnStream, x: Tensor, last: LastProduct, inject: Tensor, norm: Tensor | None
) -> None:
    """Enqueue a mixer's last product and its write to the streams, as ``write_streams`` does."""
    stream, take, num = model.stream, model.workspace.take, x.shape[0]
    own, heads, write = last.x, last.heads, StreamWrite(x, inject)
    norms_heads = heads is not None and can_norm(stream, own, heads.weight.shape[0])
    if norm is None and (heads is None or norms_heads) and can_write_beside(stream, write):
        matmul_write(stream, own, last.weight, write, heads)
        return
    out = take("out", num)
    if heads is not None and norms_heads:
        matmul_normed(stream, own, *heads, last.weight, out)
    else:
        rounded = model.room_for_rounded(own)
        if heads is not None:
            own, raw = take("gated", num), own
            gated_norm(stream, raw, *heads, own, rounded)
        else:
            model.rounded(own)
        matmul(stream, own, last.weight, out, rounded, last.scratch)
    write_streams(model, x, out, inject, norm)


def write_streams(
    model: ModelOnStream, x: Tensor, out: Tensor, inject: Tensor, norm: Tensor | None
) -> None:
    """Enqueue a layer's write to the streams.

    Args:
        model: on its stream.
        x: the streams, float32 [T, S, D].
        out: of the layer part, float32 [T, D].
        inject: of its read.
        norm: of the read that follows at once, done as well; None: that does it, or none follows.
    """
    if norm is None:
        hyper.stream_write(model.stream, x, out, inject)
        return
    normed = model.workspace.take("normed", x.shape[0])
    rounded, eps = model.room_for_rounded(normed), model.spec.rms_eps
    if can_write_few(model.stream, x, inject, norm):
        write_norm_few(model.stream, x, out, inject, norm, eps, normed, rounded)
        return
    hyper.stream_write_norm(model.stream, x, out, inject, norm, eps, normed, rounded)


def write_experts(
    model: ModelOnStream,
    x: Tensor,
    combined: moe.CombineOperands,
    inject: Tensor,
    norm: Tensor | None,
) -> None:
    """Enqueue the sum of a layer's experts, and its write to the streams, as ``write_streams``."""
    num, stream, write = x.shape[0], model.stream, StreamWrite(x, inject)
    if norm is None and can_write_beside(stream, write):
        combine_write(stream, combined, write)
        return
    if norm is not None and can_write_few(stream, x, inject, norm):
        normed, eps = model.workspace.take("normed", num), model.spec.rms_eps
        rounded = model.room_for_rounded(normed)
        combine_write_norm(stream, combined, x, inject, norm, eps, normed, rounded)
        return
    out = model.workspace.take("out", num)
    moe.combine(stream, *combined, out)
    write_streams(model, x, out, inject, norm)
