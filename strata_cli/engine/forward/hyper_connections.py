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
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.matmul_gated import can_gate, matmul_silu
from strata_cli.engine.kernels.matmul_several import Product, matmul_several
from strata_cli.engine.kernels.matmul_some import can_mix_some, matmul_mix_some
from strata_cli.engine.kernels.stream_read import (
    can_inject_beside,
    can_mix_beside,
    inject_parts,
    matmul_inject,
    matmul_silu_mix,
)
from strata_cli.engine.kernels.stream_squeeze import Inject, can_squeeze_some, squeeze_some


class LayerInput(NamedTuple):
    """What a mixer or the experts read, float32 [T, D], perhaps also f16; inject for the write."""

    values: Tensor
    rounded: Tensor | None
    inject: Tensor


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
    normed, y = take("normed", num), take("y", num)
    if not is_normed:
        rounded = model.room_for_rounded(normed)
        hyper.stream_norm(stream, x, weights.norm, model.spec.rms_eps, normed, rounded)
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
        shape = (inject_parts(normed.shape[1]), num, weights.inject.rows)
        parts = model.workspace.take_shaped("inject_parts", *shape)
        matmul_inject(stream, normed, weights.down, low, weights.inject, parts)
        return low, parts
    products = [Product(weights.down, low)]
    if weights.inject is not None:
        products.append(Product(weights.inject, inject))
    rounded = model.room_for_rounded(normed)
    matmul_several(stream, normed, products, rounded, model.workspace.take_all("stream_gate"))
    return low, inject


def write_streams(
    model: ModelOnStream, x: Tensor, out: Tensor, inject: Tensor, norm: Tensor | None
) -> None:
    """Enqueue a layer's write to the streams, and the norm of the read that follows at once."""
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
    """Enqueue the sum of a layer's experts, and its write to the streams."""
    num, stream = x.shape[0], model.stream
    if norm is not None and can_write_few(stream, x, inject, norm):
        normed, eps = model.workspace.take("normed", num), model.spec.rms_eps
        rounded = model.room_for_rounded(normed)
        combine_write_norm(stream, combined, x, inject, norm, eps, normed, rounded)
        return
    out = model.workspace.take("out", num)
    moe.combine(stream, *combined, out)
    write_streams(model, x, out, inject, norm)
