"""Settings that every command that runs a model obeys: the trace and the residual dump."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.engine.trace import read_trace
from strata_cli.models import DEMO_MODEL_PATH

READ = ["read", "--tokens", "5,6,7", "--device", "host"]


def test_a_read_writes_its_trace_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(strata, READ) == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("STRATA_TRACE", str(tmp_path / "t"))
    assert run(strata, READ) == 0
    assert capsys.readouterr().out == plain
    names = {event["ev"] for event in read_trace(tmp_path / "t")}
    assert {"run.begin", "prompt.begin", "chunk.begin", "layer.run", "prompt.end"} <= names


def test_a_read_writes_its_trace_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRATA_TRACE", "1")
    assert run(strata, READ) == 0
    first = orjson.loads(capsys.readouterr().err.splitlines()[0])
    assert (first["v"], first["ev"]) == (1, "run.begin")


def test_a_read_writes_its_residuals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_PREFILL_DUMP_R", str(tmp_path / "r"))
    assert run(strata, READ) == 0
    assert (tmp_path / "r").read_bytes()[:8] == bytes(8)


@pytest.mark.parametrize("variable", ["STRATA_TRACE", "STRATA_PREFILL_DUMP_R"])
def test_the_model_is_not_written_over(
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(DEMO_MODEL_PATH.read_bytes())
    monkeypatch.setenv(variable, str(model))
    assert run(strata, [*READ, "--model", str(model)]) == 2
    assert f"{variable}: {model} is the model" in capsys.readouterr().err
    assert model.stat().st_size == DEMO_MODEL_PATH.stat().st_size
    monkeypatch.setenv(variable, str(tmp_path / "missing" / "x"))
    assert run(strata, READ) == 2
    assert f"{variable}: cannot write" in capsys.readouterr().err
