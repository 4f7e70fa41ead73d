"""Gives every weight of a model its place in the memories that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata_cli.engine.device.arena import Store
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.experts.placing import ExpertHome, Stores
from strata_cli.engine.experts.resident import ExpertMatrices, load_experts
from strata_cli.engine.forward.weights import (
    AttentionWeights,
    GdnWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    NgramWeights,
    ReadWeights,
)
from strata_cli.engine.kernels.rope import rope_table
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.expected import NGRAM_TABLE
from strata_cli.engine.model.ngram_spec import NgramSpec
from strata_cli.engine.model.tensors import ModelFile


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the large parts of a model go; everything else goes to the device.

    Attributes:
        experts: the routed experts; not AUTO.
        is_table_mapped: the n-gram table stays in host memory, whose rows kernels read one by one.
    """

    experts: ExpertHome = ExpertHome.DEVICE
    is_table_mapped: bool = False


class WeightPlacer:
    """Places tensors of one model file by name."""

    def __init__(self, model: ModelFile, stores: Stores, placement: Placement) -> None:
        self.model = model
        self.stores = stores
        self.placement = placement

    def matrix(self, name: str, store: Store | None = None) -> Weight:
        """A matrix [rows, cols] in the file's own quantization; a vector counts as one row."""
        info = self.model.tensor(name)
        rows = info.shape[0] if len(info.shape) == 2 else 1
        place = (store or self.stores.device).add((info.nbytes,), np.uint8, lambda: info.data)
        return Weight(place, info.qtype, rows, info.shape[-1])

    def vector(self, name: str) -> Tensor:
        """A small tensor as float32, in its file shape."""
        shape = self.model.tensor(name).shape
        return self.stores.device.add(shape, np.float32, lambda: self.model.floats(name))

    def numbers(self, values: tuple[int, ...]) -> Tensor:
        """Integers as int64."""
        return self.stores.device.add(
            (len(values),), np.int64, lambda: np.array(values, dtype=np.int64)
        )

    def table(self) -> Weight:
        """The n-gram table."""
        is_mapped = self.placement.is_table_mapped
        return self.matrix(NGRAM_TABLE, self.stores.mapped if is_mapped else None)


def place_weights(
    model: ModelFile,
    stores: Stores,
    placement: Placement,
    context_tokens: int,
    experts: Sequence[ExpertMatrices] | None = None,
) -> ModelWeights:
    """Give every trunk tensor its place.

    Args:
        model: an opened, checked model file; it must stay open until the stores are filled, and
            as long as the result where they use its bytes in place.
        stores: where to; closing the result closes their buffers.
        placement: what goes to which of them.
        context_tokens: positions that the rope table covers.
        experts: of each layer, where they have their places already.
    """
    spec = model.spec
    placer = WeightPlacer(model, stores, placement)
    embed = placer.matrix("token_embd.weight")
    head = embed if spec.tied_output else placer.matrix("output.weight")
    layers = tuple(
        _place_layer(placer, layer, None if experts is None else experts[layer])
        for layer in range(spec.num_layers)
    )
    rope = stores.device.add(
        (context_tokens, spec.rotary_dim // 2, 2),
        np.float32,
        lambda: rope_table(context_tokens, spec.rotary_dim, spec.rope_theta),
    )
    final_read = _place_read(placer, "output_hc", with_inject=False)
    buffers = (*stores.device.buffers, *stores.mapped.buffers)
    return ModelWeights(embed, head, final_read, layers, rope, buffers)


def _place_read(placer: WeightPlacer, prefix: str, *, with_inject: bool = True) -> ReadWeights:
    norm = placer.vector(f"{prefix}_norm.weight")
    return ReadWeights(
        norm=norm.reshape(norm.size),
        down=placer.matrix(f"{prefix}_down.weight"),
        up=placer.matrix(f"{prefix}_up.weight"),
        inject=placer.matrix(f"{prefix}_inject.weight") if with_inject else None,
    )


def _place_layer(placer: WeightPlacer, layer: int, experts: ExpertMatrices | None) -> LayerWeights:
    spec = placer.model.spec
    prefix = f"blk.{layer}."
    has_ngram = spec.ngram is not None and spec.ngram.layer == layer
    is_recurrent = spec.is_recurrent[layer]
    return LayerWeights(
        ngram=_place_ngram(placer, prefix, spec.ngram) if has_ngram and spec.ngram else None,
        mixer_read=_place_read(placer, prefix + "hc_attn"),
        gdn=_place_gdn(placer, prefix) if is_recurrent else None,
        attention=None if is_recurrent else _place_attention(placer, prefix),
        ffn_read=_place_read(placer, prefix + "hc_ffn"),
        moe=_place_moe(placer, layer, experts),
    )


def _place_gdn(placer: WeightPlacer, prefix: str) -> GdnWeights:
    return GdnWeights(
        qkv=placer.matrix(prefix + "attn_qkv.weight"),
        gate=placer.matrix(prefix + "attn_gate.weight"),
        conv=placer.vector(prefix + "ssm_conv1d.weight"),
        alpha=placer.matrix(prefix + "ssm_alpha.weight"),
        beta=placer.matrix(prefix + "ssm_beta.weight"),
        a=placer.vector(prefix + "ssm_a"),
        dt=placer.vector(prefix + "ssm_dt.bias"),
        norm=placer.vector(prefix + "ssm_norm.weight"),
        out=placer.matrix(prefix + "ssm_out.weight"),
    )


def _place_attention(placer: WeightPlacer, prefix: str) -> AttentionWeights:
    return AttentionWeights(
        q=placer.matrix(prefix + "attn_q.weight"),
        k=placer.matrix(prefix + "attn_k.weight"),
        v=placer.matrix(prefix + "attn_v.weight"),
        q_norm=placer.vector(prefix + "attn_q_norm.weight"),
        k_norm=placer.vector(prefix + "attn_k_norm.weight"),
        out=placer.matrix(prefix + "attn_output.weight"),
        indexer=IndexerWeights(
            q=placer.matrix(prefix + "indexer.q_proj.weight"),
            k=placer.matrix(prefix + "indexer.k_proj.weight"),
            q_norm=placer.vector(prefix + "indexer.q_norm.weight"),
            k_norm=placer.vector(prefix + "indexer.k_norm.weight"),
        ),
    )


def _place_moe(placer: WeightPlacer, layer: int, experts: ExpertMatrices | None) -> MoeWeights:
    prefix = f"blk.{layer}."
    if experts is None:
        experts = load_experts(placer.model, layer, placer.placement.experts, placer.stores)
    return MoeWeights(
        router=placer.matrix(prefix + "ffn_gate_inp.weight"),
        experts=experts,
        shared_logit=placer.matrix(prefix + "ffn_gate_inp_shexp.weight"),
        shared_gate=placer.matrix(prefix + "ffn_gate_shexp.weight"),
        shared_up=placer.matrix(prefix + "ffn_up_shexp.weight"),
        shared_down=placer.matrix(prefix + "ffn_down_shexp.weight"),
    )


def _place_ngram(placer: WeightPlacer, prefix: str, spec: NgramSpec) -> NgramWeights:
    return NgramWeights(
        spec=spec,
        table=placer.table(),
        multipliers=placer.numbers(spec.multipliers),
        offsets=placer.numbers(spec.head_offsets),
        sizes=placer.numbers(spec.head_sizes),
        key=placer.matrix(prefix + "ple_key.weight"),
        value=placer.matrix(prefix + "ple_value.weight"),
        norm_key=_flat(placer.vector(prefix + "ple_norm_key.weight")),
        norm_query=_flat(placer.vector(prefix + "ple_norm_query.weight")),
        norm_conv=_flat(placer.vector(prefix + "ple_norm_conv.weight")),
        conv=placer.vector(prefix + "ple_conv1d.weight"),
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.size)
