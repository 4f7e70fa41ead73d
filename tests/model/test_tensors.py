from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine.model.metadata import ValueType
from strata_cli.engine.model.quants import QuantType, dequantize
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.errors import ModelError
from tests.model.gguf_writer import GgufBuilder, StoredTensor
from tests.model.oracle import MODELS
from tests.model.rewrite import join_shards, write_float_copy
from tests.model.tiny_model import TinyDims, build_tiny_model, write_tiny_model


def find(builder: GgufBuilder, name: str) -> StoredTensor:
    return next(tensor for tensor in builder.tensors if tensor.name == name)


def without(builder: GgufBuilder, *names: str) -> GgufBuilder:
    builder.tensors = [tensor for tensor in builder.tensors if tensor.name not in names]
    return builder


def refusal(builder: GgufBuilder, tmp_path: Path) -> ModelError:
    path = builder.write(tmp_path / "m.gguf")
    with pytest.raises(ModelError) as caught:
        load_model_file(path)
    assert caught.value.hint
    assert str(path) in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("name", "count", "fused"),
    [("tinyA-q8_0", 214, False), ("tinyA-iq4nl-fused", 206, True), ("mixB-quant", 164, False)],
)
def test_the_reference_models_are_whole(name: str, count: int, fused: bool) -> None:
    with load_model_file(MODELS[name]) as model:
        assert len(model.tensors) == count
        assert model.has_fused_gate_up(0) is fused
        assert model.draft == {}
        assert not model.spec.tied_output
        assert model.output().name == "output.weight"
        assert model.metadata["general.architecture"] == "qwen4exp"


def test_experts_lie_one_behind_the_other() -> None:
    with load_model_file(MODELS["mixB-quant"]) as model:
        info = model.layer_tensor(0, "ffn_down_exps.weight")
        assert (info.qtype, info.shape) == (QuantType.Q2_0, (8, 256, 64))
        assert info.data.shape == (8, 256, 18)


def test_a_tensor_can_be_had_as_floats() -> None:
    with load_model_file(MODELS["mixB-quant"]) as model:
        info = model.tensor("blk.1.ffn_down_exps.weight")
        values = model.floats("blk.1.ffn_down_exps.weight")
        assert values.shape == info.shape
        assert np.array_equal(values[3], dequantize(info.qtype, info.data[3], info.shape[-1]))
        assert model.floats("blk.0.ssm_a").shape == (4,)


def test_a_closed_model_hands_out_nothing() -> None:
    model = load_model_file(MODELS["tinyA-q8_0"])
    kept = model.tensor("output.weight").data
    model.close()
    model.close()
    with pytest.raises(KeyError):
        model.tensor("output.weight")
    assert kept[0, 0] >= 0


@pytest.mark.parametrize(
    "dims",
    [
        {},
        {"fused": True},
        {"streams": 3, "ngram": 4, "heads_per_ngram": 4, "ratio": 5, "budget": 20, "gdn_conv": 3},
        {"hidden": 54, "heads_per_ngram": 3, "head_dim": 10, "rotary": 6, "rank": 7},
        {"ff": (7, 9, 11, 13), "gdn_key_heads": 4},
        {"recurrent": (False, True, True, True), "ratio": None},
        {"recurrent": (True,) * 4},
        {"recurrent": (False,) * 4, "ple_layer": None},
        {"experts_count": 1, "top_k": 1, "kv_heads": 1, "indexer_heads": 1},
        {"layers": 1, "interval": 2, "ple_layer": None},
        {"matrices": QuantType.BF16, "experts": QuantType.Q4_0, "hidden": 64, "ff": 32},
    ],
)
def test_other_dimensions_load(dims: dict[str, Any], tmp_path: Path) -> None:
    with load_model_file(write_tiny_model(tmp_path / "m.gguf", **dims)) as model:
        for name, info in model.tensors.items():
            assert model.floats(name).shape == info.shape


def test_shards_of_a_tiny_model_load(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m-00001-of-00004.gguf", shards=4)
    whole = load_model_file(write_tiny_model(tmp_path / "m.gguf"))
    split = load_model_file(path)
    assert set(split.tensors) == set(whole.tensors)
    for name, info in whole.tensors.items():
        assert split.tensor(name).data.tobytes() == info.data.tobytes()


def test_a_model_without_output_matrix_uses_the_embedding_table(tmp_path: Path) -> None:
    with load_model_file(write_tiny_model(tmp_path / "m.gguf", tied=True)) as model:
        assert model.spec.tied_output
        assert model.output().name == "token_embd.weight"


def test_a_draft_block_is_set_aside(tmp_path: Path) -> None:
    with load_model_file(write_tiny_model(tmp_path / "m.gguf", draft=True)) as model:
        assert model.spec.num_draft_layers == 1
        assert len(model.draft) == 32
        assert not any(name.startswith("blk.4.") for name in model.tensors)


def test_a_draft_block_may_be_announced_but_absent(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims(draft=True))
    builder.tensors = [t for t in builder.tensors if not t.name.startswith("blk.4.")]
    with load_model_file(builder.write(tmp_path / "m.gguf")) as model:
        assert model.spec.num_draft_layers == 0


def test_a_file_with_only_the_draft_block_is_refused(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims(draft=True))
    keep = ("blk.4.", "token_embd.", "output.")
    builder.tensors = [t for t in builder.tensors if t.name.startswith(keep)]
    message = refusal(builder, tmp_path).message
    assert "holds only the draft block of a model (blk.4), no layers" in message


# Shapes that mean the same


def reshaped(builder: GgufBuilder, name: str, shape: tuple[int, ...]) -> GgufBuilder:
    find(builder, name).shape = shape
    return builder


@pytest.mark.parametrize(
    ("name", "shape", "canonical"),
    [
        ("blk.0.hc_attn_norm.weight", (4, 48), (192,)),
        ("blk.0.ffn_gate_inp_shexp.weight", (1, 48), (48,)),
        ("blk.0.ssm_conv1d.weight", (1, 64, 4), (64, 4)),
    ],
)
def test_a_shape_with_the_same_bytes_is_brought_to_one_form(
    tmp_path: Path, name: str, shape: tuple[int, ...], canonical: tuple[int, ...]
) -> None:
    builder = reshaped(build_tiny_model(TinyDims()), name, shape)
    with load_model_file(builder.write(tmp_path / "m.gguf")) as model:
        assert model.tensor(name).shape == canonical
        assert model.floats(name).shape == canonical


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.ssm_conv1d.weight", (64, 1, 4)),  # as the checkpoint has it
        ("blk.0.ssm_conv1d.weight", (4, 64)),
        ("blk.1.ple_conv1d.weight", (192, 1, 4)),
        ("blk.0.hc_attn_norm.weight", (48, 4)),
        ("blk.0.ssm_a", (2, 2)),
        ("blk.0.ffn_gate_exps.weight", (16, 6, 48)),
        ("blk.3.attn_q.weight", (64, 96)),
        ("token_embd.weight", (48, 288)),
    ],
)
def test_a_wrong_shape_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    message = refusal(reshaped(build_tiny_model(TinyDims()), name, shape), tmp_path).message
    assert repr(name) in message
    assert str(list(shape)) in message or "rows" in message


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_hc_up.weight",
        "per_layer_token_embd.weight",
        "blk.0.hc_ffn_inject.weight",
        "blk.0.ssm_dt.bias",
        "blk.1.ple_key.weight",
        "blk.2.ffn_up_shexp.weight",
        "blk.2.ffn_up_exps.weight",
        "blk.3.indexer.k_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    builder = without(build_tiny_model(TinyDims()), name)
    assert f"1 missing tensor: {name!r}" in refusal(builder, tmp_path).message


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims())
    builder.tensors = [t for t in builder.tensors if not t.name.startswith("blk.2.")]
    message = refusal(builder, tmp_path).message
    assert "25 missing tensors: 'blk.2." in message
    assert message.endswith("and 20 more")


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.9.ssm_a", "rope_freqs.weight", "x"])
def test_a_tensor_that_belongs_nowhere_is_named(tmp_path: Path, name: str) -> None:
    builder = build_tiny_model(TinyDims())
    builder.add_tensor(name, 0, (1,), b"0123")
    assert f"1 unexpected tensor: {name!r}" in refusal(builder, tmp_path).message


def test_fused_and_separate_experts_exclude_each_other(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims(fused=True))
    builder.add_tensor("blk.0.ffn_up_exps.weight", 0, (1,), b"0123")
    assert "unexpected tensor: 'blk.0.ffn_up_exps.weight'" in refusal(builder, tmp_path).message


def test_an_n_gram_table_without_its_keys_is_left_over(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims())
    builder.values = {k: v for k, v in builder.values.items() if ".ple." not in k}
    assert "7 unexpected tensors" in refusal(builder, tmp_path).message


def test_an_n_gram_table_must_hold_every_head(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims())
    assert find(builder, "per_layer_token_embd.weight").shape == (152, 12)
    builder.add("qwen4exp.ple.head_offsets", ValueType.U64, [0, 31, 68, 110])
    message = refusal(builder, tmp_path).message
    assert "has 152 rows, but its heads reach to row 153" in message


def test_an_n_gram_table_must_have_the_width_of_its_key(tmp_path: Path) -> None:
    builder = reshaped(build_tiny_model(TinyDims()), "per_layer_token_embd.weight", (304, 6))
    assert "expected [304, 12]" in refusal(builder, tmp_path).message


def test_the_vocabulary_must_fit_the_embedding_table(tmp_path: Path) -> None:
    builder = build_tiny_model(TinyDims(ple_layer=None))
    tokens = builder.values["tokenizer.ggml.tokens"][1]
    assert isinstance(tokens, list)
    builder.add("tokenizer.ggml.tokens", ValueType.STRING, tokens[:-1])
    message = refusal(builder, tmp_path).message
    assert "the tokenizer has 287 tokens, but 'token_embd.weight' has 288 rows" in message


@pytest.mark.parametrize("qtype", list(QuantType))
def test_matrices_of_every_type_load(tmp_path: Path, qtype: QuantType) -> None:
    dims: dict[str, Any] = {"layers": 1, "interval": 2, "ple_layer": None, "hidden": 256}
    path = write_tiny_model(tmp_path / "m.gguf", matrices=qtype, experts=qtype, **dims)
    with load_model_file(path) as model:
        assert model.tensor("blk.0.attn_qkv.weight").qtype is qtype
        assert np.isfinite(model.floats("blk.0.attn_qkv.weight")).all()


def test_joined_shards_are_the_same_model(tmp_path: Path) -> None:
    split = load_model_file(MODELS["mixB-quant"])
    joined = load_model_file(join_shards(MODELS["mixB-quant"], tmp_path / "m.gguf"))
    assert joined.spec == split.spec
    for name, info in split.tensors.items():
        assert joined.tensor(name).qtype == info.qtype
        assert joined.tensor(name).data.tobytes() == info.data.tobytes()


def test_a_float_copy_holds_the_same_weights(tmp_path: Path) -> None:
    stored = load_model_file(MODELS["tinyA-iq4nl-fused"])
    copy = load_model_file(write_float_copy(MODELS["tinyA-iq4nl-fused"], tmp_path / "m.gguf"))
    assert {info.qtype for info in copy.tensors.values()} == {QuantType.F32}
    for name in stored.tensors:
        assert np.array_equal(copy.floats(name), stored.floats(name))
