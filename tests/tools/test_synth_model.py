"""Synthetic models: valid, the same bytes however they are written, and sane all through."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import CliRunner

from strata_cli.commands.main import run, strata
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.model.metadata import Value
from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize, row_bytes
from strata_cli.engine.model.tensors import ModelFile, load_model_file
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.engine.model.vocabulary import read_vocabulary
from strata_cli.errors import InputError
from tools.synth import plan, report
from tools.synth.blocks import PLAIN, random_blocks, scale_fields, store_plain
from tools.synth.channels import CONSTANT, TOPIC, constant_value
from tools.synth.plan import TensorPlan, make_slice, slices_of
from tools.synth.presets import PRESETS, with_layers
from tools.synth.prompts import random_prompt, zipf_prompt
from tools.synth.recipe import Recipe, plan_tensors
from tools.synth.report import Reading, measure_routing, routing_table
from tools.synth.vocabulary import make_vocabulary
from tools.synth.writer import write_model
from tools.synth_model import main

TINY = PRESETS["tiny"]
QUANTIZED = [qtype for qtype in QuantType if qtype not in PLAIN]
# Their scales are coarse: powers of two, and floats with three bits of mantissa.
TOLERANCE = {QuantType.MXFP4: 0.45, QuantType.NVFP4: 0.08}


def write_tiny(path: Path, *, seed: int = 1, threads: int = 1) -> Path:
    write_model(path, TINY, plan_tensors(TINY, Recipe()), seed=seed, threads=threads)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("synth") / "tiny.gguf")


@pytest.fixture
def model(tiny: Path) -> Iterator[ModelFile]:
    with load_model_file(tiny) as model:
        yield model


def weights_of(qtype: QuantType, std: float, seed: int = 7) -> np.ndarray:
    count = 4096
    blocks = random_blocks(np.random.SFC64(seed), qtype, count, scale_fields(qtype, std))
    cols = count * BLOCK[qtype].weights
    return dequantize(qtype, blocks.reshape(1, row_bytes(qtype, cols)), cols)


@pytest.mark.parametrize("qtype", QUANTIZED, ids=lambda qtype: qtype.name)
@pytest.mark.parametrize("std", [0.1, 1.0])
def test_random_blocks_of_every_type_have_the_wanted_size(qtype: QuantType, std: float) -> None:
    values = weights_of(qtype, std)
    assert np.isfinite(values).all()
    assert values.std() == pytest.approx(std, rel=TOLERANCE.get(qtype, 0.02))
    assert np.abs(values).max() < 5 * values.std()  # no block stands out
    assert len(np.unique(values)) > 1


@pytest.mark.parametrize("qtype", QUANTIZED, ids=lambda qtype: qtype.name)
def test_blocks_of_size_zero_hold_zeros(qtype: QuantType) -> None:
    assert np.abs(weights_of(qtype, 0.0)).max() < 1e-30


@pytest.mark.parametrize("qtype", sorted(PLAIN), ids=lambda qtype: qtype.name)
def test_plain_types_round_to_the_nearest(qtype: QuantType) -> None:
    values = np.random.default_rng(1).standard_normal((8, 64), dtype=np.float32)
    stored = dequantize(qtype, store_plain(qtype, values), 64)
    half_step = {QuantType.F32: 0.0, QuantType.F16: 2.0**-11, QuantType.BF16: 2.0**-8}[qtype]
    assert (np.abs(stored - values) <= half_step * np.abs(values) * 1.001 + 1e-7).all()


def test_the_bytes_depend_on_the_seed_and_not_on_the_threads(tmp_path: Path, tiny: Path) -> None:
    expected = tiny.read_bytes()
    for threads in (1, 2, 5):
        again = write_tiny(tmp_path / "again.gguf", threads=threads)
        assert again.read_bytes() == expected
    assert write_tiny(tmp_path / "other.gguf", seed=2).read_bytes() != expected


def test_slices_make_the_same_rows_as_patches_on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = plan.Patch(slice(1, 3), 5, slice(0, 1), scale_fields(QuantType.Q8_0, 0.0))
    tensor = TensorPlan(name="x", qtype=QuantType.Q8_0, shape=(4, 5, 64), std=1.0, patches=(zero,))
    monkeypatch.setattr(plan, "SLICE_BYTES", 3 * tensor.row_bytes)  # cuts across the periods
    rows = np.concatenate([make_slice(part, 1) for part in slices_of(tensor)])
    values = dequantize(QuantType.Q8_0, rows, 64).reshape(4, 5, 2, 32)
    is_zero = (values == 0).all(axis=-1)
    assert is_zero[:, 1:3, 0].all()
    assert is_zero.sum() == 4 * 2


def test_strata_reads_back_the_spec_that_was_written(model: ModelFile) -> None:
    assert model.spec == TINY


def test_every_tensor_is_finite_and_the_types_are_those_of_the_build(model: ModelFile) -> None:
    for name in model.tensors:
        values = model.floats(name)
        assert np.isfinite(values).all(), name
        assert 0 < np.abs(values).max() < 50, name
    types = {info.qtype.name for info in model.tensors.values()}
    assert types == {"F32", "BF16", "Q8_0", "Q6_K", "Q5_K", "IQ3_XXS", "IQ4_XS", "IQ4_NL"}
    assert (model.floats("blk.0.ssm_a") < 0).all()


def test_nothing_but_the_embedding_writes_to_the_constant_channels(model: ModelFile) -> None:
    table = model.floats("token_embd.weight")
    np.testing.assert_allclose(table[:, CONSTANT], constant_value(TINY), rtol=1e-3)
    assert not table[:, TOPIC].any()
    for name in model.tensors:
        if "attn_output." in name or "ffn_down_" in name or "ple_value." in name:
            assert not model.floats(name)[..., CONSTANT.start : TOPIC.stop, :].any(), name
        if "ssm_out." in name:
            out = model.floats(name)
            assert not out[CONSTANT].any()
            assert out[TOPIC].any()


def test_logits_are_finite_spread_and_the_same_in_steps(tiny: Path) -> None:
    options = EngineOptions(model=tiny, device="host", max_context=256, prefill=16)
    with Engine.open(options) as engine, engine.sequence() as sequence:
        ids = random_prompt(TINY.vocab_size, 100, seed=3)
        logits = sequence.prefill(ids, logits="all")
        assert np.isfinite(logits).all()
        assert 1.5 < logits.std() < 4
        assert np.array_equal(sequence.step(5), sequence.step(5)) is False  # the context counts


def test_the_report_counts_who_was_routed_to(tiny: Path) -> None:
    counts = [1, 16, 200]
    readings = measure_routing(tiny, counts, device="host", text="some words " * 200)
    assert set(readings) == {"random", "zipf", "text"}
    top_k = TINY.num_experts_per_tok
    for unrouted, near, far, _ in readings.values():
        assert 0 < far < near < top_k  # depends on the token, and on the text
        assert unrouted.shape == (3, TINY.num_layers)
        assert (unrouted[0] == 1 - top_k / TINY.num_experts).all()
        assert (np.diff(unrouted, axis=0) <= 0).all()
    assert readings["random"].unrouted[2].mean() < 0.3


def test_the_report_does_not_depend_on_the_chunks(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure_routing(tiny, [104], device="host")
    monkeypatch.setattr(report, "_PREFILL_TOKENS", 100)  # the last pass has four rows
    cut = measure_routing(tiny, [104], device="host")
    for name, reading in whole.items():
        assert cut[name].common_near == reading.common_near
        assert np.array_equal(cut[name].unrouted, reading.unrouted)


def test_a_text_that_is_too_short_is_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="text has 2 tokens, and 1,000 are to be read"):
        measure_routing(tiny, [1000], device="host", text=" a b")


def test_the_table_shows_each_prompt_beside_the_target() -> None:
    reading = Reading(np.array([[0.4, 0.5], [0.2, 0.1]]), 3.0, 1.0, np.zeros(4, np.float32))
    table = routing_table({"zipf": reading}, [1046, 3000]).splitlines()
    assert table[2].split() == ["1,046", "42.0%", "45.0%"]
    assert table[3].split() == ["3,000", "15.0%"]
    assert table[4] == "zipf: least unrouted 10.0% (layer 1), most 20.0% (layer 0)"
    assert table[5] == "  experts in common: 3.0 of neighbours, 1.0 of tokens half a prompt apart"
    assert table[6] == "  last logits: deviation 0.00, largest probability 0.2500"


@pytest.mark.parametrize("vocab_size", [TINY.vocab_size, 20_000])
def test_a_vocabulary_is_valid_and_reads_any_text(vocab_size: int) -> None:
    pieces = make_vocabulary(vocab_size)
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": pieces.tokens,
        "tokenizer.ggml.token_type": np.array(pieces.types),
        "tokenizer.ggml.merges": pieces.merges,
    }
    vocabulary = read_vocabulary(metadata)
    assert len(vocabulary.tokens) == vocab_size
    tokenizer = Tokenizer(vocabulary)
    text = "The rest of these letters, 12 naïve ones.\n\tΩ"
    ids = tokenizer.encode(text, parse_special=True)
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert len(tokenizer.encode("<|im_start|><think>", parse_special=True)) == 2


def test_the_full_vocabulary_has_the_added_tokens_at_their_ids() -> None:
    pieces = make_vocabulary(248_320)
    assert len(set(pieces.tokens)) == 248_320
    for token_id, text in {
        248_044: "<|endoftext|>",
        248_046: "<|im_end|>",
        248_053: "<|vision_start|>",
        248_056: "<|image_pad|>",
        248_059: "</tool_call>",
        248_066: "<tool_response>",
        248_069: "</think>",
    }.items():
        assert pieces.tokens[token_id] == text


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 289"):
        make_vocabulary(288)


def test_the_presets_have_the_size_they_promise() -> None:
    full = PRESETS["full"]
    tensors = plan_tensors(full, Recipe())
    assert len(tensors) == 1224
    layer = {t.name: t for t in tensors if t.name.startswith(("blk.2.", "blk.5."))}
    assert layer["blk.2.ffn_gate_exps.weight"].qtype is QuantType.IQ4_XS
    assert layer["blk.2.ffn_down_exps.weight"].qtype is QuantType.Q8_0
    assert layer["blk.5.ffn_up_exps.weight"].qtype is QuantType.IQ3_XXS
    assert layer["blk.5.ffn_down_exps.weight"].qtype is QuantType.IQ4_NL
    assert sum(t.nbytes for t in tensors) / 1e9 == pytest.approx(60.9, abs=0.1)
    assert sum(t.nbytes for t in plan_tensors(PRESETS["bench12"], Recipe())) / 1e9 == (
        pytest.approx(16.7, abs=0.1)
    )
    widest = max(part.num_rows * part.tensor.row_bytes for t in tensors for part in slices_of(t))
    assert widest <= 6 << 20  # what a thread holds, whatever the model's size


def test_prompts_hold_ordinary_tokens_only() -> None:
    for make in (random_prompt, zipf_prompt):
        ids = make(TINY.vocab_size, 500, seed=1)
        assert len(ids) == 500
        assert 256 <= min(ids) <= max(ids) < TINY.vocab_size - 33
        assert ids == make(TINY.vocab_size, 500, seed=1)


def test_a_model_without_layers_for_the_n_grams_has_none(tmp_path: Path) -> None:
    spec = with_layers(TINY, 1)
    write_model(tmp_path / "one.gguf", spec, plan_tensors(spec, Recipe()), seed=1, threads=1)
    with load_model_file(tmp_path / "one.gguf") as model:
        assert model.spec == replace(spec, ngram=None)


def test_a_full_disk_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))
    with pytest.raises(InputError, match="no room for the model"):
        write_tiny(tmp_path / "tiny.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"old")

    def fail(*_args: object) -> int:
        raise OSError("disk failed")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(InputError, match=r"cannot write .*tiny.gguf: disk failed"):
        write_tiny(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]
    assert path.read_bytes() == b"old"


def test_the_command_writes_and_reports(tmp_path: Path) -> None:
    out = str(tmp_path / "tiny.gguf")
    result = CliRunner().invoke(main, ["--preset", "tiny", "--out", out, "--report-routing=32,8"])
    assert result.exit_code == 0, result.output
    assert "GiB in" in result.stdout
    assert result.stdout.index("       8 ") < result.stdout.index("      32 ")


def test_a_bare_report_measures_the_lengths_with_targets(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def measure(path: Path, counts: list[int], **options: object) -> dict[str, Reading]:
        asked.extend([path, counts, options["device"]])
        return {}

    monkeypatch.setattr(report, "measure_routing", measure)
    args = ["--out", str(tiny), "--report-routing", "--device", "cuda:0"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.output
    assert asked == [tiny, [1046, 1437, 1965, 4867], "cuda:0"]
    assert "GiB in" not in result.stdout


@pytest.mark.parametrize("value", ["", "0", "12,x"])
def test_the_command_refuses_other_prompt_lengths(tmp_path: Path, value: str) -> None:
    result = CliRunner().invoke(main, ["--out", str(tmp_path / "x"), f"--report-routing={value}"])
    assert result.exit_code == 2
    assert "list of positive numbers" in result.stderr


def test_routers_follow_the_wanted_share_of_the_token(tmp_path: Path) -> None:
    """More of what a token adds by itself spreads a prompt over more experts."""
    unrouted = []
    for token_std in (0.1, 3.0):
        path = tmp_path / f"{token_std}.gguf"
        tensors = plan_tensors(TINY, Recipe(token_std=token_std))
        write_model(path, TINY, tensors, seed=1, threads=1)
        readings = measure_routing(path, [64], device="host")
        unrouted.append(readings["zipf"].unrouted.mean())
    assert unrouted[0] > unrouted[1] + 0.05
    assert math.isfinite(unrouted[0])


def test_strata_reads_the_tiny_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "read",
        "some words",
        "--raw",
        "--model",
        str(tiny),
        "--device",
        "host",
        "--top",
        "2",
        "--json",
    ]
    assert run(strata, args) == 0
    top = orjson.loads(capsys.readouterr().out)["top_logprobs"]
    assert len(top) == 2
    assert top[0]["logprob"] >= top[1]["logprob"] > -10


def test_the_command_says_in_a_line_what_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "tiny.gguf"
    command = [sys.executable, "tools/synth_model.py", "--out", str(out)]
    failed = subprocess.run([*command, "--preset", "tiny"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-2].startswith(f"error: cannot write {out}: No such file")
    idle = subprocess.run(command, capture_output=True, text=True)
    assert idle.returncode == 2
    assert "nothing to do" in idle.stderr


def test_a_prompt_leaves_the_wanted_share_of_512_experts_unrouted(tmp_path: Path) -> None:
    spec = replace(with_layers(PRESETS["route"], 2), vocab_size=16_384, ngram=None)
    path = tmp_path / "route.gguf"
    write_model(path, spec, plan_tensors(spec, Recipe()), seed=1, threads=1)
    unrouted = measure_routing(path, [131, 1046], device="host")["zipf"].unrouted.mean(axis=1)
    assert 0.36 < unrouted[1] < 0.56  # layers near the embedding leave more than deep ones
    assert unrouted[0] > unrouted[1] + 0.15
