"""Which tensors a qwen4exp model consists of, and their shapes.

Shapes are in numpy order: a matrix is (rows, columns) = (outputs, inputs), experts come first.
Source: the qwen4exp conversion.
"""

from __future__ import annotations

from typing import TypeAlias

from strata_cli.engine.model.ngram_spec import NgramSpec
from strata_cli.engine.model.spec import ModelSpec

Shape: TypeAlias = tuple[int, ...]

TOKEN_TABLE = "token_embd.weight"
OUTPUT = "output.weight"
NGRAM_TABLE = "per_layer_token_embd.weight"
EXPERT_GATE = "ffn_gate_exps.weight"
EXPERT_UP = "ffn_up_exps.weight"
EXPERT_GATE_UP = "ffn_gate_up_exps.weight"  # one tensor instead of both, gate rows first
EXPERT_DOWN = "ffn_down_exps.weight"

DRAFT_ONLY_NAMES = frozenset(
    f"nextn.{part}.weight"
    for part in (
        "enorm",
        "hnorm",
        "eh_proj",
        "hc_head_norm",
        "hc_head_down",
        "hc_head_up",
        "embed_tokens",
        "shared_head_head",
    )
)


def global_shapes(spec: ModelSpec, *, tied_output: bool) -> dict[str, Shape]:
    """Tensors outside the layers, the n-gram table excepted (its row count is free)."""
    shapes: dict[str, Shape] = {TOKEN_TABLE: (spec.vocab_size, spec.hidden_size)}
    if not tied_output:
        shapes[OUTPUT] = (spec.vocab_size, spec.hidden_size)
    return shapes | _mixer_shapes(spec, "output_hc")


def layer_shapes(spec: ModelSpec, layer: int, *, fused_gate_up: bool) -> dict[str, Shape]:
    """Tensors of one trunk layer, without the ``blk.N.`` in front."""
    shapes = _stream_shapes(spec) | _moe_shapes(spec, layer, fused_gate_up=fused_gate_up)
    shapes |= gdn_shapes(spec) if spec.is_recurrent[layer] else attention_shapes(spec)
    if spec.ngram is not None and spec.ngram.layer == layer:
        shapes |= _ngram_shapes(spec, spec.ngram)
    return shapes


def draft_names(spec: ModelSpec) -> frozenset[str]:
    """Names that a draft block may have, without the ``blk.N.`` in front."""
    names = DRAFT_ONLY_NAMES | set(_stream_shapes(spec)) | set(attention_shapes(spec))
    for fused in (False, True):
        names |= set(_moe_shapes(spec, 0, fused_gate_up=fused))
    return frozenset(names)


def attention_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Tensors of an attention mixer; the rows of attn_q are query and gate of each head in turn."""
    hidden, head_dim, index_dim = spec.hidden_size, spec.head_dim, spec.indexer_head_dim
    query, keys = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    return {
        "attn_q.weight": (2 * query, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        "attn_output.weight": (hidden, query),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "indexer.q_proj.weight": (spec.indexer_num_heads * index_dim, hidden),
        "indexer.k_proj.weight": (index_dim, hidden),
        "indexer.q_norm.weight": (index_dim,),
        "indexer.k_norm.weight": (index_dim,),
    }


def gdn_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Tensors of a gated delta net mixer; the rows of attn_qkv are queries, keys, values."""
    hidden, value_heads = spec.hidden_size, spec.gdn_num_value_heads
    channels = 2 * spec.gdn_key_width + spec.gdn_value_width
    return {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (spec.gdn_value_width, hidden),
        "ssm_conv1d.weight": (channels, spec.gdn_conv_kernel),
        "ssm_alpha.weight": (value_heads, hidden),
        "ssm_beta.weight": (value_heads, hidden),
        "ssm_a": (value_heads,),
        "ssm_dt.bias": (value_heads,),
        "ssm_norm.weight": (spec.gdn_head_dim,),
        "ssm_out.weight": (hidden, spec.gdn_value_width),
    }


def _mixer_shapes(spec: ModelSpec, prefix: str) -> dict[str, Shape]:
    width, rank = spec.stream_width, spec.stream_rank
    return {
        f"{prefix}_norm.weight": (width,),
        f"{prefix}_down.weight": (rank, width),
        f"{prefix}_up.weight": (width, rank),
    }


def _stream_shapes(spec: ModelSpec) -> dict[str, Shape]:
    inject = (spec.num_streams, spec.stream_width)
    return {
        **_mixer_shapes(spec, "hc_attn"),
        "hc_attn_inject.weight": inject,
        **_mixer_shapes(spec, "hc_ffn"),
        "hc_ffn_inject.weight": inject,
    }


def _moe_shapes(spec: ModelSpec, layer: int, *, fused_gate_up: bool) -> dict[str, Shape]:
    hidden, experts = spec.hidden_size, spec.num_experts
    width, shared = spec.moe_intermediate_size[layer], spec.shared_intermediate_size
    shapes: dict[str, Shape] = {
        "ffn_gate_inp.weight": (experts, hidden),
        EXPERT_DOWN: (experts, hidden, width),
        "ffn_gate_inp_shexp.weight": (hidden,),
        "ffn_gate_shexp.weight": (shared, hidden),
        "ffn_up_shexp.weight": (shared, hidden),
        "ffn_down_shexp.weight": (hidden, shared),
    }
    if fused_gate_up:
        return shapes | {EXPERT_GATE_UP: (experts, 2 * width, hidden)}
    return shapes | {EXPERT_GATE: (experts, width, hidden), EXPERT_UP: (experts, width, hidden)}


def _ngram_shapes(spec: ModelSpec, ngram: NgramSpec) -> dict[str, Shape]:
    hidden, width = spec.hidden_size, spec.stream_width
    return {
        "ple_key.weight": (width, hidden),
        "ple_value.weight": (hidden, hidden),
        "ple_norm_key.weight": (width,),
        "ple_norm_query.weight": (width,),
        "ple_norm_conv.weight": (width,),
        "ple_conv1d.weight": (width, ngram.conv_kernel),
    }
