"""`strata decide`: what it prints, what it refuses, and how it exits."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.engine.engine import Engine

STATE = "A fast multiplayer shooter in which teams fight over flags on many maps."
SECTION = ["-q", "Which section does this package belong to?"]
CHOICE = [*SECTION, "-o", "mail", "-o", "games", "-o", "python", "-o", "fonts"]
YES_NO = ["-q", "Is this a game?", "--yes-no"]
FILE = {
    "section": {"question": SECTION[1], "options": ["mail", "games"]},
    "game": {"question": "Is this a game?", "yes_no": True},
    "speed": {"question": "How fast is it?", "scale": [0, 10]},
}


def decide_json(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> Any:
    assert run(strata, ["decide", *args, "--json"]) == code
    return orjson.loads(capsys.readouterr().out)


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_json_object_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    result = decide_json(capsys, STATE, *CHOICE)
    assert set(result) == {
        *("version", "model", "device", "level", "questions", "abstained", "warnings"),
        *(
            "canonical",
            "depends_on_traffic",
            "prompt_tokens",
            "reused_tokens",
            "read_tokens",
            "timings",
        ),
    }
    (decision,) = result["questions"].values()
    assert set(decision) == {
        *("kind", "level", "answer", "confidence", "distribution", "diagnostics"),
    }
    assert decision["answer"] == "games"
    assert list(decision["distribution"]) == ["mail", "games", "python", "fonts"]
    assert decision["confidence"] == decision["distribution"]["games"]
    assert decision["diagnostics"]["prior_method"] == "content_free"
    assert result["prompt_tokens"] == result["reused_tokens"] + result["read_tokens"]
    assert result["reused_tokens"] > 0
    assert result["canonical"] is True
    assert (result["version"], result["level"], result["abstained"]) == (1, "L0", [])


def test_two_processes_agree_to_the_last_digit(capsys: pytest.CaptureFixture[str]) -> None:
    here = decide_json(capsys, STATE, *YES_NO)
    command = [sys.executable, "-m", "strata_cli", "decide", STATE, *YES_NO, "--json"]
    there = orjson.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert there["questions"] == here["questions"]


def test_argument_file_and_stdin_are_one_state_and_reuse_moves_no_digit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "state.txt"
    path.write_text(STATE + "\r\n", newline="")
    stdin(monkeypatch, f"{STATE}\n".encode())
    runs = [
        decide_json(capsys, *source, *YES_NO, *more)
        for source, more in (
            ([STATE], ["--no-reuse"]),
            (["--file", str(path)], ["--prefill", "50"]),
            (["-"], []),
        )
    ]
    assert runs[0]["reused_tokens"] == 0
    assert runs[0]["questions"] == runs[1]["questions"] == runs[2]["questions"]


def test_several_questions_come_from_a_file_and_share_one_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "questions.json"
    path.write_bytes(orjson.dumps(FILE))
    result = decide_json(capsys, STATE * 20, "--questions", str(path))
    assert list(result["questions"]) == list(FILE)
    section, game, speed = result["questions"].values()
    assert section["answer"] == "games"
    assert game["answer"] is (game["probability"] >= 0.5)
    assert speed["answer"] == speed["value"] == pytest.approx(5, abs=5)
    assert result["read_tokens"] < result["prompt_tokens"] / 2


def test_people_get_a_bar_for_each_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["decide", STATE, *CHOICE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == SECTION[1]
    assert [line.split()[0] for line in lines[1:5]] == ["mail", "games", "python", "fonts"]
    assert lines[2].count("#") > 15 > max(line.count("#") for line in (lines[1], lines[3]))
    assert lines[5].startswith("  answer: games  (level L0, labels hold ")
    assert ", order flips 0." in lines[5]


@pytest.mark.parametrize(
    "answers", [["--scale", "0", "10"], ["--score", "slow", "--score", "fast"]]
)
def test_levels_are_read_in_one_order_which_flips_nothing(
    capsys: pytest.CaptureFixture[str], answers: list[str]
) -> None:
    assert run(strata, ["decide", STATE, "-q", "How fast is it?", *answers]) == 0
    shown = capsys.readouterr().out
    assert " of the mass)\n" in shown
    assert "order flips" not in shown


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--threshold", "0.999"], 3),
        (["--expect", "mail"], 4),
        (["--expect", "games", "--threshold", "0.5"], 0),
        (["--expect", "mail", "--threshold", "0.999"], 3),
    ],
)
def test_scripts_see_how_it_ended(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int
) -> None:
    result = decide_json(capsys, STATE, *CHOICE, "--level", "raw", *args, code=code)
    assert len(result["abstained"]) == (code == 3)


def test_a_batch_prior_is_named_as_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    args = [STATE, *YES_NO, "--prior", "batch"]
    result = decide_json(capsys, *args)
    assert (result["depends_on_traffic"], result["canonical"]) == (True, False)
    assert run(strata, ["decide", *args]) == 0
    assert "depend on the states decided on before" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([STATE], "no question"),
        ([STATE, *SECTION], "nothing says what can be answered"),
        ([STATE, *SECTION, "-o", "a"], "1 option to choose from"),
        ([STATE, *SECTION, *(f"-oX{i}" for i in range(256))], "256 options"),
        ([STATE, *SECTION, "-o", "a", "-o", "a"], "options 1 and 2 are the same"),
        ([STATE, *SECTION, "-o", "a", "--yes-no"], "--option and --yes-no cannot be used together"),
        ([STATE, *SECTION, "--scale", "nan", "1"], "--scale must be two numbers, got 'nan'"),
        ([STATE, *SECTION, "--scale", "0", "1_0"], "--scale must be two numbers, got '1_0'"),
        ([STATE, *SECTION, "--scale", "-1", "-2"], "a scale from -1 to -2 does not go up"),
        ([STATE, *SECTION, "--scale", "0", "1", "--bins", "x"], "--bins must be a whole number"),
        ([STATE, *SECTION, "--scale", "0", "1", "--bins", "11"], "11 bins to choose from"),
        ([STATE, *SECTION, "--yes-no", "--bins", "3"], "--bins needs --scale"),
        ([STATE, *YES_NO, "--by-text"], "--by-text needs --option"),
        ([STATE, "--questions", "q.json", "--by-text"], "--questions and --by-text cannot be"),
        ([STATE, *CHOICE, "--expect", "web"], "--expect must be one of the options, got 'web'"),
        ([STATE, *CHOICE, "--threshold", "1.5"], "--threshold must be a number from 0 to 1"),
        ([STATE, *CHOICE, "--level", "L2"], "--level must be one of raw, L0, L1, got 'L2'"),
        ([STATE, *CHOICE, "--questions", "q.json"], "--questions and --question cannot be used"),
        ([STATE, "--questions", "nowhere.json"], "cannot read nowhere.json"),
        ([STATE, "--file", "x", *CHOICE], "STATE and --file cannot be used together"),
        (["-", "--questions", "-"], "cannot both come from stdin"),
        ([" ", *CHOICE], "the state is empty"),
        ([STATE, "--questions", "twice.json"], "'a' is there twice"),
        ([STATE, "--questions", "nan.json"], "NaN is no number of JSON"),
    ],
)
def test_what_cannot_be_asked_is_one_error_before_the_model_loads(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(Engine, "open", None)
    monkeypatch.chdir(tmp_path)
    ask = '"a": {"question": "A?", "yes_no": true}'
    Path("twice.json").write_text(f"{{{ask}, {ask}}}")
    Path("nan.json").write_text('{"a": {"question": "A?", "scale": [NaN, 1]}}')
    assert run(strata, ["decide", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_a_state_longer_than_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["decide", STATE, *CHOICE, "--max-context", "64"]) == 2
    error = capsys.readouterr().err
    assert "do not fit the context of 64 tokens" in error
    assert "raise --max-context, to 2048 at most" in error
