"""The embedded model, once for all tests of decisions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device="host")) as engine:
        yield engine
