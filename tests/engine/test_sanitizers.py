"""No kernel reads or writes where it may not, and none races with itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FOUND = 77
# The driver is asked for parameters until it refuses: that error is no fault.
TOOLS = {
    "memcheck": ["--leak-check", "no", "--report-api-errors", "no"],
    "racecheck": ["--racecheck-report", "analysis"],
    "synccheck": [],
}


@pytest.mark.parametrize("reads", ["resident", "streamed"])
@pytest.mark.parametrize("tool", TOOLS)
def test_a_small_model_is_read_cleanly(gpu: str, tool: str, reads: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(FOUND)]
    command += [sys.executable, "-m", "tests.engine.sanitized", reads, gpu]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-8_000:]
    assert "STATE_HASH" in said
    assert "0 errors" in said or "0 hazards" in said, said[-2_000:]
