"""`strata read`: what it prints, what it refuses, and that nothing changes its numbers."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import orjson
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.engine import reading
from strata_cli.engine.decode import sampling
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.errors import StrataError
from tests.model.tiny_model import write_tiny_model

PROMPT = "The quick brown fox"
LETTERS = ["--allowed", "A", "--allowed", "B", "--allowed", "C", "--allowed", "D"]
SYSTEM = (
    "You are a decision function. You will be given a state and one question. Reply with the "
    "answer label only: no words, no punctuation, no explanation."
)
QUESTION = """State:
A fast multiplayer shooter in which teams fight over flags on many maps.

Question: Which section does this package belong to?
Options:
A. mail
B. games
C. python
D. fonts
Answer with the letter only."""


def read_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert run(strata, ["read", *args, "--json"]) == 0
    return orjson.loads(capsys.readouterr().out)


def test_the_embedded_model_answers_a_decision(capsys: pytest.CaptureFixture[str]) -> None:
    result = read_json(capsys, QUESTION, "--system", SYSTEM, *LETTERS)
    best = max(result["allowed"], key=lambda entry: entry["logprob"])
    assert best["token"] == "B"
    assert [entry["token"] for entry in result["allowed"]] == ["A", "B", "C", "D"]
    assert result["canonical"] is True


def test_gpu_memory_settings_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[EngineOptions] = []

    def stop(options: EngineOptions, *_: object, **__: object) -> None:
        opened.append(options)
        raise StrataError("far enough")

    monkeypatch.setattr(Engine, "open", stop)
    monkeypatch.setenv("STRATA_VRAM_RESERVE_MIB", "100")
    assert run(strata, ["read", "x", "--device", "cuda:3", "--vram-bytes", "12GiB"]) == 1
    assert opened[0].device == "cuda:3"
    assert opened[0].vram_bytes == 12 << 30
    assert opened[0].vram_reserve_bytes == 100 << 20


def test_the_json_object_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    result = read_json(capsys, PROMPT, "--top", "3", "--max-tokens", "2", "--state-hash")
    assert set(result) == {
        "version",
        "model",
        "device",
        "prompt_tokens",
        "reused_tokens",
        "read_tokens",
        "top_logprobs",
        "allowed",
        "text",
        "generated_ids",
        "finish_reason",
        "canonical",
        "state_hash",
        "residency",
        "timings",
    }
    assert set(result["top_logprobs"][0]) == {"id", "token", "bytes", "logprob"}
    assert result["prompt_tokens"] == result["read_tokens"] + result["reused_tokens"]
    assert len(result["generated_ids"]) <= 2
    assert result["canonical"] is False
    assert result["residency"] is None


def test_the_json_object_says_where_the_experts_of_an_answer_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = read_json(capsys, PROMPT, "--max-tokens", "4", "--expert-cache", "100")
    counts = result["residency"]
    assert counts["windows"] == len(result["generated_ids"]) - 1
    assert counts["hits"] + counts["pcie"] == counts["routed"]
    assert counts["cpu"] == counts["dropped"] == 0
    assert counts["hit_rate"] + counts["pcie_share"] == pytest.approx(1)


def test_a_model_without_a_name_has_its_files_as_far_as_that_is_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "m\udcff.gguf"  # the byte 0xff
    content = write_tiny_model(tmp_path / "named.gguf").read_bytes()
    path.write_bytes(content.replace(b"general.name", b"general.nane"))
    result = read_json(capsys, "--tokens", "1", "--model", str(path))
    assert result["model"] == "m\ufffd"


def test_chunks_do_not_move_a_digit(capsys: pytest.CaptureFixture[str]) -> None:
    args = [QUESTION * 12, "--raw", "--top", "20", "--state-hash"]
    runs = [read_json(capsys, *args, "--prefill", n) for n in ("auto", "64", "192", "1024")]
    assert len(runs[0]["top_logprobs"]) == 20
    assert runs[0]["prompt_tokens"] > 400
    for other in runs[1:]:
        assert other["top_logprobs"] == runs[0]["top_logprobs"]
        assert other["state_hash"] == runs[0]["state_hash"]


def test_two_processes_agree_to_the_last_digit() -> None:
    command = [sys.executable, "-m", "strata_cli", "read", PROMPT, "--raw", "--top", "9", "--json"]
    first, second = (
        orjson.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(2)
    )
    assert first["top_logprobs"] == second["top_logprobs"]


def test_logprobs_cover_the_whole_vocabulary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "last.npy"
    result = read_json(
        capsys, PROMPT, "--raw", "--allowed-token-ids", "0,8191", "--logits-out", str(saved)
    )
    logits = np.load(saved)
    assert logits.dtype == np.float32
    shifted = logits.astype(np.float64) - logits.max()
    expected = shifted - np.log(np.exp(shifted).sum())
    for entry in result["allowed"]:
        assert entry["logprob"] == pytest.approx(expected[entry["id"]], abs=1e-5)


def test_all_logits_end_with_the_last(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    last, every = tmp_path / "last.npy", tmp_path / "all.npy"
    result = read_json(
        capsys, "--tokens", "5,6,7,8", "--logits-out", str(last), "--all-logits-out", str(every)
    )
    rows = np.load(every)
    assert rows.shape == (result["prompt_tokens"], 8192)
    assert np.array_equal(rows[-1], np.load(last))


def test_generation_is_greedy_and_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["In the beginning", "--raw", "--max-tokens", "12"]
    first, second = read_json(capsys, *args), read_json(capsys, *args)
    assert first["text"] == second["text"]
    assert first["finish_reason"] == "length"
    assert len(first["generated_ids"]) == 12
    assert run(strata, ["read", *args]) == 0
    assert capsys.readouterr().out == first["text"] + "\n"


def test_each_token_of_text_is_flushed_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Reader(io.BytesIO):
        def write(self, data: Any) -> int:
            told.append(bytes(data).decode())
            return super().write(data)

    known: list[int] = []  # texts told when a token was chosen

    def choose(*args: Any, **kwargs: Any) -> int:
        known.append(len(told))
        return sampling.choose(*args, **kwargs)

    monkeypatch.setattr(reading, "choose", choose)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BufferedWriter(Reader()), "utf-8"))
    assert run(strata, ["read", "In the beginning", "--raw", "--max-tokens", "6"]) == 0
    assert known == [0, 1, 2, 3, 4, 5]


def test_a_seed_fixes_sampled_text(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["In the beginning", "--raw", "--max-tokens", "12", "--temperature", "1.5"]
    texts = [read_json(capsys, *args, "--seed", seed)["text"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("flags", "is_canonical"),
    [
        (["--top", "1"], True),
        (["--top", "1", "--max-tokens", "1"], True),
        (["--top", "1", "--max-tokens", "2"], False),
        (["--max-tokens", "2", "--deterministic"], True),
        (["--top", "1", "--no-deterministic"], False),
    ],
)
def test_one_token_logprobs_are_canonical_unless_told(
    capsys: pytest.CaptureFixture[str], flags: list[str], is_canonical: bool
) -> None:
    assert read_json(capsys, "--tokens", "5,6", *flags)["canonical"] is is_canonical


def test_a_canonical_answer_knows_nothing_of_what_plain_steps_leave_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["--tokens", "300,301,302", "--max-tokens", "6", "--state-hash"]
    args += ["--device", "host", "--expert-cache", "20"]
    whole = read_json(capsys, *args)
    monkeypatch.setenv("STRATA_ROUTE_TAIL_SKIP", "1")
    canonical = read_json(capsys, *args, "--deterministic")
    plain = read_json(capsys, *args)
    assert canonical["generated_ids"] == whole["generated_ids"]
    assert canonical["state_hash"] == whole["state_hash"] != plain["state_hash"]


def test_stdin_and_file_read_the_same_prompt(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT)
    from_file = read_json(capsys, "--file", str(path))
    for args in ([], ["-"], ["--file", "-"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
        assert read_json(capsys, *args)["top_logprobs"] == from_file["top_logprobs"]


def test_the_table_goes_to_stdout_and_nothing_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["read", PROMPT, "--state-hash"]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == 1 + 5 + 1
    assert captured.out.splitlines()[-1].startswith("STATE_HASH L=")
    assert captured.err == ""


REFUSED: list[tuple[list[str], list[str]]] = [
    (["x", "--model", "{tmp}/none.gguf"], ["no such file", "none.gguf"]),
    (["x", "--model", "{tmp}"], ["directory"]),
    (["x", "--model", "{tmp}/text.gguf"], ["not", "GGUF"]),
    (["x", "--model", "{tmp}/cut.gguf"], ["truncated"]),
    (["x", "--model", "{tmp}/other.gguf"], ["llamaxxx"]),
    (["x", "--model", "{tmp}/type.gguf"], ["type", "99"]),
    ([""], ["empty"]),
    (["--tokens", "5,6,7", "--max-context", "2"], ["3", "2", "raise --max-context, to 2048"]),
    (["--tokens", "5" + ",6" * 2048], ["2049", "2048", "try: shorten the prompt\n"]),
    (["x", "--max-tokens", "2048"], ["2048", "shorten the prompt or lower --max-tokens\n"]),
    (["\udcff"], ["PROMPT is not UTF-8 text: byte 0xff at offset 0"]),
    (["x", "--allowed", "A", "--allowed", "\udcff"], ["--allowed is not UTF-8 text"]),
    (["--tokens", "5,6", "--max-tokens", "3000"], ["3000", "2048"]),
    (["--tokens", "5,8192"], ["8192"]),
    (["--tokens", "5,-1"], ["-1"]),
    (["--tokens", "5,x"], ["--tokens", "5,x"]),
    (["--tokens", ""], ["--tokens"]),
    (["--tokens-file", "{tmp}/none.json"], ["none.json"]),
    (["--tokens-file", "{tmp}/bad.json"], ["bad.json", "JSON"]),
    (["--tokens-file", "{tmp}/words.json"], ["words.json", "whole numbers"]),
    (["x", "--allowed", "several words here"], ["several", "tokens"]),
    (["x", "--allowed-token-ids", "8192"], ["8192"]),
    (["x", "--allowed-token-ids", "a"], ["--allowed-token-ids"]),
    (["x", "--raw", "--chat"], ["--raw", "--chat"]),
    (["x", "--raw", "--system", "s"], ["--raw", "--system"]),
    (["x", "--file", "{tmp}/text.gguf"], ["PROMPT", "--file"]),
    (["--tokens", "1", "--chat"], ["--tokens", "--chat"]),
    (["--file", "{tmp}/latin.txt"], ["latin.txt", "UTF-8", "0xe9"]),
    (["--file", "{tmp}"], ["directory"]),
    (["x", "--logits-out", "{tmp}/none/x.npy"], ["none/x.npy"]),
    (["x", "--top", "-1"], ["--top"]),
    (["x", "--top", "1_0"], ["--top must be a whole number from 0 to", "'1_0'"]),
    (["x", "--max-tokens", "٣"], ["--max-tokens must be a whole number from 0 to", "'٣'"]),
    (["x", "--max-tokens", "9" * 5000], ["--max-tokens", "(5000 characters)"]),
    (["x", "--allowed-token-ids", "1_0"], ["--allowed-token-ids", "'1_0'"]),
    (["x", "--allowed-token-ids", "9" * 5000], ["--allowed-token-ids", "(5000 characters)"]),
    (["x", "--allowed", "two words"], ["--allowed-token-ids"]),
    (["--file", "a\0b"], ["--file has a NUL character"]),
    (["--tokens-file", "~nosuchuser/x"], ["--tokens-file starts with ~"]),
    (["x", "--model", "~nosuchuser/x"], ["--model starts with ~"]),
    (["x", "--model", "x" * 256], ["(256 characters)", "File name too long"]),
    (["x", "--temperature", "nan"], ["--temperature", "nan"]),
    (["x", "--top-k", "5", "--max-tokens", "2"], ["--top-k would have no effect", "is 0"]),
    (["x", "--temperature", "1", "--seed", "5"], ["--temperature and --seed", "no token"]),
    (["x", "--prefill", "-1"], ["--prefill"]),
    (["x", "--max-context", "999999"], ["999999", "2048"]),
    (["x", "--device", "gpu"], ["--device", "gpu"]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read")
    (folder / "text.gguf").write_text("not a model at all, only some text")
    whole = write_tiny_model(folder / "tiny.gguf").read_bytes()
    (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    (folder / "other.gguf").write_bytes(whole.replace(b"qwen4exp", b"llamaxxx"))
    plain = whole.replace(b"tokenizer.chat_template", b"tokenizer.chat_nothings")
    (folder / "raw.gguf").write_bytes(plain)
    name = b"output_hc_norm.weight"
    at = whole.index(name) + len(name)
    num_dims = int.from_bytes(whole[at : at + 4], "little")
    at += 4 + 8 * num_dims
    (folder / "type.gguf").write_bytes(whole[:at] + (99).to_bytes(4, "little") + whole[at + 4 :])
    (folder / "bad.json").write_text("[1, 2")
    (folder / "words.json").write_text('["a"]')
    (folder / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    return folder


@pytest.mark.parametrize(("args", "named"), REFUSED, ids=lambda value: " ".join(value)[:50])
def test_bad_input_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], folder: Path, args: list[str], named: list[str]
) -> None:
    filled = [arg.replace("{tmp}", str(folder)) for arg in args]
    assert run(strata, ["read", *filled]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("strata: error: ")
    assert "Traceback" not in captured.err
    for word in named:
        assert word.lower() in captured.err.lower()


def test_invalid_utf8_on_stdin_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff")))
    assert run(strata, ["read"]) == 2
    assert "0xff at offset 2" in capsys.readouterr().err


def test_a_closed_stdin_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert run(strata, ["read"]) == 2
    assert "stdin is closed" in capsys.readouterr().err


def test_a_chat_needs_a_template(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(strata, ["read", "x", "--chat", "--model", str(folder / "raw.gguf")]) == 2
    assert "chat template" in capsys.readouterr().err


def test_a_missing_gpu_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["read", "x", "--device", "cuda:99"]) == 2
    error = capsys.readouterr().err
    assert "--device host" in error
    assert "Traceback" not in error


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["read", "--help"]) == 0
    help_text = capsys.readouterr().out
    command = strata.get_command(click.Context(strata), "read")
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.opts[-1] in help_text
