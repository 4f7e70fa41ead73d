"""How every GGUF tensor of the demo model is made from the Hugging Face checkpoint, and back.

A rule takes rows (or columns) of one checkpoint tensor and applies an elementwise map; that covers
all converter transforms of the architecture: permuted value heads, split gate/up and indexer
projections, squeezed convolutions, norms stored as 1 + w, and decays stored as -exp(A_log).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tools.demo_model.architecture import DemoConfig
from tools.demo_model.checkpoint import Arrays

Map = Literal["same", "plus_one", "minus_exp"]
Index = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One GGUF tensor: `map(take(source, rows, axis))`.

    `squeeze` names the axis of length one that the checkpoint has and GGUF has not.
    """

    name: str
    source: str
    map: Map = "same"
    rows: Index | None = None
    axis: int = 0
    squeeze: int | None = None


def apply(rule: Rule, checkpoint: Arrays) -> NDArray[np.float32]:
    """Make the GGUF tensor of `rule` from checkpoint values, float32."""
    values = checkpoint[rule.source]
    if rule.rows is not None:
        values = np.take(values, rule.rows, axis=rule.axis)
    if rule.squeeze is not None:
        values = np.squeeze(values, axis=rule.squeeze)
    if rule.map == "plus_one":
        values = np.float32(1.0) + values
    elif rule.map == "minus_exp":
        values = -np.exp(values)
    return np.ascontiguousarray(values, dtype=np.float32)


def restore(rule: Rule, values: NDArray[np.float32], checkpoint: Arrays) -> None:
    """Write the values of a GGUF tensor back into `checkpoint`, undoing `apply`."""
    if rule.map == "plus_one":
        values = values - np.float32(1.0)
    elif rule.map == "minus_exp":
        values = np.log(-values)
    if rule.squeeze is not None:
        values = np.expand_dims(values, axis=rule.squeeze)
    target = checkpoint[rule.source]
    if rule.rows is None:
        target[...] = values
    else:
        place: list[slice | Index] = [slice(None)] * target.ndim
        place[rule.axis] = rule.rows
        target[tuple(place)] = values


def value_head_rows(config: DemoConfig, width: int) -> Index:
    """Rows of a value-head axis in GGUF order: value head j then uses key head j % key heads.

    The checkpoint keeps the value heads of one key head together; each head has `width` rows.
    """
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    rows = np.arange(value_heads * width).reshape(key_heads, value_heads // key_heads, width)
    return np.ascontiguousarray(rows.transpose(1, 0, 2).reshape(-1))


def rules(config: DemoConfig) -> Iterator[Rule]:
    """Yield a rule for every tensor of the GGUF file, in file order."""
    yield Rule(name="token_embd.weight", source="model.embed_tokens.weight")
    yield Rule(
        name="per_layer_token_embd.weight",
        source=f"model.layers.{config.ple_layer}.ple.ple_embedding.ngram_embedding.weight",
    )
    for layer in range(config.num_hidden_layers):
        yield from layer_rules(config, layer)
    yield from mixer_rules("output_hc", "model.hyper_connection_mixer.")


def layer_rules(config: DemoConfig, layer: int) -> Iterator[Rule]:
    """Yield the rules of one layer."""
    block, source = f"blk.{layer}.", f"model.layers.{layer}."
    if layer == config.ple_layer:
        yield from ple_rules(block, source + "ple.")
    yield from mixer_rules(block + "hc_attn", source + "attn_hyper_connection.", inject=True)
    if config.is_attention(layer):
        yield from attention_rules(config, block, source + "self_attn.")
    else:
        yield from gdn_rules(config, block, source + "linear_attn.")
    yield from mixer_rules(block + "hc_ffn", source + "mlp_hyper_connection.", inject=True)
    yield from moe_rules(config, block, source + "mlp.")


def mixer_rules(name: str, source: str, *, inject: bool = False) -> Iterator[Rule]:
    """Yield the rules of one stream mixer; only those inside layers write back (`inject`)."""
    yield Rule(name=f"{name}_norm.weight", source=source + "hc_norm.weight", map="plus_one")
    yield Rule(name=f"{name}_down.weight", source=source + "input_mix_weight_down.weight")
    yield Rule(name=f"{name}_up.weight", source=source + "input_mix_weight_up.weight")
    if inject:
        yield Rule(name=f"{name}_inject.weight", source=source + "block_inject_weight.weight")


def ple_rules(block: str, source: str) -> Iterator[Rule]:
    """Yield the rules of the n-gram embedding (its table is a tensor of the whole file)."""
    yield Rule(name=block + "ple_key.weight", source=source + "key_proj.weight")
    yield Rule(name=block + "ple_value.weight", source=source + "value_proj.weight")
    for part in ("key", "query", "conv"):
        norm = f"ple_norm_{part}.weight"
        yield Rule(name=block + norm, source=source + f"norm_{part}.weight", map="plus_one")
    yield Rule(name=block + "ple_conv1d.weight", source=source + "conv1d.weight", squeeze=1)


def attention_rules(config: DemoConfig, block: str, source: str) -> Iterator[Rule]:
    """Yield the rules of a QSA layer; q rows keep their [query | gate] order per head."""
    for part, gguf in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("v_proj", "attn_v")):
        yield Rule(name=f"{block}{gguf}.weight", source=f"{source}{part}.weight")
    yield Rule(name=block + "attn_output.weight", source=source + "o_proj.weight")
    for part in ("q", "k"):
        norm = f"attn_{part}_norm.weight"
        yield Rule(name=block + norm, source=f"{source}{part}_norm.weight", map="plus_one")
    queries = config.indexer_n_heads * config.indexer_head_dim
    both = source + "indexer.index_qk_proj.weight"
    key = np.arange(queries, queries + config.indexer_head_dim)
    yield Rule(name=block + "indexer.q_proj.weight", source=both, rows=np.arange(queries))
    yield Rule(name=block + "indexer.k_proj.weight", source=both, rows=key)
    for part in ("q", "k"):
        norm = f"{source}indexer.{part}_layernorm.weight"
        yield Rule(name=f"{block}indexer.{part}_norm.weight", source=norm, map="plus_one")


def gdn_rules(config: DemoConfig, block: str, source: str) -> Iterator[Rule]:
    """Yield the rules of a gated delta net layer, value heads permuted."""
    values = value_head_rows(config, config.linear_key_head_dim)
    heads = value_head_rows(config, 1)
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    qkv = np.concatenate([np.arange(keys), keys + values])
    yield Rule(name=block + "attn_qkv.weight", source=source + "in_proj_qkv.weight", rows=qkv)
    yield Rule(name=block + "attn_gate.weight", source=source + "in_proj_z.weight", rows=values)
    yield Rule(
        name=block + "ssm_conv1d.weight", source=source + "conv1d.weight", rows=qkv, squeeze=1
    )
    yield Rule(name=block + "ssm_alpha.weight", source=source + "in_proj_a.weight", rows=heads)
    yield Rule(name=block + "ssm_beta.weight", source=source + "in_proj_b.weight", rows=heads)
    yield Rule(name=block + "ssm_a", source=source + "A_log", rows=heads, map="minus_exp")
    yield Rule(name=block + "ssm_dt.bias", source=source + "dt_bias", rows=heads)
    # The one norm whose checkpoint weight is used as it is, not as 1 + w.
    yield Rule(name=block + "ssm_norm.weight", source=source + "norm.weight")
    yield Rule(
        name=block + "ssm_out.weight", source=source + "out_proj.weight", rows=values, axis=1
    )


def moe_rules(config: DemoConfig, block: str, source: str) -> Iterator[Rule]:
    """Yield the rules of the mixture of experts; the fused projection has its gate rows first."""
    width = config.moe_intermediate_size
    fused = source + "experts.gate_up_proj"
    yield Rule(name=block + "ffn_gate_inp.weight", source=source + "gate.weight")
    yield Rule(name=block + "ffn_gate_exps.weight", source=fused, rows=np.arange(width), axis=1)
    up = np.arange(width, 2 * width)
    yield Rule(name=block + "ffn_up_exps.weight", source=fused, rows=up, axis=1)
    yield Rule(name=block + "ffn_down_exps.weight", source=source + "experts.down_proj")
    gate = block + "ffn_gate_inp_shexp.weight"
    yield Rule(name=gate, source=source + "shared_expert_gate.weight", squeeze=0)
    for part in ("gate", "up", "down"):
        name = f"{block}ffn_{part}_shexp.weight"
        yield Rule(name=name, source=f"{source}shared_expert.{part}_proj.weight")
