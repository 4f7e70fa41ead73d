"""What a qwen4exp model is: its dimensions, read from GGUF metadata and checked for consistency.

GGUF spellings end here; everything above speaks of ModelSpec. Beyond what llama.cpp refuses, keys
whose absence would load silently and compute something else (rope base, rotary dimensions) are
required too.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.model.keys import MAX_I32, Keys
from strata_cli.engine.model.metadata import Metadata
from strata_cli.engine.model.ngram_spec import NgramSpec, read_ngram
from strata_cli.errors import ModelError

ARCHITECTURE = "qwen4exp"
MAX_LAYERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The dimensions of a model. Layers are those of the trunk; the draft block is not among them.

    Attributes:
        name: general.name, or empty.
        num_layers: trunk layers.
        num_draft_layers: draft (next-token prediction) blocks behind the trunk.
        context_tokens: positions the model was made for.
        hidden_size: width of one residual stream.
        num_heads: query heads of an attention layer.
        num_kv_heads: key and value heads of an attention layer.
        head_dim: width of an attention head.
        rms_eps: epsilon of every RMS norm and of the l2 norm of GDN queries and keys.
        rope_theta: base of the rotary frequencies.
        rotary_dim: rotated dimensions at the start of a head.
        rope_sections: M-RoPE sections; without effect on text.
        num_experts: routed experts per layer.
        num_experts_per_tok: experts that one token is routed to.
        moe_intermediate_size: width of a routed expert, per layer.
        shared_intermediate_size: width of the shared expert.
        gdn_conv_kernel: taps of the gated delta net's convolution.
        gdn_head_dim: width of a gated-delta-net head, keys and values alike.
        gdn_num_key_heads: key and query heads.
        gdn_num_value_heads: value heads; head h uses key head h % gdn_num_key_heads.
        is_recurrent: per layer, True for gated delta net, False for attention.
        num_streams: residual streams (hyper-connections).
        stream_rank: rank of the stream mixers.
        indexer_num_heads: query heads of the indexer.
        indexer_head_dim: width of an indexer head.
        indexer_budget_tokens: tokens that attention may select.
        index_ratio: per layer, tokens per index block; 0 means dense attention or no attention.
        ngram: the n-gram embedding, if there is one.
        vocab_size: tokens in the vocabulary.
        tied_output: whether the embedding table is the output matrix too.
    """

    name: str
    num_layers: int
    num_draft_layers: int
    context_tokens: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rotary_dim: int
    rope_sections: tuple[int, ...]
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: tuple[int, ...]
    shared_intermediate_size: int
    gdn_conv_kernel: int
    gdn_head_dim: int
    gdn_num_key_heads: int
    gdn_num_value_heads: int
    is_recurrent: tuple[bool, ...]
    num_streams: int
    stream_rank: int
    indexer_num_heads: int
    indexer_head_dim: int
    indexer_budget_tokens: int
    index_ratio: tuple[int, ...]
    ngram: NgramSpec | None
    vocab_size: int
    tied_output: bool = False

    @property
    def stream_width(self) -> int:
        """All residual streams side by side."""
        return self.num_streams * self.hidden_size

    @property
    def gdn_key_width(self) -> int:
        """All key heads of a gated delta net side by side."""
        return self.gdn_num_key_heads * self.gdn_head_dim

    @property
    def gdn_value_width(self) -> int:
        """All value heads of a gated delta net side by side."""
        return self.gdn_num_value_heads * self.gdn_head_dim


def read_spec(metadata: Metadata) -> ModelSpec:
    """The dimensions that the metadata describes.

    Does not look at tensors: ``tied_output`` stays False until load_model_file has.

    Raises:
        ModelError: another architecture, or a key that is missing, of the wrong type, out of range,
            or at odds with another.

    Source: the qwen4exp conversion and llama.cpp's loader.
    """
    _check_architecture(metadata)
    keys = Keys(metadata, f"{ARCHITECTURE}.")
    block_count = keys.u32("block_count", high=MAX_LAYERS)
    # One draft block is all that any conversion writes and llama.cpp reads.
    num_draft = keys.u32("nextn_predict_layers", low=0, high=1, default=0)
    num_layers = keys.check_range("block_count", block_count, num_draft + 1, MAX_LAYERS) - num_draft
    hidden_size = keys.u32("embedding_length")
    vocab_size = _read_vocab_size(metadata)
    is_recurrent = _read_layer_kinds(keys, block_count, num_layers)
    budget = keys.u32("attention.indexer.top_k")
    spec = ModelSpec(
        name=_read_name(metadata),
        num_layers=num_layers,
        num_draft_layers=num_draft,
        context_tokens=keys.u32("context_length"),
        hidden_size=hidden_size,
        num_heads=keys.u32("attention.head_count"),
        num_kv_heads=keys.u32("attention.head_count_kv"),
        head_dim=_read_head_dim(keys, hidden_size),
        rms_eps=keys.f32("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.f32("rope.freq_base"),
        rotary_dim=keys.u32("rope.dimension_count", low=2),
        rope_sections=keys.integers("rope.dimension_sections", 4),
        num_experts=keys.u32("expert_count"),
        num_experts_per_tok=keys.u32("expert_used_count"),
        moe_intermediate_size=_read_expert_widths(keys, block_count, num_layers),
        shared_intermediate_size=keys.u32("expert_shared_feed_forward_length"),
        gdn_conv_kernel=keys.u32("ssm.conv_kernel"),
        gdn_head_dim=keys.u32("ssm.state_size"),
        gdn_num_key_heads=keys.u32("ssm.group_count"),
        gdn_num_value_heads=keys.u32("ssm.time_step_rank"),
        is_recurrent=is_recurrent,
        num_streams=keys.u32("hyper_connection.count", low=2),
        stream_rank=keys.u32("hyper_connection.low_rank"),
        indexer_num_heads=keys.u32("attention.indexer.head_count"),
        indexer_head_dim=keys.u32("attention.indexer.key_length"),
        indexer_budget_tokens=budget,
        index_ratio=_read_index_ratios(keys, block_count, is_recurrent, budget),
        ngram=read_ngram(keys, hidden_size, vocab_size, is_recurrent),
        vocab_size=vocab_size,
    )
    _check_consistency(keys, spec)
    return spec


def _check_architecture(metadata: Metadata) -> None:
    found = Keys(metadata, "").text("general.architecture")
    if found != ARCHITECTURE:
        raise ModelError(
            f"{metadata.origin} is a {found[:64]!r} model, an unknown architecture",
            hint=f"the architecture that runs here is {ARCHITECTURE}",
        )


def _read_vocab_size(metadata: Metadata) -> int:
    keys = Keys(metadata, "tokenizer.ggml.")
    return keys.check_range("tokens (their number)", keys.num_strings("tokens"), 1, MAX_I32)


def _read_name(metadata: Metadata) -> str:
    keys = Keys(metadata, "general.")
    return keys.text("name") if keys.has("name") else ""


def _read_head_dim(keys: Keys, hidden_size: int) -> int:
    heads = keys.u32("attention.head_count")
    default = hidden_size // heads if hidden_size % heads == 0 else None
    key_length = keys.u32("attention.key_length", default=default)
    value_length = keys.u32("attention.value_length", default=default)
    if key_length != value_length:
        raise keys.error(
            f"attention.key_length {key_length} and attention.value_length {value_length} differ"
        )
    return key_length


def _read_expert_widths(keys: Keys, block_count: int, num_layers: int) -> tuple[int, ...]:
    key = "expert_feed_forward_length"
    if keys.is_array(key):
        widths = keys.integers(key, block_count)[:num_layers]
        return tuple(keys.check_range(key, width, 1, MAX_I32) for width in widths)
    return (keys.u32(key),) * num_layers


def _read_layer_kinds(keys: Keys, block_count: int, num_layers: int) -> tuple[bool, ...]:
    """True for gated delta net. The explicit list overrides the interval, which must be sane."""
    interval = keys.u32("full_attention_interval", default=4)
    if keys.has("attention.recurrent_layers"):
        return keys.booleans("attention.recurrent_layers", block_count)[:num_layers]
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _read_index_ratios(
    keys: Keys, block_count: int, is_recurrent: tuple[bool, ...], budget: int
) -> tuple[int, ...]:
    """Tokens per index block; values on recurrent layers and the draft block mean nothing."""
    key = "attention.compress_ratios"
    if not keys.has(key):
        return (0,) * len(is_recurrent)
    if keys.is_array(key):
        stored = keys.integers(key, block_count)
    else:
        stored = (keys.u32_or_i32(key, 0, MAX_I32),) * block_count
    ratios = tuple(
        0 if recurrent else keys.check_range(key, ratio, 0, MAX_I32)
        for ratio, recurrent in zip(stored, is_recurrent, strict=False)
    )
    sparse = set(ratios) - {0}
    if len(sparse) > 1:
        raise keys.error(f"{key} has different ratios on its layers: {sorted(sparse)}")
    for ratio in sparse:
        if ratio == 1 or budget % ratio:
            raise keys.error(
                f"{key} is {ratio}; it must be above 1 and divide "
                f"attention.indexer.top_k, which is {budget}"
            )
    return ratios


def _check_consistency(keys: Keys, spec: ModelSpec) -> None:
    """Relations between keys; each line is a rule, what it says when broken, and nothing else."""
    inner = keys.u32("ssm.inner_size")
    rules = (
        (
            spec.num_experts_per_tok <= spec.num_experts,
            f"expert_used_count {spec.num_experts_per_tok} exceeds expert_count {spec.num_experts}",
        ),
        (
            spec.num_heads % spec.num_kv_heads == 0,
            f"attention.head_count {spec.num_heads} is no multiple of "
            f"attention.head_count_kv {spec.num_kv_heads}",
        ),
        (
            spec.gdn_num_value_heads % spec.gdn_num_key_heads == 0,
            f"ssm.time_step_rank {spec.gdn_num_value_heads} is no multiple of "
            f"ssm.group_count {spec.gdn_num_key_heads}",
        ),
        (
            inner == spec.gdn_value_width,
            f"ssm.inner_size {inner} is not ssm.time_step_rank times ssm.state_size, "
            f"{spec.gdn_num_value_heads} x {spec.gdn_head_dim}",
        ),
        (
            spec.rotary_dim % 2 == 0 and spec.rotary_dim <= spec.head_dim,
            f"rope.dimension_count {spec.rotary_dim} must be even and at most the head's "
            f"{spec.head_dim}",
        ),
        (
            spec.rotary_dim <= spec.indexer_head_dim,
            f"attention.indexer.key_length {spec.indexer_head_dim} is below "
            f"rope.dimension_count {spec.rotary_dim}",
        ),
        (
            all(section >= 0 for section in spec.rope_sections),
            f"rope.dimension_sections {list(spec.rope_sections)} has negative entries",
        ),
    )
    for holds, detail in rules:
        if not holds:
            raise keys.error(detail)
