"""Writes a Hugging Face checkpoint of the demo model as a quantized `qwen4exp` GGUF file.

    python -m tools.demo_model.export WEIGHTS_FOLDER OUTPUT.gguf

The folder holds `*.safetensors`, `config.json` and `tokenizer.json`. Equal input gives equal bytes.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from gguf import GGMLQuantizationType as QuantType
from gguf import GGUFValueType as ValueType
from gguf import GGUFWriter, LlamaFileType

from tools.demo_model.architecture import HASH_MULTIPLIERS, DemoConfig, read_config
from tools.demo_model.checkpoint import Arrays, read_checkpoint
from tools.demo_model.layout import apply, rules
from tools.demo_model.prompt import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from tools.demo_model.quantize import quantize, storage_type

logger = logging.getLogger(__name__)

ARCHITECTURE = "qwen4exp"
DESCRIPTION = (
    "A 23 M-parameter mixture of experts trained from random weights on public-domain and "
    "permissively licensed English text and on decision prompts: it answers labelled questions "
    "about a short text. It is no chat assistant and knows few facts."
)
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3  # values of tokenizer.ggml.token_type


def write_general(writer: GGUFWriter) -> None:
    """Write the general.* keys."""
    writer.add_type("model")
    writer.add_name("strata-demo")
    writer.add_basename("strata-demo")
    writer.add_size_label("23M")
    writer.add_description(DESCRIPTION)
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    writer.add_quantization_version(2)


def write_dimensions(writer: GGUFWriter, config: DemoConfig) -> None:
    """Write the qwen4exp.* sizes."""
    value_heads = config.linear_num_value_heads
    numbers = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * config.linear_key_head_dim,
        "full_attention_interval": config.full_attention_interval,
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", config.rope_theta)
    layers = range(config.num_hidden_layers)
    ratios = [config.indexer_compress_ratio if config.is_attention(i) else 0 for i in layers]
    # The fourth M-RoPE section is unused, yet readers insist on four entries.
    add_numbers(writer, "rope.dimension_sections", [*config.mrope_section, 0], ValueType.INT32)
    add_numbers(writer, "attention.compress_ratios", ratios, ValueType.INT32)


def write_ngram(writer: GGUFWriter, config: DemoConfig) -> None:
    """Write the constants of the n-gram embedding; the hash needs exact 64-bit integers."""
    numbers = {
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "embedding_length_per_layer_input": config.ngram_row_width,
    }
    for key, number in numbers.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", number)
    add_numbers(writer, "ple.layers", [config.ple_layer], ValueType.INT32)
    add_numbers(writer, "ple.layer_multipliers", HASH_MULTIPLIERS, ValueType.UINT64)
    add_numbers(writer, "ple.head_offsets", config.ngram_head_offsets, ValueType.UINT64)
    add_numbers(writer, "ple.head_vocab_sizes", config.ngram_head_sizes, ValueType.UINT64)


def add_numbers(writer: GGUFWriter, key: str, numbers: Sequence[int], kind: ValueType) -> None:
    """Write an integer array of one exact type (the writer's own choice would be INT32)."""
    name = f"{ARCHITECTURE}.{key}"
    writer.add_key_value(name, list(numbers), ValueType.ARRAY, sub_type=kind)


def write_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any]) -> None:
    """Write vocabulary, merges, special ids and chat template from a parsed `tokenizer.json`."""
    model = tokenizer["model"]
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = model["vocab"] | special
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens))), "token ids have gaps"
    kinds = [CONTROL_TOKEN if token in special else NORMAL_TOKEN for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special[END_OF_TEXT])
    writer.add_eos_token_id(special[TURN_END])
    writer.add_pad_token_id(special[END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_tensors(writer: GGUFWriter, config: DemoConfig, checkpoint: Arrays) -> None:
    """Transform, quantize and add every tensor."""
    for rule in rules(config):
        values = apply(rule, checkpoint)
        qtype = storage_type(rule.name, values.ndim)
        if qtype == QuantType.F32:
            writer.add_tensor(rule.name, values)
        else:
            writer.add_tensor(rule.name, quantize(values, qtype), raw_dtype=qtype)


def export(source: Path, output: Path) -> None:
    """Write the GGUF file of the checkpoint in `source`; replaces `output`.

    Raises:
        KeyError: the checkpoint lacks a tensor.
        ValueError: the checkpoint has a tensor that the file has no place for.
    """
    config = read_config(source / "config.json")
    checkpoint = read_checkpoint(source)
    unused = set(checkpoint) - {rule.source for rule in rules(config)}
    if unused:
        raise ValueError(f"checkpoint tensors without a place in the file: {sorted(unused)}")
    assert np.prod(checkpoint["model.embed_tokens.weight"].shape) == (
        config.vocab_size * config.hidden_size
    )
    writer = GGUFWriter(output, ARCHITECTURE)
    write_general(writer)
    write_dimensions(writer, config)
    write_ngram(writer, config)
    write_tokenizer(writer, json.loads((source / "tokenizer.json").read_text()))
    write_tensors(writer, config, checkpoint)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    logger.info("%s: %.1f MB", output, output.stat().st_size / 1e6)


@click.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
def main(source: Path, output: Path) -> None:
    """Write the checkpoint in SOURCE as a GGUF file."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    export(source, output)


if __name__ == "__main__":
    main()
