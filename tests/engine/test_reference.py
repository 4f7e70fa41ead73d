"""The engine against the plain float64 forward pass, on models of any dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import BLOCK, QuantType
from tests.engine.comparing import TOLERANCE, assert_close, continue_greedily
from tests.engine.passes import read_in_the_open
from tests.engine.strategies import EOS, PLAIN, dimensions, prompts
from tests.model.tiny_model import TinyDims, build_tiny_model, write_tiny_model
from tests.reference.qwen4exp import ModelPass, Reference

GREEDY = 4
MARGIN = 2e-5
"""Selections closer than this share of their scores may fall otherwise in float32."""

CORNERS: dict[str, dict[str, Any]] = {
    "three streams, 4-grams, blocks of five, three taps": {
        "hidden": 45, "streams": 3, "ngram": 4, "heads_per_ngram": 1, "ratio": 5, "budget": 15,
        "gdn_conv": 3, "ple_conv": 3, "rank": 7, "matrices": QuantType.BF16,
    },
    "as many value heads as key heads": {"gdn_key_heads": 3, "gdn_value_heads": 3, "gdn_dim": 5},
    "three value heads to a key head": {"gdn_key_heads": 2, "gdn_value_heads": 6},
    "dense attention, no n-gram embedding": {"ratio": None, "ple_layer": None},
    "dense attention asked for by a zero": {"ratio": 0, "ratio_as_scalar": True},
    "one ratio for all layers": {"ratio": 2, "ratio_as_scalar": True, "budget": 6},
    "attention in the first layers": {"recurrent": (False, False, True, False), "ple_layer": 2},
    "n-gram embedding in the first layer": {"ple_layer": 0, "ngram": 2, "heads_per_ngram": 3},
    "one of everything": {
        "hidden": 12, "heads": 1, "kv_heads": 1, "gdn_key_heads": 1, "gdn_value_heads": 1,
        "experts_count": 1, "top_k": 1, "ff": 1, "shared_ff": 1, "rank": 1, "indexer_heads": 1,
        "budget": 4, "ple_conv": 1, "gdn_conv": 1,
    },
    "every head turns fully, the indexer's only in part": {
        "head_dim": 6, "rotary": 6, "indexer_dim": 19, "theta": 100.0, "kv_heads": 1,
    },
    "experts of other widths than the shared one": {"ff": (5, 40, 17, 33), "shared_ff": 9},
    "all experts chosen": {"top_k": 6},
    "fused experts, tied output, a draft block": {
        "fused": True, "tied": True, "draft": True, "hidden": 32, "ff": 32,
        "experts": QuantType.IQ4_NL, "table": QuantType.Q8_0, "heads_per_ngram": 1, "ngram": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test writes its model."""
    return tmp_path_factory.mktemp("models") / "m.gguf"


@pytest.mark.parametrize("corner", CORNERS)
def test_corners_of_the_architecture(model_path: Path, corner: str) -> None:
    write_tiny_model(model_path, **CORNERS[corner])
    expected = check(model_path, mixed_prompt(70), chunk=16)
    assert expected.num_decided(MARGIN) == len(expected.logits)
    for allowed in expected.allowed.values():
        assert allowed.sum() < np.tri(len(allowed)).sum(), "something must have been left out"


@pytest.mark.parametrize("qtype", PLAIN)
def test_rows_that_no_block_divides(model_path: Path, qtype: QuantType) -> None:
    widths = {"hidden": 44, "rank": 13, "ff": 7, "shared_ff": 19, "gdn_dim": 3, "head_dim": 9}
    types = {"matrices": qtype, "experts": qtype, "table": qtype}
    write_tiny_model(model_path, **widths, **types)
    check(model_path, mixed_prompt(40), chunk=9)


def test_every_tensor_type_in_one_model(model_path: Path) -> None:
    """Rows of 256 take any type; dealing them out in turn uses all 28."""
    types = list(QuantType)
    dealt: list[QuantType] = []

    def in_turn(name: str, shape: Shape) -> QuantType:
        fitting = [qtype for qtype in types if shape[-1] % BLOCK[qtype].weights == 0]
        dealt.append(min(fitting, key=dealt.count))
        return dealt[-1]

    wide = {"hidden": 256, "streams": 2, "rank": 256, "ff": 256, "shared_ff": 256, "layers": 2}
    write_tiny_model(model_path, **wide, interval=2, ple_layer=0, type_of=in_turn)
    assert set(dealt) == set(types)
    check(model_path, mixed_prompt(24), chunk=24)


def test_a_head_width_left_out_is_the_share_of_the_hidden_size(model_path: Path) -> None:
    builder = build_tiny_model(TinyDims(hidden=48, heads=4, head_dim=12))
    for key in ("key_length", "value_length"):
        del builder.values[f"qwen4exp.attention.{key}"]
    check(builder.write(model_path), mixed_prompt(30), chunk=30)


def test_ties_go_to_the_lower_expert_and_the_lower_block(model_path: Path) -> None:
    """Of weights that are all zero, every expert and every block looks the same."""
    builder = build_tiny_model(TinyDims())
    for tensor in builder.tensors:
        if tensor.name.endswith(("ffn_gate_inp.weight", "indexer.k_proj.weight")):
            tensor.data = bytes(len(tensor.data))
    builder.write(model_path)
    ids = mixed_prompt(50)
    with Engine.open(EngineOptions(model=model_path, device="host", prefill=50)) as engine:
        seen = read_in_the_open(engine, ids)
    assert all((chosen == [0, 1]).all() for chosen in seen.router_ids)
    assert np.flatnonzero(seen.allowed[3][-1]).tolist() == [*range(16), 48, 49]
    assert_close(seen.logits, Reference(model_path).forward(ids).logits)


def test_the_reference_follows_the_selections_of_another_pass(model_path: Path) -> None:
    write_tiny_model(model_path)
    reference, ids = Reference(model_path), mixed_prompt(30)
    own = reference.forward(ids)
    same = reference.forward(ids, own)
    assert np.array_equal(same.logits, own.logits)
    assert not same.shortfall.any()
    chosen = own.router_ids[1][20]
    chosen[-1] = min(set(range(6)) - set(chosen.tolist()))
    followed = reference.forward(ids, own)
    assert np.array_equal(followed.logits[:20], same.logits[:20])
    assert not np.array_equal(followed.logits[20], same.logits[20])
    assert not followed.shortfall[:20].any()
    assert followed.shortfall[20] >= own.margin[20] > 0


@settings(max_examples=25)
@given(dims=dimensions(), ids=prompts(), chunk=st.sampled_from([1, 5, 16, 64]))
def test_random_models(model_path: Path, dims: dict[str, Any], ids: list[int], chunk: int) -> None:
    write_tiny_model(model_path, **dims)
    check(model_path, ids, chunk)


@settings(max_examples=10)
@given(dims=dimensions(blocks=True), ids=prompts())
def test_random_quantized_models(model_path: Path, dims: dict[str, Any], ids: list[int]) -> None:
    write_tiny_model(model_path, **dims)
    check(model_path, ids, chunk=32)


def check(path: Path, ids: list[int], chunk: int) -> ModelPass:
    """Hold a prompt and a greedy continuation against the reference; returns its pass.

    Rows count up to the first token whose experts or blocks are too close to call.
    """
    options = EngineOptions(model=path, device="host", prefill=chunk, max_context=len(ids) + GREEDY)
    with Engine.open(options) as engine, engine.sequence() as sequence:
        logits = sequence.prefill(ids, logits="all")
        greedy = continue_greedily(sequence, logits[-1], GREEDY)
    expected = Reference(path).forward(ids + greedy)
    rows = min(expected.num_decided(MARGIN), len(ids))
    scale = max(1.0, float(expected.logits.std()) / 1.5)
    assert_close(logits[:rows], expected.logits[:rows], TOLERANCE * scale)
    for step, token in enumerate(greedy):
        row = len(ids) - 1 + step
        if row < expected.num_decided(MARGIN) and lead(expected.logits[row]) > TOLERANCE * scale:
            assert token == expected.logits[row].argmax()
    return expected


def lead(logits: NDArray[Any]) -> float:
    """How far the best logit is above the second."""
    second, best = np.sort(logits)[-2:]
    return float(best - second)


def mixed_prompt(length: int) -> list[int]:
    """Tokens of all kinds; n-grams are cut at the start, twice in a row, and here and there."""
    rng = np.random.default_rng(length)
    ids: list[int] = rng.integers(0, EOS, length).tolist()
    for at in (0, 7, 8, *rng.integers(9, length, 4)):
        ids[at] = EOS
    return ids
