"""`strata read --suffixes`: one object a line, each as of a read of its own; or one clear error."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from strata_cli.commands.main import run, strata

PREFIX = "The quick brown"
LINES = [{"text": " fox"}, {"tokens": [5, 6, 7]}, {"text": " fox jumps", "id": 3}, {"tokens": [9]}]


@pytest.fixture
def suffixes(tmp_path: Path) -> Path:
    return write(tmp_path, b"\n".join(map(orjson.dumps, LINES)))


def write(folder: Path, content: bytes) -> Path:
    path = folder / "suffixes.jsonl"
    path.write_bytes(content)
    return path


def read_lines(capsys: pytest.CaptureFixture[str], *args: str) -> list[Any]:
    assert run(strata, ["read", *args, "--json"]) == 0
    return [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]


def read_one(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert run(strata, ["read", *args, "--json"]) == 0
    return orjson.loads(capsys.readouterr().out)


def test_each_line_is_as_a_read_of_its_own(
    capsys: pytest.CaptureFixture[str], suffixes: Path, tmp_path: Path
) -> None:
    args = ("--raw", "--top", "4", "--allowed-token-ids", "3,2")
    rows = tmp_path / "rows.npy"
    results = read_lines(
        capsys, PREFIX, *args, "--suffixes", str(suffixes), "--logits-out", str(rows)
    )
    anew = read_lines(capsys, PREFIX, *args, "--suffixes", str(suffixes), "--no-reuse")
    whole = read_one(capsys, f"{PREFIX} fox", *args, "--logits-out", str(tmp_path / "one.npy"))
    assert [result["line"] for result in results] == [1, 2, 3, 4]
    assert np.array_equal(np.load(rows)[0], np.load(tmp_path / "one.npy"))
    assert np.load(rows).shape[0] == 4
    assert set(results[0]) == {"line", *whole}
    for result, other in zip(results, anew, strict=True):
        for key in ("prompt_tokens", "top_logprobs", "allowed", "canonical"):
            assert result[key] == other[key]
        assert (result["reused_tokens"], other["reused_tokens"]) == (3, 0)
        assert result["prompt_tokens"] == 3 + result["read_tokens"] == other["read_tokens"]
        assert result["generated_ids"] == []
    assert results[0]["top_logprobs"] == whole["top_logprobs"]
    assert results[0]["allowed"] == whole["allowed"]


def test_small_chunks_change_no_digit(capsys: pytest.CaptureFixture[str], suffixes: Path) -> None:
    args = (PREFIX, "--suffixes", str(suffixes), "--allowed", "A")
    wide, narrow = (read_lines(capsys, *args, "--prefill", n) for n in ("512", "3"))
    assert [entry["allowed"] for entry in wide] == [entry["allowed"] for entry in narrow]


def test_people_get_a_table_for_each_line(
    capsys: pytest.CaptureFixture[str], suffixes: Path
) -> None:
    assert run(strata, ["read", PREFIX, "--suffixes", str(suffixes), "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[::3] == ["line 1", "line 2", "line 3", "line 4"]
    assert len(lines) == 12


def test_a_dash_reads_the_suffixes_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "x"}\r\n')))
    assert len(read_lines(capsys, PREFIX, "--suffixes", "-")) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no suffixes"),
        (b'{"text": "a"}\n\n{"text": "b"}\n', "line 2 is empty"),
        (b'{"text": "a"}\n \r\n', "line 2 is empty"),
        (b'{"text": "a"}\n{"text"', "line 2 is not valid JSON"),
        (b'{"text": "\xff"}', "line 1 is not valid JSON"),
        (b"[1, 2]", "line 1 has not one of text and tokens"),
        (b'{"txt": "a"}', "line 1 has not one of text and tokens"),
        (b'{"text": "a", "tokens": [1]}', "line 1 has not one of text and tokens"),
        (b'{"text": 5}', "line 1: text is not a text: '5'"),
        (b'{"text": null}', "line 1: text is not a text: 'null'"),
        (b'{"tokens": [1, true]}', "line 1: tokens is not a list of whole numbers"),
        (b'{"tokens": "1"}', "line 1: tokens is not a list of whole numbers"),
        (b'{"text": "a"}\n{"text": ""}', "line 2: the suffix is empty"),
        (b'{"tokens": []}', "line 1: the suffix is empty"),
        (b'{"text": "a", "text": "b"}', "line 1: the key 'text' is there twice"),
        (b'{"text": "a"}\n{"tokens": [8192]}', "line 2: token id 8192"),
        (b'{"tokens": [-1]}', "line 1: token id -1"),
    ],
)
def test_a_wrong_line_is_one_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: bytes, message: str
) -> None:
    assert run(strata, ["read", PREFIX, "--suffixes", str(write(tmp_path, content))]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "suffixes.jsonl" in captured.err


def test_what_does_not_fit_is_told_in_both_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, b'{"tokens": [1]}\n' + orjson.dumps({"tokens": [1] * 14}))
    args = ["read", PREFIX, "--raw", "--max-context", "16", "--suffixes", str(path)]
    assert run(strata, args) == 2
    message = "line 2: 3 prefix tokens and 14 suffix tokens do not fit the context of 16 tokens"
    error = capsys.readouterr().err
    assert message in error
    assert "shorten either or raise --max-context, to 2048 at most" in error


def test_no_more_context_is_advised_than_the_model_has(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = write(tmp_path, orjson.dumps({"tokens": [1] * 2048}))
    assert run(strata, ["read", PREFIX, "--raw", "--suffixes", str(path)]) == 2
    error = capsys.readouterr().err
    assert "do not fit the context of 2048 tokens" in error
    assert "--max-context" not in error


@pytest.mark.parametrize(
    "flags",
    [["--max-tokens", "1"], ["--all-logits-out", "x.npy"], ["--state-hash"]],
    ids=["max-tokens", "all-logits", "state-hash"],
)
def test_what_makes_no_sense_for_suffixes_is_refused(
    capsys: pytest.CaptureFixture[str], suffixes: Path, flags: list[str]
) -> None:
    assert run(strata, ["read", PREFIX, "--suffixes", str(suffixes), *flags]) == 2
    assert f"--suffixes and {flags[0]} cannot be used together" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", [[], ["-"], ["--file", "-"]])
def test_stdin_is_read_once(capsys: pytest.CaptureFixture[str], prompt: list[str]) -> None:
    assert run(strata, ["read", *prompt, "--suffixes", "-"]) == 2
    assert "cannot both come from stdin" in capsys.readouterr().err


def test_a_missing_file_and_one_that_would_be_overwritten(
    capsys: pytest.CaptureFixture[str], suffixes: Path
) -> None:
    assert run(strata, ["read", PREFIX, "--suffixes", "nowhere.jsonl"]) == 2
    assert "cannot read nowhere.jsonl" in capsys.readouterr().err
    same = ["--suffixes", str(suffixes), "--logits-out", str(suffixes)]
    assert run(strata, ["read", PREFIX, *same]) == 2
    assert "is the suffixes' file" in capsys.readouterr().err
