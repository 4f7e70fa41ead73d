"""`strata trace`: what it shows of a prompt or a file, and what it refuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from strata_cli.commands.main import run, strata
from tests.measuring.streamed import streamed_trace

PROMPT = ["--tokens", ",".join(map(str, range(5, 25))), "--device", "host"]


def trace_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert run(strata, ["trace", *args, "--json"]) == 0
    return orjson.loads(capsys.readouterr().out)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    events, _ = streamed_trace()
    path.write_bytes(b"".join(orjson.dumps(event) + b"\n" for event in events))
    return path


def test_a_model_whose_experts_are_all_resident_says_so_and_shows_its_layers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(strata, ["trace", *PROMPT, "--prefill", "16", "--warm-up"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("strata-demo on host: 20 tokens in 2 chunks, ")
    assert lines[1] == "0 experts streamed: all are resident"
    chunks = [line.split() for line in lines[4:6]]
    assert [chunk[1:3] for chunk in chunks] == [["0", "16"], ["16", "4"]]
    assert all(chunk[4:9] == ["-", "-", "0", "0", "0"] for chunk in chunks)
    assert [line.split()[0] for line in lines[8:16]] == [str(layer) for layer in range(8)]
    assert sum("compute |" in line for line in lines) == 2


def test_the_json_object_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    result = trace_json(capsys, *PROMPT)
    documented = (Path(__file__).parents[2] / "docs" / "trace.md").read_text("utf-8")
    chunk = result["chunks"][0]
    layer = chunk["layers"][0]
    for key in {*result, *chunk, *layer, *layer["traffic"]}:
        assert f"`{key}`" in documented, key
    assert result["version"] == 1
    assert result["tokens"] == chunk["tokens"] == 20
    assert result["prompt_ms"] > 0
    assert layer["traffic"]["run_us"] > 0


def test_a_prompt_is_streamed_and_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_PREFILL_STREAM_MIN", "1")
    ids = ",".join(map(str, range(5, 155)))
    result = trace_json(
        capsys, "--tokens", ids, "--device", "host", "--expert-cache", "60", "--prefill", "75"
    )
    for chunk in result["chunks"]:
        traffic = chunk["traffic"]
        assert chunk["ring_slots"] > 8
        assert 0 < traffic["routed"] - traffic["resident"] <= traffic["copied"]
        assert traffic["bytes"] > 0
        assert 0 < chunk["link_share"] <= 1
        copied = [layer["traffic"]["copied"] for layer in chunk["layers"]]
        assert sum(copied) == traffic["copied"]


def test_chunks_of_few_tokens_read_experts_where_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(strata, ["trace", *PROMPT, "--expert-cache", "60"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line == "0 experts streamed: 60 of 128 are resident, others read where they are"


def test_tokens_that_are_reused_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    result = trace_json(capsys, *PROMPT, "--reuse", "15", "--warm-up")
    assert result["tokens"] == 5
    assert [chunk["position"] for chunk in result["chunks"]] == [15]
    assert run(strata, ["trace", *PROMPT, "--reuse", "20"]) == 2
    assert "--reuse 20 leaves nothing of a prompt of 20 tokens" in capsys.readouterr().err


def test_a_trace_file_of_a_streamed_prompt_is_shown(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trace_json(capsys, "--from", str(trace_file))
    total = result["traffic"]
    assert total["copied"] > 0
    assert total["skipped"] > 0
    assert run(strata, ["trace", "--from", str(trace_file)]) == 0
    text = capsys.readouterr().out
    assert f"experts: {total['copied']} copied, {total['skipped']} skipped, " in text
    assert "link: busy for " in text
    assert "waits: the device for copies " in text
    assert run(strata, ["trace", "--from", str(trace_file), "--layers"]) == 0
    assert "chunk 1\nlayer" in capsys.readouterr().out


def test_a_trace_is_read_from_stdin(trace_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = os.dup(0)
    with trace_file.open("rb") as file:
        os.dup2(file.fileno(), 0)
        try:
            assert run(strata, ["trace", "--from", "-"]) == 0
        finally:
            os.dup2(before, 0)
            os.close(before)
    assert capsys.readouterr().out.startswith("m on host: 16 tokens in 2 chunks, ")


def test_perfetto_does_not_overwrite_the_trace(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace_file.read_bytes()
    args = ["--from", str(trace_file), "--perfetto", str(trace_file)]
    assert run(strata, ["trace", *args]) == 2
    assert "is the trace, which this would overwrite" in capsys.readouterr().err
    assert trace_file.read_bytes() == before


def test_perfetto_does_not_overwrite_the_config_file(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("threads = 1\n")
    for prompt in (["--from", str(trace_file)], PROMPT):
        assert run(strata, ["trace", *prompt, "--config", str(path), "--perfetto", str(path)]) == 2
        assert "is the config file, which this would overwrite" in capsys.readouterr().err
    assert path.read_text() == "threads = 1\n"


@pytest.mark.parametrize("names", [("TRACE", "PREFILL_DUMP_R"), ("TRACE",), ("PREFILL_DUMP_R",)])
def test_two_outputs_in_one_file_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    names: tuple[str, ...],
) -> None:
    path = tmp_path / "out"
    for name in names:
        monkeypatch.setenv(f"STRATA_{name}", str(path))
    args = [] if len(names) == 2 else ["--perfetto", str(path)]
    assert run(strata, ["trace", *PROMPT, *args]) == 2
    assert f"are the same file, {path}" in capsys.readouterr().err
    assert not path.exists()


def test_a_trace_that_a_killed_run_left_is_shown(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trace_file.read_bytes()
    trace_file.write_bytes(whole[:-9])
    assert run(strata, ["trace", "--from", str(trace_file)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("m on host: 16 tokens in 2 chunks, ")
    assert f"the last line of {trace_file} was cut off: left out" in output.err


def test_perfetto_gets_a_file(
    trace_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    assert run(strata, ["trace", "--from", str(trace_file), "--perfetto", str(path)]) == 0
    assert {"traceEvents", "displayTimeUnit"} == set(orjson.loads(path.read_bytes()))
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--from", "x", "hello"], "--from and a prompt cannot be used together"),
        (["--from", "x", "--ab", "prefill=1,2"], "--from and --ab cannot be used together"),
        (["hello", "--identity"], "--identity needs --ab"),
        (["hello", "--ab", "progress", "--perfetto", "p"], "--perfetto and --ab"),
        (["--from", "/missing/file"], "cannot read /missing/file"),
        (["hello", "--perfetto", "/missing/p"], "--perfetto: cannot write /missing/p"),
        (["hello", "--ab", ""], "--ab: '' is not a setting"),
        (["hello", "--ab", "prefil=1,2"], "--ab: 'prefil' is not a setting"),
        (["hello", "--ab", "prefill"], "--ab prefill needs two values"),
        (["hello", "--ab", "prefill=x,2", "--device", "host"], "--ab: prefill must be auto or"),
        (
            ["hello", "--ab", "STRATA_PREFILL_ORDER=id,best"],
            "--ab: STRATA_PREFILL_ORDER must be one of id, likely, foreseen, got 'best'",
        ),
        (["hello", "--repeat", "0"], "--repeat must be a whole number from 1"),
        (["hello", "--repeat", "2"], "--repeat has no effect without --ab"),
        (["hello", "--max-tokens", "2"], "--max-tokens has no effect without --ab"),
        (["hello", "--seed", "2"], "--seed has no effect without --ab"),
        (["--from", "x", "--prefill", "9"], "--prefill has no effect on a trace that --from shows"),
        (["--from", "x", "--reuse", "2"], "--reuse has no effect on a trace that --from shows"),
        (["--from", "x", "--warm-up"], "--warm-up has no effect on a trace that --from shows"),
        (["hello", "--ab", "progress", "--layers"], "--layers has no effect with --ab"),
        (["hello", "--ab", "progress", "--warm-up"], "--warm-up has no effect with --ab"),
        (["hello", "--ab", "progress", "--identity", "--repeat=2"], "--repeat has no effect with"),
        (["hello", "--raw", "--chat"], "--raw and --chat cannot be used together"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(
    args: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(strata, ["trace", *args]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "name"), [(["\udcff"], "PROMPT"), (["x", "--system", "\udcff"], "--system")]
)
def test_a_text_that_is_not_utf8_is_refused_as_read_refuses_it(
    capsys: pytest.CaptureFixture[str], args: list[str], name: str
) -> None:
    assert run(strata, ["trace", *args]) == 2
    assert f"{name} is not UTF-8 text: byte 0xff at offset 0" in capsys.readouterr().err
