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
from tests.engine.agreement import DIVERGENCE, MARGIN, TOLERANCE, compare
from tests.engine.comparing import agreement, differing_tokens, read_all
from tests.engine.passes import read_in_the_open
from tests.model.oracle import MODELS, load_oracle
from tests.model.rewrite import write_float_copy
from tests.reference.qwen4exp import ModelPass, Reference

pytestmark = pytest.mark.gpu

LONGEST = 300
"""Tokens of the longest prompt: it is one chunk, so that it can be looked into."""

FLOATS = "-f32"
ROOT = Path(__file__).parents[2]
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Case:
    """A reference model on the GPU, and what is expected of it."""

    name: str
    engine: Engine
    reference: Reference
    expected: dict[str, NDArray[Any]]

    @property
    def is_float(self) -> bool:
        """Whether every weight is in float32."""
        return self.name.endswith(FLOATS)

    @property
    def prompts(self) -> list[str]:
        return [key.removesuffix(".ids") for key in self.expected if key.endswith(".ids")]


@pytest.fixture(scope="module", params=[(name, form) for name in MODELS for form in ("", FLOATS)])
def case(
    request: pytest.FixtureRequest, gpu: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    name, form = request.param
    path = MODELS[name]
    if form:
        path = write_float_copy(path, tmp_path_factory.mktemp("floats") / f"{name}.gguf")
    with Engine.open(EngineOptions(model=path, device=gpu, prefill=LONGEST)) as engine:
        yield Case(name + form, engine, Reference(MODELS[name]), load_oracle(name))


def test_logits_are_the_reference_ones(case: Case, record_property: Record) -> None:
    """Every token of float32 weights is within the bounds, others up to a near-tie.

    Products with float32 weights keep float32 inputs; with all others, inputs are rounded to 16
    bits, which may decide a near-tie otherwise. From then on the pass is another one, as correct:
    every token of it is held against the reference that makes the same selections.
    """
    errors, nats, before, beyond = [0.0], [0.0], 0, 0
    for prompt in case.prompts:
        ids = case.expected[f"{prompt}.ids"].tolist()
        logits, opened = read_all(case.engine, ids), read_in_the_open(case.engine, ids)
        assert np.array_equal(logits, opened.logits), "another pass than the one looked into"
        followed = case.reference.forward(ids, opened)
        alike = agreement(followed.logits, logits)
        beyond += int((~alike.is_within(TOLERANCE, DIVERGENCE)).sum())
        errors.append(float(alike.errors.max()))
        nats.append(float(alike.nats.max()))
        before += holds_up_to_a_near_tie(case, prompt, opened)
    record_property(f"tokens of {case.name} before a differing selection", before)
    record_property(f"largest error of {case.name}, selections alike", max(errors))
    record_property(f"largest divergence of {case.name}, selections alike", max(nats))
    assert beyond == 0


def holds_up_to_a_near_tie(case: Case, prompt: str, opened: ModelPass) -> int:
    """The stored values, as far as selections are the reference's; how many tokens that is."""
    ids = case.expected[f"{prompt}.ids"].tolist()
    different = [] if case.is_float else differing_tokens(opened, case.reference.forward(ids))
    num = min(different, default=len(ids))
    expected = case.expected.get(f"{prompt}.logits")
    if expected is not None:
        alike = agreement(expected[:num], opened.logits[:num])
        assert alike.is_within(TOLERANCE, DIVERGENCE).all()
    elif num == len(ids):
        last = case.expected[f"{prompt}.logits_last"][None]
        assert agreement(last, opened.logits[-1:]).is_within(TOLERANCE, DIVERGENCE).all()
    return num


def test_selections_are_the_reference_ones(case: Case, record_property: Record) -> None:
    """Experts, index blocks and table rows; a selection that differs is a near-tie.

    The reference makes the same selections everywhere before it, so nothing else can be the cause.
    """
    prompt = "p130" if case.name.startswith("tinyA") else "p65"
    ids = case.expected[f"{prompt}.ids"].tolist()
    opened = read_in_the_open(case.engine, ids)
    shortfall = case.reference.forward(ids, opened).shortfall
    record_property(f"tokens of {case.name} that select otherwise", int((shortfall > 0).sum()))
    record_property(f"largest shortfall of {case.name}", float(shortfall.max()))
    assert shortfall.max() < MARGIN
    assert opened.ngram_rows is not None
    assert np.array_equal(opened.ngram_rows, case.expected["snap.ple_rows"])


def test_host_and_gpu_agree_on_the_embedded_model(gpu: str, record_property: Record) -> None:
    """Over 2,000 tokens of text; where they do not, a near-tie is the cause."""
    text = "".join(path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    found = compare(DEMO_MODEL_PATH, gpu, text, 2000)
    for name, value in found.figures().items():
        record_property(name, value)
    before = found.devices.is_within(TOLERANCE, DIVERGENCE)[: found.num_before]
    assert before.all()
    assert found.rounding.is_within(TOLERANCE, DIVERGENCE).all()
    assert found.shortfall < MARGIN
    assert found.devices.nats.mean() < DIVERGENCE
    assert found.devices.same_best.mean() > 0.99
