import dataclasses
import hashlib
import json
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest

from tools.demo_model import checkpoint as ckpt
from tools.demo_model.architecture import HASH_MULTIPLIERS, DemoConfig, read_config
from tools.demo_model.export import export
from tools.demo_model.layout import apply, restore, rules, value_head_rows
from tools.demo_model.prompt import CHAT_TEMPLATE, SPECIAL_TOKENS, choice, decision_prompt, render
from tools.demo_model.quantize import dequantize, quantize, storage_type
from tools.demo_model.shapes import checkpoint_shapes

SMALL = DemoConfig(
    vocab_size=len(SPECIAL_TOKENS) + 3,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    hc_count=2,
    ngram_size=2,
    heads_per_ngram=1,
    ngram_vocab_size_base=40,
    indexer_head_dim=16,
)


def random_checkpoint(config: DemoConfig) -> ckpt.Arrays:
    rng = np.random.default_rng(1)
    return {
        name: ckpt.widen(
            ckpt.narrow(rng.standard_normal(shape, dtype=np.float32)).tobytes(), "BF16"
        )
        .reshape(shape)
        .copy()
        for name, shape in checkpoint_shapes(config).items()
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    ckpt.write_checkpoint(folder, random_checkpoint(SMALL), shard_bytes=20_000)
    raw = dataclasses.asdict(SMALL)
    raw["ple_layer_ids"] = [raw.pop("ple_layer") + 1]
    raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta")}
    (folder / "config.json").write_text(json.dumps(raw))
    tokenizer = {
        "added_tokens": [{"content": t, "id": i} for i, t in enumerate(SPECIAL_TOKENS)],
        "model": {"vocab": {"a": 3, "b": 4, "ab": 5}, "merges": [["a", "b"]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_checkpoint_survives_writing_and_reading(source: Path) -> None:
    assert len(list(source.glob("*.safetensors"))) > 1
    for name, values in random_checkpoint(SMALL).items():
        np.testing.assert_array_equal(ckpt.read_checkpoint(source)[name], values)


def test_config_loads_by_hugging_face_names(source: Path) -> None:
    assert read_config(source / "config.json") == SMALL


def test_every_rule_can_be_undone() -> None:
    original = random_checkpoint(SMALL)
    back = {name: np.full_like(values, np.nan) for name, values in original.items()}
    for rule in rules(SMALL):
        restore(rule, apply(rule, original), back)
    for name, values in original.items():
        np.testing.assert_allclose(back[name], values, atol=2e-7, rtol=1e-6, err_msg=name)


def test_value_head_j_uses_key_head_j_mod_key_heads() -> None:
    config = DemoConfig()
    per_key = config.linear_num_value_heads // config.linear_num_key_heads
    for new, old in enumerate(value_head_rows(config, 1)):
        assert old // per_key == new % config.linear_num_key_heads


def test_equal_input_gives_equal_bytes(source: Path, tmp_path: Path) -> None:
    digests = set()
    for name in ("one.gguf", "two.gguf"):
        export(source, tmp_path / name)
        digests.add(hashlib.sha256((tmp_path / name).read_bytes()).hexdigest())
    assert len(digests) == 1


def test_file_holds_the_transformed_tensors(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    original = random_checkpoint(SMALL)
    assert set(stored) == {rule.name for rule in rules(SMALL)}
    for rule in rules(SMALL):
        wanted, tensor = apply(rule, original), stored[rule.name]
        assert tuple(reversed(tensor.shape)) == wanted.shape
        assert tensor.tensor_type == storage_type(rule.name, wanted.ndim)
        values = dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(wanted.shape)
        bits = {"Q4_0": 4, "Q8_0": 8, "F32": 30}[tensor.tensor_type.name]
        assert np.abs(values - wanted).max() <= np.abs(wanted).max() * 2.0 ** (2 - bits)


def test_hash_constants_keep_all_64_bits(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "m.gguf")
    field = gguf.GGUFReader(tmp_path / "m.gguf").fields["qwen4exp.ple.layer_multipliers"]
    assert field.types[1] == gguf.GGUFValueType.UINT64
    assert tuple(field.contents()) == HASH_MULTIPLIERS


def test_searched_scales_beat_the_usual_ones() -> None:
    values = np.random.default_rng(2).standard_normal((64, 128), dtype=np.float32)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    searched = np.square(dequantize(quantize(values, q4_0), q4_0) - values).sum()
    usual = gguf.quants.dequantize(gguf.quants.quantize(values, q4_0), q4_0)
    assert searched < 0.95 * np.square(usual - values).sum()


def test_a_block_of_zeros_stays_zero() -> None:
    zeros = np.zeros((2, 32), dtype=np.float32)
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    assert not dequantize(quantize(zeros, q4_0), q4_0).any()


def test_a_tensor_without_a_place_is_refused(source: Path, tmp_path: Path) -> None:
    ckpt.write_checkpoint(source, {"model.extra": np.zeros(2, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"model\.extra"):
        export(source, tmp_path / "m.gguf")


def test_template_and_training_render_the_same_text() -> None:
    prompt = decision_prompt("It rains.", choice("What falls?", ["water", "stones"]))
    system, user = prompt.split("<|im_end|>\n")[:2]
    turns = [
        (t.split("\n", 1)[0].removeprefix("<|im_start|>"), t.split("\n", 1)[1])
        for t in (system, user)
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    assert template.render(messages=messages, add_generation_prompt=True) == prompt == render(turns)


def test_template_reads_text_parts() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    assert template.render(messages=[message]) == "<|im_start|>user\nab<|im_end|>\n"


def test_demo_hash_sizes_are_the_known_primes() -> None:
    config = DemoConfig()
    assert config.ngram_head_sizes == (8209, 8219, 8221, 8231, 8233, 8237, 8243, 8263)
    assert config.ngram_table_rows == 65920
