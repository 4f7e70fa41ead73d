"""Dimensions of the demo model and the constants of its n-gram hash.

Field names follow the Hugging Face `qwen4_exp` configuration, so that `config.json` loads by name.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

# What transformers derives from seed 1234 for an n-gram size of 3 and 8192 tokens. They are part of
# the trained weights: other multipliers would send every n-gram to another row.
HASH_MULTIPLIERS = (917459169272335, 551719545110387, 145018054610633)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the demo model, all in elements unless the name says otherwise."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 16
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    shared_expert_intermediate_size: int = 128
    hc_count: int = 4
    hc_lowrank: int = 32
    ple_layer: int = 1  # counted from zero; `ple_layer_ids` of config.json counts from one
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 4
    ngram_vocab_size_base: int = 8192
    indexer_n_heads: int = 2
    indexer_head_dim: int = 64
    indexer_budget: int = 512
    indexer_compress_ratio: int = 16
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.5
    mrope_section: tuple[int, ...] = (6, 5, 5)
    rms_norm_eps: float = 1e-6

    @property
    def num_ngram_heads(self) -> int:
        """Rows of the n-gram table that one token reads."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_row_width(self) -> int:
        """Elements of one row of the n-gram table; the rows of a token fill the hidden size."""
        return self.hidden_size // self.num_ngram_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of an attention head, and of an indexer head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def ngram_head_sizes(self) -> tuple[int, ...]:
        """Modulus of every hash head: the first primes above the base."""
        return primes_above(self.ngram_vocab_size_base, self.num_ngram_heads)

    @property
    def ngram_head_offsets(self) -> tuple[int, ...]:
        """First table row of every hash head."""
        sizes = self.ngram_head_sizes
        return tuple(sum(sizes[:head]) for head in range(len(sizes)))

    @property
    def ngram_table_rows(self) -> int:
        """Rows of the n-gram table, padded to a multiple of 128 as transformers does."""
        return -(-sum(self.ngram_head_sizes) // 128) * 128

    def is_attention(self, layer: int) -> bool:
        """Whether a layer attends (QSA) rather than recurs (GDN)."""
        return (layer + 1) % self.full_attention_interval == 0


def primes_above(base: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes greater than `base`, by trial division."""
    found: list[int] = []
    number = base + 1
    while len(found) < count:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def hugging_face_config(config: DemoConfig) -> dict[str, Any]:
    """Return the configuration as transformers' `qwen4_exp` reads it."""
    values = asdict(config)
    rope = {"rope_type": "default", "mrope_interleaved": True}
    for key in ("rope_theta", "partial_rotary_factor", "mrope_section"):
        rope[key] = values.pop(key)
    values["ple_layer_ids"] = [values.pop("ple_layer") + 1]
    return values | {
        "rope_parameters": rope,
        "linear_value_head_dim": config.linear_key_head_dim,
        "indexer_kv_heads": 1,
        "ple_embed_dim": config.hidden_size,
        "split_ngram_parts": 1,
        "tie_word_embeddings": True,
        "output_gate_type": "sigmoid",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def read_config(path: Path) -> DemoConfig:
    """Read a Hugging Face `config.json`; keys it lacks keep the demo model's values."""
    raw = json.loads(path.read_text())
    rope = raw.get("rope_parameters", {})
    known = {field.name for field in fields(DemoConfig)}
    values = {key: value for key, value in raw.items() if key in known}
    values |= {key: value for key, value in rope.items() if key in known}
    values["mrope_section"] = tuple(values.get("mrope_section", DemoConfig().mrope_section))
    if "ple_layer_ids" in raw:
        values["ple_layer"] = raw["ple_layer_ids"][0] - 1
    return DemoConfig(**values)
