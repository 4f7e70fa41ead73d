"""Which type each tensor is stored as: those of a published IQ3_XXS build, layer by layer."""

from __future__ import annotations

from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import BLOCK, QuantType

_ALWAYS_F32 = ("conv1d.weight", "ffn_gate_inp.weight", "inject.weight")

# What is in no line here is Q8_0.
_TYPES = {
    "output.weight": QuantType.Q6_K,
    "per_layer_token_embd.weight": QuantType.IQ4_NL,
    "attn_gate.weight": QuantType.Q6_K,
    "attn_k.weight": QuantType.Q6_K,
    "attn_v.weight": QuantType.Q6_K,
    "attn_output.weight": QuantType.Q5_K,
    "indexer.q_proj.weight": QuantType.BF16,
    "indexer.k_proj.weight": QuantType.BF16,
    "ple_key.weight": QuantType.Q6_K,
    "ple_value.weight": QuantType.Q5_K,
    "ffn_gate_shexp.weight": QuantType.Q6_K,
    "ffn_up_shexp.weight": QuantType.Q6_K,
    "ffn_gate_exps.weight": QuantType.IQ3_XXS,
    "ffn_up_exps.weight": QuantType.IQ3_XXS,
    "ffn_down_exps.weight": QuantType.IQ4_NL,
}

# Layers that the build spends more on.
_LAYER_TYPES = {
    (2, "ffn_gate_exps.weight"): QuantType.IQ4_XS,
    (2, "ffn_up_exps.weight"): QuantType.IQ4_XS,
    **{(layer, "ffn_down_exps.weight"): QuantType.Q8_0 for layer in (2, 4, 30, 46, 47)},
}


def storage_type(name: str, shape: Shape, layer: int | None) -> QuantType:
    """How a tensor is stored.

    Args:
        name: without the ``blk.N.`` in front.
        shape: numpy order; rows that are no multiple of the type's block become Q8_0.
        layer: the layer it belongs to, if any.
    """
    if len(shape) == 1 or name.endswith(_ALWAYS_F32):
        return QuantType.F32
    qtype = _LAYER_TYPES.get((layer or 0, name), _TYPES.get(name, QuantType.Q8_0))
    return qtype if shape[-1] % BLOCK[qtype].weights == 0 else QuantType.Q8_0
