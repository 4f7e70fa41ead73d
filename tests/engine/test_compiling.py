"""A first start on the host: what it says, what it compiles, and how it can be interrupted."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata_cli.engine import compiling
from strata_cli.engine.device.host_compiling import CompilingStream
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.kernels import jit
from strata_cli.engine.opening import COLD_NOTICE
from strata_cli.models import DEMO_MODEL_PATH

OPTIONS = EngineOptions(model=DEMO_MODEL_PATH, device="host", prefill=8)


@pytest.fixture
def marker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the cache is noted as complete; the cache itself stays, so nothing takes long."""
    path = tmp_path / "complete"
    monkeypatch.setattr(jit, "_COMPLETE", path)
    return path


def test_a_first_start_says_so_counts_kernels_and_is_the_last(marker: Path) -> None:
    notices: list[str] = []
    counts: list[tuple[int, int]] = []
    thresholds = gc.get_threshold()
    for _ in range(2):
        Engine.open(
            OPTIONS,
            notice=notices.append,
            compiling=lambda done, total: counts.append((done, total)),
        ).close()
    assert notices == [COLD_NOTICE]
    assert marker.exists()
    total = len(counts)
    assert total > 10
    assert counts == [(done, total) for done in range(1, total + 1)]
    assert gc.get_threshold() == thresholds


def test_a_start_without_a_cache_says_so_in_one_line_and_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, marker: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marker.touch()
    notices: list[str] = []
    monkeypatch.setattr(jit, "_keeper", jit._Keeper("/tmp/x: is a link"))
    monkeypatch.setattr(subprocess, "Popen", None)  # a second process could not help
    Engine.open(OPTIONS, notice=notices.append).close()
    assert notices == []
    assert caplog.messages == [
        "compiling kernels at every start, they cannot be kept: /tmp/x: is a link"
    ]


def test_a_start_that_is_interrupted_is_not_the_last_first_one(marker: Path) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Engine.open(OPTIONS, compiling=interrupt)
    assert not marker.exists()


def test_the_second_process_begins_where_the_first_one_ends(
    monkeypatch: pytest.MonkeyPatch, marker: Path
) -> None:
    steps: list[str] = []
    noted = CompilingStream.steps
    monkeypatch.setattr(
        CompilingStream,
        "steps",
        lambda stream: [lambda: steps.append("kernel") for _ in noted(stream)],
    )
    monkeypatch.setattr(compiling, "_compile_hash", lambda: steps.append("hash"))
    monkeypatch.setattr(sys, "argv", ["-c", str(DEMO_MODEL_PATH)])
    compiling.main()
    assert not marker.exists()  # that is for the first process to say
    from_the_end, steps[:] = list(steps), []
    Engine.open(OPTIONS).close()
    assert from_the_end == steps[::-1]
    assert steps[-1] == "hash"
    assert len(steps) > 10


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_end_of_a_first_start_is_the_end_of_its_second_process(
    tmp_path: Path, number: int, code: int
) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "strata_cli", "read", "x", "--raw", "--progress"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        start_new_session=True,  # a group of its own, to see who is left
    ) as process:
        assert process.stderr is not None
        seen = b""
        while b"compiling:" not in seen and (data := os.read(process.stderr.fileno(), 4096)):
            seen += data
        assert COLD_NOTICE.encode() in seen
        os.kill(process.pid, number)
        output, error = process.communicate(timeout=30)
        assert (process.returncode, output) == (code, b"")
        assert b"Traceback" not in error
        until = time.monotonic() + 20
        while (left := running(process.pid)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not left


def running(group: int) -> list[str]:
    """Processes of a group, without those that are over and whose parent has not asked."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, _parent, its_group, *_ = path.read_text().rpartition(") ")[2].split()
            if int(its_group) == group and state != "Z":
                found.append(path.parent.name)
    return found
