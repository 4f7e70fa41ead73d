from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from strata_cli.engine.model.gguf import open_gguf
from strata_cli.engine.model.metadata import ValueType
from strata_cli.engine.model.spec import ModelSpec, read_spec
from strata_cli.errors import ModelError
from tests.model.gguf_writer import GgufBuilder, Scalar
from tests.model.oracle import MODELS
from tests.model.tiny_model import TinyDims, build_tiny_model

U32, I32, U64 = ValueType.U32, ValueType.I32, ValueType.U64

REQUIRED_U32 = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "rope.dimension_count",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "ssm.inner_size",
    "hyper_connection.count",
    "hyper_connection.low_rank",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "ple.ngram_size",
    "ple.heads_per_ngram",
    "ple.conv_kernel",
    "ple.eos_token_id",
    "embedding_length_per_layer_input",
)
REQUIRED_FLOATS = ("attention.layer_norm_rms_epsilon", "rope.freq_base")
REQUIRED_ARRAYS = (
    "rope.dimension_sections",
    "ple.layer_multipliers",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
)
OPTIONAL_U32 = (
    "attention.key_length",
    "attention.value_length",
    "full_attention_interval",
    "ple.image_token_id",
    "nextn_predict_layers",
)


@cache
def _tiny(**dims: Any) -> GgufBuilder:
    return build_tiny_model(TinyDims(**dims))


def tiny(**dims: Any) -> GgufBuilder:
    """The metadata of a tiny model, for one test to change."""
    return GgufBuilder(values=dict(_tiny(**dims).values))


def spec_of(**dims: Any) -> ModelSpec:
    return read_spec(tiny(**dims).metadata())


def refusal(builder: GgufBuilder) -> str:
    with pytest.raises(ModelError) as caught:
        read_spec(builder.metadata())
    assert caught.value.hint
    assert caught.value.message.startswith("built in a test")
    return caught.value.message


def changed(key: str, kind: ValueType, value: Scalar | Sequence[Scalar], **dims: Any) -> str:
    """What the refusal says after one key was set."""
    builder = tiny(**dims)
    builder.add(f"qwen4exp.{key}", kind, value)
    return refusal(builder)


def test_the_reference_model_reads_as_documented() -> None:
    spec = read_spec(open_gguf(MODELS["tinyA-q8_0"]).metadata)
    assert (spec.num_layers, spec.hidden_size, spec.num_streams, spec.stream_rank) == (8, 96, 4, 12)
    assert (spec.num_experts, spec.num_experts_per_tok) == (8, 3)
    assert spec.moe_intermediate_size == (32,) * 8
    assert spec.index_ratio == (0, 0, 0, 4, 0, 0, 0, 4)
    assert [layer for layer in range(8) if not spec.is_recurrent[layer]] == [3, 7]
    assert (spec.indexer_budget_tokens, spec.vocab_size, spec.context_tokens) == (24, 512, 4096)
    assert spec.ngram is not None
    assert (spec.ngram.layer, spec.ngram.max_n, spec.ngram.eos_token_id) == (1, 3, 504)
    assert spec.ngram.multipliers == (4295158889763781, 17440218147737327, 1270917961434445)
    assert (spec.ngram.num_heads, spec.ngram.min_rows) == (4, 199 + 73)
    assert (spec.stream_width, spec.gdn_key_width, spec.gdn_value_width) == (384, 64, 192)


@pytest.mark.parametrize("key", REQUIRED_U32 + REQUIRED_FLOATS + REQUIRED_ARRAYS)
def test_a_missing_key_is_named(key: str) -> None:
    builder = tiny()
    del builder.values[f"qwen4exp.{key}"]
    assert refusal(builder).endswith(f"metadata key qwen4exp.{key} is missing")


@pytest.mark.parametrize("key", REQUIRED_U32 + OPTIONAL_U32)
@pytest.mark.parametrize(("kind", "value"), [(I32, 1), (U64, 1), (ValueType.F32, 1.0)])
def test_a_key_of_another_type_is_refused(key: str, kind: ValueType, value: float) -> None:
    message = changed(key, kind, value)
    assert f"qwen4exp.{key} has the type {kind.name.lower()}, expected u32" in message


@pytest.mark.parametrize(
    "key", [key for key in REQUIRED_U32 if key != "expert_feed_forward_length"]
)
def test_an_array_in_place_of_a_number_is_refused(key: str) -> None:
    assert f"{key} has the type u32[1], expected u32" in changed(key, U32, [1])


@pytest.mark.parametrize("key", [key for key in REQUIRED_U32 if key != "ple.eos_token_id"])
@pytest.mark.parametrize("value", [0, 2**31])
def test_a_dimension_of_zero_or_beyond_int32_is_refused(key: str, value: int) -> None:
    assert key in changed(key, U32, value)


@pytest.mark.parametrize("key", REQUIRED_FLOATS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_float_must_be_a_number_above_zero(key: str, value: float) -> None:
    assert f"qwen4exp.{key} is" in changed(key, ValueType.F32, value)


@pytest.mark.parametrize(
    ("key", "kind", "value", "message"),
    [
        ("block_count", U32, 513, "block_count is 513; expected 1 to 512"),
        ("nextn_predict_layers", U32, 2, "nextn_predict_layers is 2; expected 0 to 1"),
        ("hyper_connection.count", U32, 1, "hyper_connection.count is 1; expected 2"),
        ("full_attention_interval", U32, 0, "full_attention_interval is 0"),
        ("rope.dimension_sections", I32, [2, 1, 1], "has 3 items, expected 4"),
        ("rope.dimension_sections", I32, [2, 1, 1, 0, 0], "has 5 items, expected 4"),
        ("rope.dimension_sections", I32, [2, 1, -1, 0], "negative"),
        ("rope.dimension_count", U32, 7, "rope.dimension_count 7 must be even"),
        ("rope.dimension_count", U32, 18, "at most the head's 16"),
        ("attention.indexer.key_length", U32, 6, "is below rope.dimension_count 8"),
        ("attention.key_length", U32, 32, "attention.key_length 32"),
        ("attention.head_count_kv", U32, 3, "head_count 4 is no multiple"),
        ("expert_used_count", U32, 7, "expert_used_count 7 exceeds expert_count 6"),
        ("expert_feed_forward_length", U32, [16] * 3, "has 3 items, expected 4"),
        ("expert_feed_forward_length", U32, [16, 0, 16, 16], "is 0"),
        ("ssm.group_count", U32, 3, "no multiple of ssm.group_count 3"),
        ("ssm.inner_size", U32, 33, "ssm.inner_size 33 is not"),
        ("attention.recurrent_layers", ValueType.BOOL, [True] * 3, "has 3 items, expected 4"),
        ("attention.recurrent_layers", U32, [1] * 4, "expected bool[4]"),
        ("attention.compress_ratios", I32, [0, 0, 4], "has 3 items, expected 4"),
        ("attention.compress_ratios", I32, [0, 0, 0, 1], "must be above 1"),
        ("attention.compress_ratios", I32, [0, 0, 0, -4], "is -4"),
        ("attention.compress_ratios", I32, [0, 0, 0, 5], "divide attention.indexer.top_k"),
        ("attention.compress_ratios", U32, 3, "divide attention.indexer.top_k, which is 16"),
        ("ple.layers", I32, [0, 1], "has 2 items, expected 1"),
        ("ple.layers", I32, [], "has 0 items, expected 1"),
        ("ple.layers", I32, [4], "is 4; expected 0 to 3"),
        ("ple.layers", I32, [-1], "is -1; expected 0 to 3"),
        ("ple.layers", I32, [3], "which is an attention layer"),
        ("ple.ngram_size", U32, 1, "is 1; expected 2 to 8"),
        ("ple.ngram_size", U32, 9, "is 9; expected 2 to 8"),
        ("ple.heads_per_ngram", U32, 33, "is 66; expected 1 to 64"),
        ("ple.eos_token_id", U32, 288, "is 288; expected 0 to 287"),
        ("ple.layer_multipliers", U64, [3, 5], "has 2 items, expected 3"),
        ("ple.layer_multipliers", ValueType.I64, [3, 5, 7], "expected u64[3]"),
        ("ple.layer_multipliers", U64, [3, 5, 2**63 // 100], "ple.layer_multipliers is"),
        ("ple.head_offsets", U64, [0, 31, 68], "has 3 items, expected 4"),
        ("ple.head_offsets", I32, [0, 31, 68, 109], "expected u64[4]"),
        ("ple.head_vocab_sizes", U64, [31, 37, 41], "has 3 items, expected 4"),
        ("ple.head_vocab_sizes", U64, [31, 37, 41, 0], "is 0; expected 1"),
        ("ple.head_vocab_sizes", U64, [31, 37, 41, 2**31], "is 2147483648"),
        ("embedding_length_per_layer_input", U32, 13, "do not make embedding_length 48"),
    ],
)
def test_values_that_cannot_be_are_refused(
    key: str, kind: ValueType, value: Scalar | Sequence[Scalar], message: str
) -> None:
    assert message in changed(key, kind, value)


def test_attention_layers_share_one_ratio() -> None:
    message = changed("attention.compress_ratios", I32, [0, 4, 0, 8], interval=2, ple_layer=0)
    assert "different ratios on its layers: [4, 8]" in message


def test_another_architecture_is_named() -> None:
    builder = tiny()
    builder.add("general.architecture", ValueType.STRING, "llama")
    assert "is a 'llama' model, an unknown architecture" in refusal(builder)
    del builder.values["general.architecture"]
    assert "general.architecture is missing" in refusal(builder)


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (I32, [1, 2], "must be an array of strings, found i32[2]"),
        (ValueType.STRING, "a", "must be an array of strings, found string"),
        (ValueType.STRING, [], "is 0; expected 1"),
    ],
)
def test_a_model_has_a_vocabulary(
    kind: ValueType, value: Scalar | Sequence[Scalar], message: str
) -> None:
    builder = tiny()
    builder.add("tokenizer.ggml.tokens", kind, value)
    assert message in refusal(builder)
    del builder.values["tokenizer.ggml.tokens"]
    assert "tokenizer.ggml.tokens is missing" in refusal(builder)


# What is allowed


def test_other_dimensions_than_the_release_s_are_read() -> None:
    spec = spec_of(
        streams=3,
        ngram=4,
        heads_per_ngram=3,
        ratio=5,
        budget=20,
        gdn_conv=3,
        hidden=54,
        head_dim=10,
        rotary=6,
        gdn_key_heads=4,
        ff=(7, 9, 11, 13),
    )
    assert (spec.num_streams, spec.gdn_conv_kernel, spec.index_ratio[3]) == (3, 3, 5)
    assert spec.moe_intermediate_size == (7, 9, 11, 13)
    assert spec.gdn_num_key_heads == spec.gdn_num_value_heads == 4
    assert spec.ngram is not None
    assert (spec.ngram.max_n, spec.ngram.num_heads, spec.ngram.row_width) == (4, 9, 6)


def test_sections_may_be_unsigned() -> None:
    builder = tiny()
    builder.add("qwen4exp.rope.dimension_sections", U32, [2, 1, 1, 0])
    assert read_spec(builder.metadata()).rope_sections == (2, 1, 1, 0)


def test_the_head_width_defaults_to_a_share_of_the_hidden_size() -> None:
    builder = tiny(hidden=64)
    for key in ("key_length", "value_length"):
        del builder.values[f"qwen4exp.attention.{key}"]
    assert read_spec(builder.metadata()).head_dim == 16
    builder = tiny(hidden=66, ple_layer=None)
    del builder.values["qwen4exp.attention.key_length"]
    assert "attention.key_length is missing" in refusal(builder)


def test_every_fourth_layer_is_attention_unless_said_otherwise() -> None:
    builder = tiny(layers=8)
    del builder.values["qwen4exp.full_attention_interval"]
    kinds = read_spec(builder.metadata()).is_recurrent
    assert kinds == (True, True, True, False) * 2


def test_a_list_of_recurrent_layers_overrides_the_interval() -> None:
    spec = spec_of(recurrent=(False, True, True, False))
    assert spec.is_recurrent == (False, True, True, False)
    assert spec.index_ratio == (4, 0, 0, 4)


@pytest.mark.parametrize(
    ("dims", "ratios"),
    [
        ({"ratio": None}, (0, 0, 0, 0)),
        ({"ratio": 0}, (0, 0, 0, 0)),
        ({"ratio": 8}, (0, 0, 0, 8)),
        ({"ratio": 4, "ratio_as_scalar": True}, (0, 0, 0, 4)),
        ({"ratio": 0, "ratio_as_scalar": True}, (0, 0, 0, 0)),
    ],
)
def test_ratios_may_be_absent_zero_or_one_for_all(
    dims: dict[str, Any], ratios: tuple[int, ...]
) -> None:
    assert spec_of(**dims).index_ratio == ratios


def test_ratios_of_recurrent_layers_mean_nothing() -> None:
    builder = tiny()
    builder.add("qwen4exp.attention.compress_ratios", I32, [1, -7, 9, 4])
    assert read_spec(builder.metadata()).index_ratio == (0, 0, 0, 4)


def test_dense_and_indexed_attention_may_be_mixed() -> None:
    builder = tiny(interval=2, ple_layer=0)
    builder.add("qwen4exp.attention.compress_ratios", I32, [0, 0, 0, 4])
    assert read_spec(builder.metadata()).index_ratio == (0, 0, 0, 4)


def test_a_model_may_do_without_the_n_gram_embedding() -> None:
    assert spec_of(ple_layer=None).ngram is None


def test_a_draft_block_is_no_layer() -> None:
    spec = spec_of(draft=True, ff=(16, 24, 16, 24), recurrent=(True, True, True, False))
    assert (spec.num_layers, spec.num_draft_layers) == (4, 1)
    assert spec.moe_intermediate_size == (16, 24, 16, 24)
    assert len(spec.is_recurrent) == len(spec.index_ratio) == 4


def test_a_draft_block_alone_is_no_model() -> None:
    assert "block_count is 1; expected 2 to 512" in changed(
        "block_count", U32, 1, draft=True, ple_layer=None
    )
