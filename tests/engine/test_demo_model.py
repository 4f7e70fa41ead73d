"""The embedded model against transformers on the weights that its file stores.

The expected values come from tools/demo_model/golden.py: float32, eager, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tests.engine.comparing import assert_close, continue_greedily

GOLDEN = Path(__file__).parent.parent / "fixtures" / "demo_golden.npz"
with np.load(GOLDEN) as _stored:
    EXPECTED = {key: _stored[key] for key in _stored.files}
PROMPTS = sorted(key.removesuffix(".ids") for key in EXPECTED if key.endswith(".ids"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device="host", prefill=192)) as engine:
        yield engine


@pytest.mark.parametrize("prompt", PROMPTS)
def test_text_becomes_the_trained_tokens(engine: Engine, prompt: str) -> None:
    text = EXPECTED[f"{prompt}.text"].tobytes().decode()
    ids = engine.tokenizer.encode(text, parse_special=True)
    assert ids == EXPECTED[f"{prompt}.ids"].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_tokens_are_the_reference_ones(engine: Engine, prompt: str) -> None:
    with engine.sequence() as sequence:
        logits = sequence.prefill(EXPECTED[f"{prompt}.ids"].tolist())
        assert_close(logits, EXPECTED[f"{prompt}.logits_last"])
        greedy = continue_greedily(sequence, logits, 16)
    assert greedy == EXPECTED[f"{prompt}.greedy"].tolist()
