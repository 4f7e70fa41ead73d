"""A GPU, which multiplies in 16 bits, against the reference values and against the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tests.engine.comparing import divergence, read_all
from tests.engine.passes import read_in_the_open
from tests.model.oracle import MODELS, load_oracle
from tests.model.rewrite import write_float_copy
from tests.reference.qwen4exp import Reference

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2
"""Largest error of a logit, whose standard deviation is about 1.5 in the reference models."""

DIVERGENCE = 1e-4
"""Largest Kullback-Leibler divergence of a token's distribution, in nats."""

MARGIN = 5e-3
"""Selections closer than this share of their scores may fall otherwise in 16 bits."""

ROOT = Path(__file__).parents[2]
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Case:
    """A reference model on the GPU, and what is expected of it."""

    name: str
    engine: Engine
    expected: dict[str, NDArray[Any]]

    @property
    def prompts(self) -> list[str]:
        return [key.removesuffix(".ids") for key in self.expected if key.endswith(".ids")]


@pytest.fixture(scope="module", params=[(name, form) for name in MODELS for form in ("", "-f32")])
def case(
    request: pytest.FixtureRequest, gpu: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    name, form = request.param
    path = MODELS[name]
    if form:
        path = write_float_copy(path, tmp_path_factory.mktemp("floats") / f"{name}.gguf")
    with Engine.open(EngineOptions(model=path, device=gpu, prefill=130)) as engine:
        yield Case(name + form, engine, load_oracle(name))


def test_logits_are_the_reference_ones(case: Case, record_property: Record) -> None:
    errors, divergences = [], []
    for prompt in case.prompts:
        logits = read_all(case.engine, case.expected[f"{prompt}.ids"].tolist())
        expected = case.expected.get(f"{prompt}.logits")
        if expected is None:
            logits, expected = logits[-1:], case.expected[f"{prompt}.logits_last"][None]
        errors.append(np.abs(logits - expected).max())
        divergences.append(divergence(expected, logits).max())
        assert_same_best(logits, expected)
    record_property(f"largest error of {case.name}", float(max(errors)))
    record_property(f"largest divergence of {case.name}", float(max(divergences)))
    assert max(errors) < TOLERANCE
    assert max(divergences) < DIVERGENCE


def assert_same_best(logits: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    """The same most likely token wherever the reference's lead is beyond the tolerance."""
    runner_up, best = np.sort(expected, axis=1)[:, -2:].T
    clear = best - runner_up > 2 * TOLERANCE
    assert np.array_equal(logits.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])


def test_selections_are_the_reference_ones(case: Case, record_property: Record) -> None:
    """Experts, index blocks and table rows of every token up to the first near-tie."""
    prompt = "p130" if case.name.startswith("tinyA") else "p65"
    ids = case.expected[f"{prompt}.ids"].tolist()
    reference = Reference(MODELS[case.name.removesuffix("-f32")]).forward(ids)
    opened = read_in_the_open(case.engine, ids)
    decided = reference.num_decided(MARGIN)
    record_property(f"tokens of {case.name} before a near-tie", decided)
    assert decided > 0
    for layer in range(case.engine.spec.num_layers):
        found = np.sort(opened.router_ids[layer][:decided], axis=1)
        wanted = np.sort(reference.router_ids[layer][:decided], axis=1)
        assert np.array_equal(found, wanted), f"experts of layer {layer}"
    for layer, allowed in reference.allowed.items():
        found = opened.allowed[layer][:decided, :decided]
        assert np.array_equal(found, allowed[:decided, :decided]), f"blocks of layer {layer}"
    assert opened.ngram_rows is not None
    assert np.array_equal(opened.ngram_rows, case.expected["snap.ple_rows"])


def test_host_and_gpu_agree_on_the_embedded_model(gpu: str, record_property: Record) -> None:
    """Over 2,000 tokens of text."""
    text = (ROOT / "LICENSE").read_text() + (ROOT / "README.md").read_text()
    readings = []
    for device in ("host", gpu):
        with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device=device)) as engine:
            ids = engine.tokenizer.encode(text, parse_special=False)[:2000]
            assert len(ids) == 2000
            readings.append(read_all(engine, ids))
    host, found = readings
    nats = divergence(host, found)
    same = host.argmax(axis=1) == found.argmax(axis=1)
    record_property("divergence per token, mean", float(nats.mean()))
    record_property("divergence per token, largest", float(nats.max()))
    record_property("largest difference of a logit", float(np.abs(host - found).max()))
    record_property("same most likely token, share", float(same.mean()))
    assert nats.mean() < DIVERGENCE
    assert same.mean() > 0.99
