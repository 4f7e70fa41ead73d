"""`strata decide calibrate`: what it prints and keeps, and what level L1 takes of it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import orjson
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.decisions import fitting
from strata_cli.engine.engine import Engine

ASK = ["-q", "Is this a game?", "--yes-no"]
STATES = [
    ("A shooter with many maps.", True),
    ("A mail transfer agent.", False),
    ("A puzzle for children.", True),
    ("A library for images.", False),
    ("A chess engine.", True),
    ("Fonts of a foundry.", "no"),
]


@pytest.fixture
def labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fitting, "LEAST_STATES", 4)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "labelled.jsonl"
    lines = [{"state": state, "label": label} for state, label in STATES]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def calibrate(labelled: Path, *args: str) -> int:
    files = ["--jsonl", str(labelled), "--out", "c.json"]
    return run(strata, ["decide", "calibrate", *files, *args])


def test_what_is_fitted_is_shown_kept_and_used(
    labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate(labelled, *ASK) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Is this a game?\n  temperature ")
    assert "fitted on 3 states; the figures are about 3 others" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert [row[0] for row in rows if len(row) == 6 and row[0] in ("raw", "L0", "L1")] == [
        *("raw", "L0", "L1")
    ]
    (kept,) = orjson.loads(Path("c.json").read_bytes())["questions"].values()
    lacking = "none of the 3 states that the figures are about has the label 'Yes'"
    assert f"  warning: {lacking}" in shown
    assert any(one.startswith(lacking) for one in kept["warnings"])
    assert set(kept["tested"]["L1"]) == {"accuracy", "ece", "flips", "coverage", "risk"}
    use = ["decide", STATES[0][0], *ASK, "--json", "--level", "L1", "--calibration", "c.json"]
    assert run(strata, use) == 0
    (decision,) = orjson.loads(capsys.readouterr().out)["questions"].values()
    assert decision["level"] == "L1"
    assert decision["diagnostics"]["temperature"] == kept["temperature"]
    assert run(strata, [*use[:-4], "--level", "L1", "--calibration", "c.json", *ASK[:1], "X?"]) == 2
    assert "was made for other questions than 'X?'" in capsys.readouterr().err
    assert run(strata, [*use, "--prior", "none"]) == 2
    assert "was made with --prior content_free, and this is none" in capsys.readouterr().err


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_plot_is_a_picture(labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibrate(labelled, *ASK, "--plot", "p.png", "--json") == 0
    assert orjson.loads(capsys.readouterr().out) == orjson.loads(Path("c.json").read_bytes())
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")


def test_lines_without_a_label_stop_or_are_left_out(
    labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labelled.write_bytes(b'{"state": "s", "label": "maybe"}\n' + labelled.read_bytes())
    assert calibrate(labelled, *ASK) == 2
    assert "labelled.jsonl, line 1: 'maybe' is none of the answers" in capsys.readouterr().err
    assert not Path("c.json").exists()
    assert calibrate(labelled, *ASK, "--bad-lines", "skip") == 0
    assert "warning: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*ASK], "calibrate needs --jsonl"),
        ([*ASK, "--jsonl", "labelled.jsonl"], "calibrate needs --out"),
        (["--jsonl", "labelled.jsonl", "--out", "c.json"], "no question"),
        ([*ASK, "--jsonl", "labelled.jsonl", "--out", "labelled.jsonl"], "is the states' file"),
        ([*ASK, "--jsonl", "x", "--out", "c", "--prior", "batch"], "--prior must be one of"),
    ],
)
def test_what_cannot_be_fitted_is_one_error_before_the_model_loads(
    labelled: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(Engine, "open", None)
    assert run(strata, ["decide", "calibrate", *args]) == 2
    assert message in capsys.readouterr().err


def test_few_states_are_refused_before_the_first_is_read(
    labelled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "LEAST_STATES", 100)
    assert calibrate(labelled, *ASK) == 2
    assert "6 labelled states are too few: 100 are the least" in capsys.readouterr().err
