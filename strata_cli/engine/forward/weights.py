"""The model's weights, grouped as the layers use them.

Quantized matrices keep the file's bytes; kernels dequantize them as they read. Small float vectors
(norms, convolutions, decays) are float32 tensors of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Buffer, Tensor
from strata_cli.engine.experts.resident import ExpertMatrices
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.ngram_spec import NgramSpec


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """One hyper-connection read: norm [S*D], down [R, S*D], up [S*D, R], inject [S, S*D]."""

    norm: Tensor
    down: Weight
    up: Weight
    inject: Weight | None


@dataclass(frozen=True, slots=True)
class GdnWeights:
    """Gated delta net: qkv [2kd+vd, D], gate [vd, D], conv [2kd+vd, K], alpha/beta [nv, D]."""

    qkv: Weight
    gate: Weight
    conv: Tensor
    alpha: Weight
    beta: Weight
    a: Tensor
    dt: Tensor
    norm: Tensor
    out: Weight


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """QSA's block indexer: q [heads*dim, D], k [dim, D], norms [dim]."""

    q: Weight
    k: Weight
    q_norm: Tensor
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Gated attention: q [heads*2*dim, D] (query rows then gate rows per head), k, v, out."""

    q: Weight
    k: Weight
    v: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight
    indexer: IndexerWeights


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router [E, D], routed experts, and the shared expert with its scalar gate [1, D]."""

    router: Weight
    experts: ExpertMatrices
    shared_logit: Weight
    shared_gate: Weight
    shared_up: Weight
    shared_down: Weight


@dataclass(frozen=True, slots=True)
class NgramWeights:
    """Hashed n-gram embedding: table [rows, width], key [S*D, D], value [D, D], conv [S*D, K]."""

    spec: NgramSpec
    table: Weight
    multipliers: Tensor
    offsets: Tensor
    sizes: Tensor
    key: Weight
    value: Weight
    norm_key: Tensor
    norm_query: Tensor
    norm_conv: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; exactly one of gdn and attention is set."""

    ngram: NgramWeights | None
    mixer_read: ReadWeights
    gdn: GdnWeights | None
    attention: AttentionWeights | None
    ffn_read: ReadWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the forward pass reads. embed and head are [V, D]; rope [context, rotary/2, 2]."""

    embed: Weight
    head: Weight
    final_read: ReadWeights
    layers: tuple[LayerWeights, ...]
    rope: Tensor
    buffers: tuple[Buffer, ...]

    def close(self) -> None:
        """Gives the memory back. Safe to call twice."""
        for buffer in self.buffers:
            buffer.close()
