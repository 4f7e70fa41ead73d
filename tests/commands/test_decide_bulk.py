"""`strata decide --jsonl`: rows in a file, resumed, the same as decisions one by one."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.decisions.bulk import BulkJob
from strata_cli.decisions.bulk_input import read_lines
from strata_cli.decisions.questions import choice
from strata_cli.decisions.ray_job import Chunk, RayJob, Worker, chunks_of
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.device import cuda_driver
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.errors import ConfigError
from strata_cli.models import DEMO_MODEL_PATH

STATES = [
    "A fast multiplayer shooter in which teams fight over flags.",
    "A mail transfer agent.",
    "Bindings of a library of images.",
]
ASK = ["-q", "Which section does this package belong to?", "-o", "mail", "-o", "games"]
RAW = [*ASK, "--level", "raw"]


@pytest.fixture
def states(tmp_path: Path) -> Path:
    path = tmp_path / "states.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"state": state}) + b"\n" for state in STATES))
    return path


def bulk(states: Path, rows: Path, *more: str) -> int:
    return run(strata, ["decide", "--jsonl", str(states), "--out", str(rows), *more])


def test_rows_equal_single_decisions_and_resumed_rows_the_undisturbed(
    states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    assert bulk(states, rows, *RAW, "--threshold", "0.6", "--json") == 0
    captured = capsys.readouterr()
    assert orjson.loads(captured.out) == {"version": 1, "resumed": 0, "added": 3, "problems": 0}
    assert "rows.jsonl: 3 rows, " in captured.err
    whole = rows.read_bytes()
    assert run(strata, ["decide", STATES[1], *RAW, "--json", "--threshold", "0.6"]) in (0, 3)
    alone = orjson.loads(capsys.readouterr().out)
    row = orjson.loads(whole.splitlines()[1])
    assert {key: row[key] for key in ("level", "questions", "abstained", "warnings")} == {
        key: alone[key] for key in ("level", "questions", "abstained", "warnings")
    }
    rows.write_bytes(whole[: len(whole) // 2])
    assert bulk(states, rows, *RAW, "--threshold", "0.6") == 0
    assert "rows, 1 of them from before, " in capsys.readouterr().err
    assert rows.read_bytes() == whole


def test_bad_lines_stop_the_run_or_are_skipped(
    states: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    long = orjson.dumps({"state": "word " * 200})
    states.write_bytes(states.read_bytes().replace(b"\n", b"\n" + long + b"\n", 1))
    assert bulk(states, rows, *RAW, "--max-context", "160") == 2
    error = capsys.readouterr().err
    assert "1 rows; the same command goes on from there" in error
    assert "states.jsonl, line 2: state and question take" in error
    assert "--bad-lines skip to go on without it" in error
    assert bulk(states, rows, *RAW, "--max-context", "160", "--bad-lines", "skip") == 0
    error = capsys.readouterr().err
    assert "warning: " in error
    assert "line 2: state and question take" in error
    assert "4 rows, 1 of them from before, 1 lines without an answer" in error
    assert "error" in orjson.loads(rows.read_bytes().splitlines()[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--jsonl", "IN"], "--jsonl needs --out"),
        (["--out", "OUT"], "--out needs --jsonl"),
        (["--ray"], "--ray needs --jsonl"),
        (["--jsonl", "IN", "--out", "OUT", "a state"], "--jsonl and STATE cannot be used together"),
        (["--jsonl", "IN", "--out", "OUT", "--expect", "mail"], "--jsonl and --expect cannot"),
        (["--jsonl", "IN", "--out", "OUT", "--prior", "batch"], "--jsonl and --prior batch cannot"),
        (["--jsonl", "IN", "--out", "IN"], "is the states' file, which this would overwrite"),
        (["--jsonl", "IN", "--out", "/dev/null"], "is no regular file"),
        (["--jsonl", "nowhere", "--out", "OUT"], "cannot read nowhere"),
        (["--jsonl", "IN", "--out", "OUT", "--bad-lines", "no"], "--bad-lines must be one of stop"),
        (["--jsonl", "IN", "--out", "OUT", "--workers", "2"], "--workers needs --ray"),
        (["--jsonl", "IN", "--out", "OUT", "--ray"], "--ray needs --device host or cuda:0, not"),
        (["--jsonl", "-", "--out", "OUT", "--ray"], "--ray needs a file of states, not stdin"),
        (["s", "--level", "L1"], "--level L1 needs --calibration FILE"),
        (["s", "--level", "raw", "--prior", "none"], "--prior none would have no effect: --level"),
        (["s", "--calibration", "IN"], "--calibration is for --level L1, and this is L0"),
        (["s", "--level", "L1", "--calibration", "IN"], "IN is no calibration"),
    ],
)
def test_what_cannot_be_run_is_one_error_before_the_model_loads(
    states: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(Engine, "open", None)
    monkeypatch.chdir(tmp_path)
    states.rename("IN")
    assert run(strata, ["decide", *args, *ASK]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize("has_gpu", [False, True])
def test_ray_is_told_the_device_that_works_here(
    states: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
) -> None:
    def find(ordinal: int) -> None:
        if not has_gpu:
            raise ConfigError(f"there is no device cuda:{ordinal}: found 0 GPU(s)")

    monkeypatch.setattr(cuda_driver, "find_gpu", find)
    assert bulk(states, tmp_path / "rows", *RAW, "--device", "auto", "--ray") == 2
    device = "cuda:0" if has_gpu else "host"
    assert f"  try: --device {device}, which auto" in capsys.readouterr().err


def test_a_ray_worker_gives_the_rows_of_the_local_run(states: Path, tmp_path: Path) -> None:
    rules = DecisionRules(level="raw")
    question = choice(ASK[1], ["mail", "games"])
    job = BulkJob(questions=(question,), rules=rules, threshold=None, engine="e")
    options = EngineOptions(model=DEMO_MODEL_PATH, device="host")
    ray_job = RayJob(job=job, options=options, lanes=2, lines=states, workers=2)
    with states.open("rb") as file:
        assert list(chunks_of(read_lines(file), 3)) == [Chunk(0, 1, 3)]
    with states.open("rb") as file:
        lines = list(read_lines(file))
    second = Chunk(lines[1].offset, 2, 2)
    worker = Worker(pickle.loads(pickle.dumps(ray_job)))
    one, two, three = worker.rows(Chunk(0, 1, 3))
    assert worker.rows(second) == [two, three]
    assert one.problem is None
    worker.close()


@pytest.mark.slow
@pytest.mark.skipif("STRATA_TEST_RAY" not in os.environ, reason="STRATA_TEST_RAY starts a cluster")
def test_two_ray_workers_give_the_bytes_of_the_local_run(tmp_path: Path) -> None:
    states, rows = tmp_path / "states.jsonl", [tmp_path / "here", tmp_path / "ray"]
    lines = [{"state": f"{STATES[i % 3]} Number {i}.", "id": i} for i in range(16)]
    states.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    common = [sys.executable, "-m", "strata_cli", "decide", "--jsonl", str(states), *ASK]
    cluster = ["--ray", "--workers", "2", "--threads", "1"]
    for path, more in zip(rows, ([], cluster), strict=True):
        command = [*common, "--out", str(path), "--device", "host", *more]
        subprocess.run(command, check=True, capture_output=True)
    assert rows[0].read_bytes() == rows[1].read_bytes()
