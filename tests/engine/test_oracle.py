"""The engine against values that transformers computed; see tests/fixtures/oracle/README.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, EngineOptions
from tests.engine.comparing import assert_close, continue_greedily
from tests.engine.passes import read_in_the_open
from tests.model.oracle import MODELS, load_oracle
from tests.reference.qwen4exp import ModelPass

PROMPTS = ("p1", "p3", "p7", "p64", "p65", "p130", "p300")
SNAPSHOT_PROMPT = {"tinyA-q8_0": "p130", "tinyA-iq4nl-fused": "p130", "mixB-quant": "p65"}


@dataclass(frozen=True)
class Case:
    """A reference model, opened, and what is expected of it."""

    engine: Engine
    expected: dict[str, NDArray[Any]]
    snapshot_prompt: str


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name = request.param
    options = EngineOptions(model=MODELS[name], device="host", prefill=130)
    with Engine.open(options) as engine:
        yield Case(engine, load_oracle(name), SNAPSHOT_PROMPT[name])


@pytest.fixture(scope="module")
def opened(case: Case) -> ModelPass:
    """The snapshot's prompt, read layer by layer."""
    ids = case.expected[f"{case.snapshot_prompt}.ids"].tolist()
    return read_in_the_open(case.engine, ids)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_tokens_are_the_reference_ones(case: Case, prompt: str) -> None:
    expected = {
        key.partition(".")[2]: value
        for key, value in case.expected.items()
        if key.startswith(prompt + ".")
    }
    with case.engine.sequence() as sequence:
        logits = sequence.prefill(expected["ids"].tolist(), logits="all")
        assert_close(logits[-1], expected["logits_last"])
        if "logits" in expected:
            assert_close(logits, expected["logits"])
        assert logits.argmax(axis=1).tolist() == expected["argmax"].tolist()
        assert continue_greedily(sequence, logits[-1], 16) == expected["greedy"].tolist()


def test_experts_are_the_reference_ones(case: Case, opened: ModelPass) -> None:
    for layer in range(case.engine.spec.num_layers):
        ids, weights = (case.expected[f"snap.router_{key}_{layer}"] for key in ("ids", "w"))
        assert np.array_equal(opened.router_ids[layer], ids)
        np.testing.assert_allclose(opened.router_weights[layer], weights, rtol=1e-4)


def test_attended_positions_are_the_reference_ones(case: Case, opened: ModelPass) -> None:
    layers = [layer for layer, ratio in enumerate(case.engine.spec.index_ratio) if ratio]
    assert list(opened.allowed) == layers
    for layer in layers:
        expected = case.expected[f"snap.qsa_sel_{layer}"]
        assert np.array_equal(opened.allowed[layer], expected)
        assert expected.sum() < np.tri(len(expected)).sum(), "something must have been left out"


def test_ngram_rows_are_the_reference_ones(case: Case, opened: ModelPass) -> None:
    assert opened.ngram_rows is not None
    assert np.array_equal(opened.ngram_rows, case.expected["snap.ple_rows"])


def test_residual_streams_are_within_a_ten_thousandth(case: Case, opened: ModelPass) -> None:
    rows = case.expected["snap.rows"]
    compared = 0
    for layer, residual in enumerate(opened.residual):
        if (expected := case.expected.get(f"snap.resid_{layer}")) is not None:
            assert relative_error(residual[rows], expected) < 1e-4
            compared += 1
    assert compared
    assert relative_error(opened.final[rows], case.expected["snap.final"]) < 1e-4


def test_the_layer_by_layer_pass_is_the_ordinary_one(case: Case, opened: ModelPass) -> None:
    ids = case.expected[f"{case.snapshot_prompt}.ids"].tolist()
    with case.engine.sequence() as sequence:
        assert np.array_equal(sequence.prefill(ids, logits="all"), opened.logits)


def relative_error(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest error of a row, as a share of the row's length."""
    error = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(error.max())
