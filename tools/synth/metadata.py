"""Writes a model's dimensions and tokenizer as GGUF keys."""

from __future__ import annotations

from collections.abc import Sequence

from gguf import GGUFValueType as ValueType
from gguf import GGUFWriter

from strata_cli.engine.model.ngram_spec import NgramSpec
from strata_cli.engine.model.spec import ARCHITECTURE, ModelSpec
from tools.synth.presets import ATTENTION_INTERVAL
from tools.synth.vocabulary import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, make_vocabulary


def write_metadata(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Add every key that describes the model; read_spec reads the same spec back."""
    writer.add_type("model")
    writer.add_name(spec.name)
    writer.add_description("Random weights for measuring an engine; its answers are noise.")
    writer.add_quantization_version(2)
    _write_dimensions(writer, spec)
    if spec.ngram is not None:
        _write_ngram(writer, spec.ngram)
    _write_tokenizer(writer, spec.vocab_size)


def _write_dimensions(writer: GGUFWriter, spec: ModelSpec) -> None:
    for key, number in {
        "block_count": spec.num_layers,
        "context_length": spec.context_tokens,
        "embedding_length": spec.hidden_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "rope.dimension_count": spec.rotary_dim,
        "expert_count": spec.num_experts,
        "expert_used_count": spec.num_experts_per_tok,
        "expert_feed_forward_length": spec.moe_intermediate_size[0],
        "expert_shared_feed_forward_length": spec.shared_intermediate_size,
        "ssm.conv_kernel": spec.gdn_conv_kernel,
        "ssm.state_size": spec.gdn_head_dim,
        "ssm.group_count": spec.gdn_num_key_heads,
        "ssm.time_step_rank": spec.gdn_num_value_heads,
        "ssm.inner_size": spec.gdn_value_width,
        "full_attention_interval": ATTENTION_INTERVAL,
        "hyper_connection.count": spec.num_streams,
        "hyper_connection.low_rank": spec.stream_rank,
        "attention.indexer.head_count": spec.indexer_num_heads,
        "attention.indexer.key_length": spec.indexer_head_dim,
        "attention.indexer.top_k": spec.indexer_budget_tokens,
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", spec.rms_eps)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", spec.rope_theta)
    _add_numbers(writer, "rope.dimension_sections", spec.rope_sections, ValueType.INT32)
    _add_numbers(writer, "attention.compress_ratios", spec.index_ratio, ValueType.INT32)


def _write_ngram(writer: GGUFWriter, ngram: NgramSpec) -> None:
    for key, number in {
        "ple.ngram_size": ngram.max_n,
        "ple.heads_per_ngram": ngram.heads_per_ngram,
        "ple.conv_kernel": ngram.conv_kernel,
        "ple.eos_token_id": ngram.eos_token_id,
        "embedding_length_per_layer_input": ngram.row_width,
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    _add_numbers(writer, "ple.layers", [ngram.layer], ValueType.INT32)
    _add_numbers(writer, "ple.layer_multipliers", ngram.multipliers, ValueType.UINT64)
    _add_numbers(writer, "ple.head_offsets", ngram.head_offsets, ValueType.UINT64)
    _add_numbers(writer, "ple.head_vocab_sizes", ngram.head_sizes, ValueType.UINT64)


def _add_numbers(writer: GGUFWriter, key: str, numbers: Sequence[int], kind: ValueType) -> None:
    """An integer array of exactly one type; readers refuse the hash constants in another."""
    name = f"{ARCHITECTURE}.{key}"
    writer.add_key_value(name, list(numbers), ValueType.ARRAY, sub_type=kind)


def _write_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    pieces = make_vocabulary(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(pieces.tokens)
    writer.add_token_types(pieces.types)
    writer.add_token_merges(pieces.merges)
    end_of_text = pieces.tokens.index(END_OF_TEXT)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(pieces.tokens.index(TURN_END))
    writer.add_pad_token_id(end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
