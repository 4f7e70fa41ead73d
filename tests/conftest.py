"""What every test stands on: no settings from the caller's shell, reproducible properties."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# No deadline: the first call of a numba function compiles it. Derandomised: a red run is red again.
settings.register_profile("strata", deadline=None, derandomize=True)
settings.load_profile("strata")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STRATA_") and not name.startswith("STRATA_TEST_"):
            monkeypatch.delenv(name)
