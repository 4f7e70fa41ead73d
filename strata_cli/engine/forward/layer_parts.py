"""The parts of a layer as launches, in order, and all that the launches of each depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.attention import attention
from strata_cli.engine.forward.batch import Batch
from strata_cli.engine.forward.delta_net import gated_delta_net
from strata_cli.engine.forward.feeding import ExpertFeed, ResidentFeed
from strata_cli.engine.forward.hyper_connections import (
    norms_itself,
    read_streams,
    write_experts,
    write_product,
)
from strata_cli.engine.forward.mixture import mix_experts
from strata_cli.engine.forward.ngram_embedding import add_ngrams
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.patterns import Operands


class LayerPass(NamedTuple):
    """A layer's share of a pass.

    Attributes:
        layer: its number.
        batch: the rows.
        x: their residual streams, [T, S, D], updated in place.
        feed: brings the routed experts; None: they are where the weights say.
    """

    layer: int
    batch: Batch
    x: Tensor
    feed: ExpertFeed | None = None


class LayerPart(NamedTuple):
    """One of the parts.

    Attributes:
        name: of it.
        enqueue: enqueues its launches.
        operands: weights of a layer that they work with, and what else they depend on but for the
            pass, the sequence's state and scratch. The more, the fewer layers are alike; what were
            missing would be mistaken for the same.
        is_fed: they depend on who brings the experts, and not on sequences; others the reverse.
    """

    name: str
    enqueue: Callable[[ModelOnStream, LayerPass], None]
    operands: Callable[[ModelOnStream, int], Operands]
    is_fed: bool = False


def _add_ngrams(model: ModelOnStream, own: LayerPass) -> None:
    weights = model.weights.layers[own.layer].ngram
    if weights is not None:
        add_ngrams(model, weights, own.batch, own.x)


def _ngram_operands(model: ModelOnStream, index: int) -> Operands:
    return Operands.of("ngrams", model.weights.layers[index].ngram)


def _mix(model: ModelOnStream, own: LayerPass) -> None:
    """Layers follow each other: each leaves x normed for the next, unless that norms it itself."""
    index, batch, x, _ = own
    layer = model.weights.layers[index]
    is_normed = _norm_ahead(model, index, x) is not None
    y = read_streams(model, layer.mixer_read, x, is_normed=is_normed)
    if layer.gdn is not None:
        last = gated_delta_net(model, index, layer.gdn, batch, y)
    else:
        assert layer.attention is not None
        last = attention(model, index, layer.attention, batch, y)
    norm = None if norms_itself(model, layer.ffn_read, x) else layer.ffn_read.norm
    write_product(model, x, last, y.inject, norm)


def _mixer_operands(model: ModelOnStream, index: int) -> Operands:
    layer, rope = model.weights.layers[index], model.weights.rope
    has_before = _has_norm_ahead(model, index)
    own = (layer.mixer_read, layer.gdn, layer.attention, layer.ffn_read)
    return Operands.of("mixer", own, rope, model.spec.index_ratio[index], has_before)


def _mix_experts(model: ModelOnStream, own: LayerPass) -> None:
    index, batch, x, feed = own
    layer = model.weights.layers[index]
    is_normed = not norms_itself(model, layer.ffn_read, x)
    y = read_streams(model, layer.ffn_read, x, is_normed=is_normed)
    feed = feed or _residents(model, batch.num_tokens)
    combined = mix_experts(model, index, layer.moe, y, feed, is_recorded=batch.is_recorded)
    write_experts(model, x, combined, y.inject, _norm_ahead(model, index + 1, x))


def _expert_operands(model: ModelOnStream, index: int) -> Operands:
    layers, following = model.weights.layers, index + 1
    read = layers[following].mixer_read if _has_norm_ahead(model, following) else None
    return Operands.of("experts", layers[index].ffn_read, layers[index].moe, read)


def _has_norm_ahead(model: ModelOnStream, index: int) -> bool:
    """Whether the layer before may norm what a layer reads first.

    Not of the first layer, nor where a layer changes the streams before it reads them.
    """
    layers = model.weights.layers
    return 0 < index < len(layers) and layers[index].ngram is None


def _norm_ahead(model: ModelOnStream, index: int, x: Tensor) -> Tensor | None:
    """The norm of a layer's first read of streams x if the layer before already does it.

    Not where the read does it itself.
    """
    if not _has_norm_ahead(model, index):
        return None
    read = model.weights.layers[index].mixer_read
    return None if norms_itself(model, read, x) else read.norm


def _residents(model: ModelOnStream, num_tokens: int) -> ExpertFeed:
    experts = [layer.moe.experts for layer in model.weights.layers]
    return ResidentFeed(experts, num_tokens * model.spec.num_experts_per_tok)


NGRAMS = LayerPart("ngrams", _add_ngrams, _ngram_operands)
MIXER = LayerPart("mixer", _mix, _mixer_operands)
EXPERTS = LayerPart("experts", _mix_experts, _expert_operands, is_fed=True)
