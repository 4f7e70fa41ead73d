"""What every test stands on: no settings from the caller's shell, reproducible properties."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A job started in the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: the first call of a numba function compiles it. Derandomised: a red run is red again.
settings.register_profile("strata", deadline=None, derandomize=True)
settings.load_profile("strata")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("STRATA_") and not name.startswith("STRATA_TEST_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logging_as_found() -> Iterator[None]:
    """A command sets the level of its run; the next test must not inherit it."""
    logger = logging.getLogger("strata_cli")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers = handlers
