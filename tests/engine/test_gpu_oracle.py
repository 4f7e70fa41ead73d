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
from tests.reference.qwen4exp import ModelPass, Reference

pytestmark = pytest.mark.gpu

TOLERANCE = 2e-2
"""Largest error of a logit, whose standard deviation is about 1.5 in the reference models."""

DIVERGENCE = 1e-4
"""Largest Kullback-Leibler divergence of a token's distribution, in nats."""

DIVERGENCE_BEHIND_TIES = 5e-2
"""The same, of a token that reads a prompt in which a selection may have fallen otherwise."""

MARGIN = 5e-3
"""Selections closer than this share of their scores may fall otherwise in 16 bits."""

CHUNK = 130
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
    with Engine.open(EngineOptions(model=path, device=gpu, prefill=CHUNK)) as engine:
        yield Case(name + form, engine, Reference(MODELS[name]), load_oracle(name))


def test_logits_are_the_reference_ones(case: Case, record_property: Record) -> None:
    """Within the tolerance: all tokens of float32 weights, others up to a selection that differs.

    Products with float32 weights keep float32 inputs; with all others, inputs are rounded to 16
    bits, which may decide a near-tie otherwise. From then on the pass is another one, as correct,
    and only how far its distributions lie from the reference's is bounded.
    """
    readings = [read(case, prompt) for prompt in case.prompts]
    before = [row for reading in readings for row in reading.errors[: reading.num_decided]]
    nats = np.concatenate([reading.nats for reading in readings])
    same = np.concatenate([reading.same_best for reading in readings])
    record_property(f"tokens of {case.name} compared within {TOLERANCE}", len(before))
    record_property(f"largest error there of {case.name}", float(max(before)))
    record_property(f"largest divergence of {case.name}", float(nats.max()))
    record_property(f"mean divergence of {case.name}", float(nats.mean()))
    record_property(f"same most likely token of {case.name}, share", float(same.mean()))
    assert max(before) < TOLERANCE
    for reading in readings:
        assert reading.nats[: reading.num_decided].max(initial=0) < DIVERGENCE
        assert reading.same_best[: reading.num_decided][reading.clear_rows()].all()
    assert nats.max() < (DIVERGENCE if case.is_float else DIVERGENCE_BEHIND_TIES)
    assert same.mean() > 0.9


@dataclass(frozen=True)
class Reading:
    """One prompt's logits against the reference's; a row for each token that has reference logits.

    Attributes:
        errors: largest error of each row.
        nats: divergence of each row.
        same_best: whether the most likely token is the same.
        lead: of the reference's most likely token over the next.
        num_decided: leading rows of tokens that select as the reference does.
    """

    errors: NDArray[np.float32]
    nats: NDArray[np.float64]
    same_best: NDArray[np.bool_]
    lead: NDArray[np.float32]
    num_decided: int

    def clear_rows(self) -> NDArray[np.bool_]:
        """Of the decided rows, those whose best token no error within the tolerance can change."""
        return self.lead[: self.num_decided] > 2 * TOLERANCE


def read(case: Case, prompt: str) -> Reading:
    ids = case.expected[f"{prompt}.ids"].tolist()
    logits = read_all(case.engine, ids)
    num_decided = len(ids) if case.is_float else num_alike(case, ids)
    expected = case.expected.get(f"{prompt}.logits")
    if expected is None:
        num_decided = int(num_decided == len(ids))
        logits, expected = logits[-1:], case.expected[f"{prompt}.logits_last"][None]
    runner_up, best = np.sort(expected, axis=1)[:, -2:].T
    return Reading(
        errors=np.abs(logits - expected).max(axis=1),
        nats=divergence(expected, logits),
        same_best=logits.argmax(axis=1) == expected.argmax(axis=1),
        lead=best - runner_up,
        num_decided=num_decided,
    )


def num_alike(case: Case, ids: list[int]) -> int:
    """Leading tokens that select as the reference does; none where that cannot be looked at."""
    if len(ids) > CHUNK:
        return 0
    different = differing_tokens(read_in_the_open(case.engine, ids), case.reference.forward(ids))
    return min(different, default=len(ids))


def test_selections_are_the_reference_ones(case: Case, record_property: Record) -> None:
    """Experts, index blocks and table rows; the first token that differs stands at a near-tie.

    Tokens behind it read other states than the reference's, so theirs may differ without one.
    """
    prompt = "p130" if case.name.startswith("tinyA") else "p65"
    ids = case.expected[f"{prompt}.ids"].tolist()
    reference = case.reference.forward(ids)
    opened = read_in_the_open(case.engine, ids)
    decided = reference.num_decided(MARGIN)
    different = differing_tokens(opened, reference)
    record_property(f"tokens of {case.name} before a near-tie", decided)
    record_property(f"tokens of {case.name} that select otherwise", len(different))
    assert decided > 0
    for first in sorted(different)[:1]:
        assert reference.margin[first] < MARGIN, f"token {first} differs without a near-tie"
    assert opened.ngram_rows is not None
    assert np.array_equal(opened.ngram_rows, case.expected["snap.ple_rows"])


def differing_tokens(opened: ModelPass, reference: ModelPass) -> set[int]:
    """Tokens for which any layer chose other experts or other blocks."""
    different: set[int] = set()
    for found, wanted in zip(opened.router_ids, reference.router_ids, strict=True):
        differs = np.sort(found, axis=1) != np.sort(wanted, axis=1)
        different.update(np.flatnonzero(differs.any(axis=1)).tolist())
    for layer, allowed in reference.allowed.items():
        differs = opened.allowed[layer] != allowed
        different.update(np.flatnonzero(differs.any(axis=1)).tolist())
    return different


def test_host_and_gpu_agree_on_the_embedded_model(gpu: str, record_property: Record) -> None:
    """Over 2,000 tokens of text."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
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
