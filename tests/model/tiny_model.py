"""Writes small random qwen4exp models of any dimensions, valid down to the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model import expected
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.metadata import ValueType
from strata_cli.engine.model.quants import BLOCK, QuantType
from strata_cli.engine.model.spec import ModelSpec, read_spec
from tests.model.gguf_writer import GgufBuilder
from tests.model.random_weights import random_rows, store_plain

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|image_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
_USER_DEFINED = SPECIALS[4:]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TypeOf = Callable[[str, Shape], QuantType]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyDims:
    """Dimensions of a tiny model; the defaults are a complete little model of 0.8 MB.

    Attributes:
        ratio: index ratio of the attention layers; None leaves the key out (dense attention).
        ff: expert width, or one width per layer.
        recurrent: per layer, True for gated delta net; None leaves it to ``interval``.
        ple_layer: layer with the n-gram embedding, or None for a model without.
        matrices, experts, table: types of the matrices, the experts, the n-gram table; a row that
            is no multiple of the type's block falls back to F16.
        type_of: overrides the three, by tensor name and shape.
        shards: files to write; more than one needs a path ending in -00001-of-0000N.gguf.
    """

    seed: int = 1
    vocab: int = 288
    hidden: int = 48
    layers: int = 4
    interval: int = 4
    recurrent: tuple[bool, ...] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary: int = 8
    theta: float = 1e7
    context: int = 512
    gdn_key_heads: int = 2
    gdn_value_heads: int = 4
    gdn_dim: int = 8
    gdn_conv: int = 4
    streams: int = 4
    rank: int = 12
    experts_count: int = 6
    top_k: int = 2
    ff: int | tuple[int, ...] = 16
    shared_ff: int = 24
    indexer_heads: int = 4
    indexer_dim: int = 16
    budget: int = 16
    ratio: int | None = 4
    ratio_as_scalar: bool = False
    ple_layer: int | None = 1
    ple_conv: int = 4
    ngram: int = 3
    heads_per_ngram: int = 2
    ngram_base: int = 31
    tied: bool = False
    fused: bool = False
    draft: bool = False
    pre: str = "qwen35"
    matrices: QuantType = QuantType.F32
    experts: QuantType = QuantType.F32
    table: QuantType = QuantType.F32
    type_of: TypeOf | None = None
    shards: int = 1


def write_tiny_model(path: Path, **dims: Any) -> Path:
    """Write a random model with the given TinyDims fields; returns the path to open."""
    chosen = TinyDims(**dims)
    builder = build_tiny_model(chosen)
    if chosen.shards == 1:
        return builder.write(path)
    return _write_shards(path, builder, chosen.shards)


def build_tiny_model(dims: TinyDims) -> GgufBuilder:
    """The model as a builder, for tests that change something before writing it."""
    builder = GgufBuilder()
    _add_dimensions(builder, dims)
    _add_ngram_keys(builder, dims)
    _add_tokenizer(builder, dims)
    rng = np.random.default_rng(dims.seed)
    for name, shape in tiny_shapes(dims, read_spec(builder.metadata())).items():
        qtype = _type_of(dims, name, shape)
        data = _random_tensor(rng, qtype, name, shape)
        builder.add_tensor(name, int(qtype), shape, data.tobytes())
    return builder


def tiny_shapes(dims: TinyDims, spec: ModelSpec) -> dict[str, Shape]:
    """All tensors of the model, by full name."""
    shapes = expected.global_shapes(spec, tied_output=dims.tied)
    for layer in range(spec.num_layers):
        of_layer = expected.layer_shapes(spec, layer, fused_gate_up=dims.fused)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in of_layer.items()}
    if spec.ngram is not None:
        rows = -(-spec.ngram.min_rows // 8) * 8
        shapes[expected.NGRAM_TABLE] = (rows, spec.ngram.row_width)
    if dims.draft:
        block = f"blk.{spec.num_layers}."
        shapes |= {block + name: shape for name, shape in _draft_shapes(spec).items()}
    return shapes


def _draft_shapes(spec: ModelSpec) -> dict[str, Shape]:
    like_attention = replace(spec, is_recurrent=(False,) * spec.num_layers, ngram=None)
    width, rank, hidden = spec.stream_width, spec.stream_rank, spec.hidden_size
    return {
        **expected.layer_shapes(like_attention, 0, fused_gate_up=False),
        "nextn.enorm.weight": (hidden,),
        "nextn.hnorm.weight": (width,),
        "nextn.eh_proj.weight": (hidden, 2 * hidden),
        "nextn.hc_head_norm.weight": (width,),
        "nextn.hc_head_down.weight": (rank, width),
        "nextn.hc_head_up.weight": (width, rank),
    }


def _add_dimensions(builder: GgufBuilder, dims: TinyDims) -> None:
    builder.add("general.architecture", ValueType.STRING, "qwen4exp")
    builder.add("general.name", ValueType.STRING, f"tiny {dims.seed}")
    blocks = dims.layers + dims.draft
    for key, value in {
        "block_count": blocks,
        "context_length": dims.context,
        "embedding_length": dims.hidden,
        "attention.head_count": dims.heads,
        "attention.head_count_kv": dims.kv_heads,
        "attention.key_length": dims.head_dim,
        "attention.value_length": dims.head_dim,
        "rope.dimension_count": dims.rotary,
        "expert_count": dims.experts_count,
        "expert_used_count": dims.top_k,
        "expert_shared_feed_forward_length": dims.shared_ff,
        "ssm.conv_kernel": dims.gdn_conv,
        "ssm.state_size": dims.gdn_dim,
        "ssm.group_count": dims.gdn_key_heads,
        "ssm.time_step_rank": dims.gdn_value_heads,
        "ssm.inner_size": dims.gdn_value_heads * dims.gdn_dim,
        "full_attention_interval": dims.interval,
        "hyper_connection.count": dims.streams,
        "hyper_connection.low_rank": dims.rank,
        "attention.indexer.head_count": dims.indexer_heads,
        "attention.indexer.key_length": dims.indexer_dim,
        "attention.indexer.top_k": dims.budget,
    }.items():
        builder.add(f"qwen4exp.{key}", ValueType.U32, value)
    builder.add("qwen4exp.attention.layer_norm_rms_epsilon", ValueType.F32, 1e-6)
    builder.add("qwen4exp.rope.freq_base", ValueType.F32, dims.theta)
    half = dims.rotary // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3, 0]
    builder.add("qwen4exp.rope.dimension_sections", ValueType.I32, sections)
    widths = dims.ff if isinstance(dims.ff, int) else [*dims.ff, *dims.ff[:1] * dims.draft]
    builder.add("qwen4exp.expert_feed_forward_length", ValueType.U32, widths)
    if dims.draft:
        builder.add("qwen4exp.nextn_predict_layers", ValueType.U32, 1)
    _add_layer_kinds(builder, dims)


def _add_layer_kinds(builder: GgufBuilder, dims: TinyDims) -> None:
    recurrent = [(layer + 1) % dims.interval != 0 for layer in range(dims.layers)]
    if dims.recurrent is not None:
        recurrent = list(dims.recurrent)
        stored = recurrent + [False] * dims.draft
        builder.add("qwen4exp.attention.recurrent_layers", ValueType.BOOL, stored)
    key = "qwen4exp.attention.compress_ratios"
    if dims.ratio is not None and dims.ratio_as_scalar:
        builder.add(key, ValueType.U32, dims.ratio)
    elif dims.ratio is not None:
        ratios = [0 if is_recurrent else dims.ratio for is_recurrent in recurrent]
        builder.add(key, ValueType.I32, ratios + [0] * dims.draft)


def _add_ngram_keys(builder: GgufBuilder, dims: TinyDims) -> None:
    if dims.ple_layer is None:
        return
    heads = (dims.ngram - 1) * dims.heads_per_ngram
    sizes = _primes_from(dims.ngram_base, heads)
    rng = np.random.default_rng(dims.seed + 1000)
    most = (2**63 - 1) // dims.vocab // 2
    multipliers = [2 * int(rng.integers(1, most)) + 1 for _ in range(dims.ngram)]
    builder.add("qwen4exp.ple.layers", ValueType.I32, [dims.ple_layer])
    for key, value in {
        "ple.ngram_size": dims.ngram,
        "ple.heads_per_ngram": dims.heads_per_ngram,
        "ple.conv_kernel": dims.ple_conv,
        "ple.eos_token_id": dims.vocab - len(SPECIALS),
        "ple.image_token_id": dims.vocab - len(SPECIALS) + 3,
        "embedding_length_per_layer_input": dims.hidden // heads,
    }.items():
        builder.add(f"qwen4exp.{key}", ValueType.U32, value)
    offsets = [sum(sizes[:head]) for head in range(heads)]
    builder.add("qwen4exp.ple.layer_multipliers", ValueType.U64, multipliers)
    builder.add("qwen4exp.ple.head_offsets", ValueType.U64, offsets)
    builder.add("qwen4exp.ple.head_vocab_sizes", ValueType.U64, sizes)


def _primes_from(start: int, count: int) -> list[int]:
    primes: list[int] = []
    number = start
    while len(primes) < count:
        if all(number % factor for factor in range(2, math.isqrt(number) + 1)):
            primes.append(number)
        number += 1
    return primes


def _add_tokenizer(builder: GgufBuilder, dims: TinyDims) -> None:
    num_merges = dims.vocab - 256 - len(SPECIALS)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    merges = [f"{a} {b}" for a in letters for b in letters][:num_merges]
    assert 0 <= num_merges == len(merges), "vocab must be 264 to 940"
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), *SPECIALS]
    kinds = [4 if token in _USER_DEFINED else 3 if token in SPECIALS else 1 for token in tokens]
    special = {token: dims.vocab - len(SPECIALS) + i for i, token in enumerate(SPECIALS)}
    builder.add("tokenizer.ggml.model", ValueType.STRING, "gpt2")
    builder.add("tokenizer.ggml.pre", ValueType.STRING, dims.pre)
    builder.add("tokenizer.ggml.tokens", ValueType.STRING, tokens)
    builder.add("tokenizer.ggml.token_type", ValueType.I32, kinds)
    builder.add("tokenizer.ggml.merges", ValueType.STRING, merges)
    builder.add("tokenizer.ggml.bos_token_id", ValueType.U32, special["<|endoftext|>"])
    builder.add("tokenizer.ggml.eos_token_id", ValueType.U32, special["<|im_end|>"])
    builder.add("tokenizer.ggml.padding_token_id", ValueType.U32, special["<|endoftext|>"])
    builder.add("tokenizer.ggml.add_bos_token", ValueType.BOOL, False)
    builder.add("tokenizer.chat_template", ValueType.STRING, CHAT_TEMPLATE)


def byte_alphabet() -> list[str]:
    """GPT-2's visible stand-ins for the 256 bytes: themselves where printable, else from U+0100."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]


def _type_of(dims: TinyDims, name: str, shape: Shape) -> QuantType:
    always_f32 = ("ssm_conv1d.weight", "ffn_gate_inp.weight")
    if len(shape) < 2 or "norm" in name or name.endswith(always_f32):
        return QuantType.F32
    if dims.type_of is not None:
        qtype = dims.type_of(name, shape)
    elif name == expected.NGRAM_TABLE:
        qtype = dims.table
    else:
        qtype = dims.experts if "_exps." in name else dims.matrices
    return qtype if shape[-1] % BLOCK[qtype].weights == 0 else QuantType.F16


def _random_tensor(
    rng: np.random.Generator, qtype: QuantType, name: str, shape: Shape
) -> NDArray[np.uint8]:
    """Values of a size at which every part of the model matters."""
    if "norm" in name:
        values = 1 + 0.2 * rng.standard_normal(shape)
    elif name.endswith("ssm_a"):
        values = -rng.uniform(0.05, 2.5, shape)
    elif name.endswith("ssm_dt.bias"):
        values = rng.standard_normal(shape) - 1
    else:
        return random_rows(rng, qtype, math.prod(shape[:-1]), shape[-1], _spread(name, shape))
    return store_plain(QuantType.F32, values.astype(np.float32))


def _spread(name: str, shape: Shape) -> float:
    if name in (expected.TOKEN_TABLE, expected.NGRAM_TABLE):
        return 1.0
    if "conv1d" in name:
        return 0.5
    gains = {
        "output.weight": 3.0,
        "ffn_gate_inp.weight": 2.5,
        "inject.weight": 4.0,
        "_down.weight": 4.0,
        "_up.weight": 1.5,
        "down_exps.weight": 2.0,
        "attn_q.weight": 1.6,
        "attn_k.weight": 1.6,
    }
    gain = next((gain for ending, gain in gains.items() if name.endswith(ending)), 1.0)
    return gain / math.sqrt(shape[-1])


def _write_shards(path: Path, whole: GgufBuilder, count: int) -> Path:
    """The first shard takes the metadata and no tensors, the others a share of the tensors each."""
    assert path.name.endswith(f"-00001-of-{count:05}.gguf")
    share = -(-len(whole.tensors) // (count - 1))
    for shard in range(count):
        part = GgufBuilder(values=dict(whole.values) if shard == 0 else {})
        part.add("split.no", ValueType.U16, shard)
        part.add("split.count", ValueType.U16, count)
        part.add("split.tensors.count", ValueType.I32, len(whole.tensors))
        if shard > 0:
            part.tensors = whole.tensors[(shard - 1) * share : shard * share]
        name = path.name.replace("-00001-of-", f"-{shard + 1:05}-of-")
        part.write(path.with_name(name))
    return path
