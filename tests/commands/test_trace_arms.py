"""`strata trace --ab`: arms with fresh engines, timed or compared, on a tiny model on the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from strata_cli.commands import trace_arms
from strata_cli.commands.main import run, strata
from strata_cli.commands.trace_arms import Switch, parse_switch
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.measuring import identity
from strata_cli.engine.measuring.identity import Fingerprint
from strata_cli.engine.measuring.timing import ArmTimes, compare_arms
from strata_cli.engine.reading import ReadResult, read
from tests.model.tiny_model import write_tiny_model

IDS = ",".join(map(str, range(5, 95)))


@pytest.fixture(scope="module")
def prompt(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    model = write_tiny_model(tmp_path_factory.mktemp("models") / "m.gguf")
    return ["trace", "--model", str(model), "--device", "host", "--threads", "1", "--tokens", IDS]


def arms_json(capsys: pytest.CaptureFixture[str], args: list[str], exit_code: int = 0) -> Any:
    assert run(strata, [*args, "--json"]) == exit_code
    return orjson.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("text", "switch"),
    [
        ("state_hash", Switch("state_hash", "0", "1")),
        ("--state-hash", Switch("state_hash", "0", "1")),
        ("STRATA_STATE_HASH=1,0", Switch("state_hash", "1", "0")),
        ("deterministic", Switch("deterministic", "0", "1")),
        ("prefill=64", Switch("prefill", "auto", "64")),
        ("prefill=32,64", Switch("prefill", "32", "64")),
    ],
)
def test_a_switch_is_any_setting_by_any_of_its_names(text: str, switch: Switch) -> None:
    assert parse_switch(text) == switch


def test_eight_fresh_engines_are_timed_in_mirrored_order(
    prompt: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real_open = Engine.open

    def watched(options: EngineOptions, *args: Any, **kwargs: Any) -> Engine:
        opened.append(options.prefill)
        return real_open(options, *args, **kwargs)

    monkeypatch.setattr(Engine, "open", watched)
    result = arms_json(
        capsys, [*prompt, "--ab", "prefill=32,90", "--max-tokens", "2", "--reuse", "9"]
    )
    assert opened == [32, 90, 90, 32, 90, 32, 32, 90]
    assert result["arms"] == ["off", "on", "on", "off", "on", "off", "off", "on"]
    assert result["values"] == {"off": "32", "on": "90"}
    names = [measure["name"] for measure in result["measures"]]
    assert names == ["prompt, ms", "prompt, tokens/s", "generation, tokens/s"]
    for measure in result["measures"]:
        assert len(measure["ratios"]) == 4
        assert measure["low"] <= measure["median"] <= measure["high"]
        assert measure["off"] > 0


def test_the_table_has_a_row_for_each_measure(
    prompt: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = ArmTimes(prompt_ms=1.0, prompt_tokens_per_s=2.0, generate_tokens_per_s=0.0)
    monkeypatch.setattr(trace_arms, "time_reads", lambda *_: times)
    assert run(strata, [*prompt, "--ab", "prefill=32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("STRATA_PREFILL: off is auto, on is 32; ")
    row = "prompt, ms 1.0 1.0 1.000 1.000 1.000 1.000 1.000 [1.000, 1.000] +0.0%"
    assert " ".join(lines[2].split()) == row
    assert lines[3].startswith("prompt, tokens/s ")
    assert len(lines) == 4


def test_what_was_not_measured_in_every_arm_is_left_out() -> None:
    arm = ArmTimes(prompt_ms=1.0, prompt_tokens_per_s=2.0, generate_tokens_per_s=3.0)
    assert len(compare_arms(8 * [arm])) == 3
    assert len(compare_arms([*7 * [arm], replace(arm, generate_tokens_per_s=0.0)])) == 2


def test_chunks_pass_the_identity_check(
    prompt: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    result = arms_json(capsys, [*prompt, "--ab", "prefill=64,13", "--identity", "--max-tokens=3"])
    assert result["is_identical"] is True
    assert [arm["name"] for arm in result["arms"]] == ["base", "unset", "on", "base again"]
    assert [arm["value"] for arm in result["arms"]] == ["64", "auto", "13", "64"]
    prints = [arm["fingerprint"] for arm in result["arms"]]
    assert prints == 4 * prints[:1]
    assert prints[0]["prompt_tokens"] == 90
    assert prints[0]["state_hash"].startswith("STATE_HASH L=92 ")
    assert len(prints[0]["dump_sha256"]) == 64


@pytest.mark.parametrize("name", ["TRACE", "PREFILL_DUMP_R", "EXPERT_PROFILE_SAVE"])
def test_a_file_that_each_arm_would_write_anew_is_refused(
    name: str,
    prompt: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"STRATA_{name}", str(tmp_path / "file"))
    assert run(strata, [*prompt, "--ab", "prefill=8,16"]) == 2
    assert f"STRATA_{name} and --ab cannot be used together" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_dump_has_no_place_in_the_identity_check(
    prompt: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dump = tmp_path / "dump"
    assert run(strata, [*prompt, "--ab", f"prefill_dump_r={dump},{dump}", "--identity"]) == 2
    monkeypatch.setenv("STRATA_PREFILL_DUMP_R", str(dump))
    assert run(strata, [*prompt, "--ab", "prefill=8,16", "--identity"]) == 2
    assert capsys.readouterr().err.count("arms write dumps of their own") == 2


def test_the_cost_of_a_trace_can_be_timed(
    prompt: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = arms_json(capsys, [*prompt, "--ab", f"trace=0,{tmp_path / 'file'}"])
    assert result["measures"]
    assert (tmp_path / "file").stat().st_size


def test_a_switch_that_changes_the_reply_fails_the_identity_check(
    prompt: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*prompt, "--ab", "temperature=0,9", "--identity", "--max-tokens=8"]
    assert run(strata, args) == 1
    text = capsys.readouterr().out
    assert "\non differs in reply_sha256, state_hash.gdn, " in text
    assert "state_hash.L" not in text  # equally many tokens
    assert text.endswith("\nnot identical\n")
    result = arms_json(capsys, args, exit_code=1)
    assert result["is_identical"] is False
    assert [bool(arm["differs"]) for arm in result["arms"]] == [False, False, True, False]


@pytest.mark.parametrize(
    ("arm", "verdict"), [(2, "not identical"), (3, "no verdict: runs with equal settings differ")]
)
def test_one_planted_bit_is_reported(
    arm: int,
    verdict: str,
    prompt: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[ReadResult] = []

    def read_planted(*args: Any) -> ReadResult:
        result = read(*args)
        if len(reads) == arm:
            result.logits.view("u4")[7] ^= 1
        reads.append(result)
        return result

    monkeypatch.setattr(trace_arms, "read", read_planted)
    assert run(strata, [*prompt, "--ab", "prefill=64", "--identity", "--max-tokens=1"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{identity.ARMS[arm]} differs in logits_sha256",
        verdict,
    ]


def test_another_residual_is_reported(
    prompt: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps: list[Path] = []
    real = Fingerprint.of

    def of_planted(result: ReadResult, prompt_tokens: int, dump: Path) -> Fingerprint:
        dumps.append(dump)
        if len(dumps) == 3:
            data = bytearray(dump.read_bytes())
            data[-1] ^= 1
            dump.write_bytes(data)
        return real(result, prompt_tokens, dump)

    monkeypatch.setattr(Fingerprint, "of", of_planted)
    assert run(strata, [*prompt, "--ab", "prefill=64", "--identity", "--max-tokens=1"]) == 1
    assert "on differs in dump_sha256\n" in capsys.readouterr().out
    assert not dumps[0].exists()


@pytest.mark.parametrize("switch", ["prefill_routed_stream", "prefill_order=id,foreseen"])
def test_streamed_prompts_pass_the_identity_check(
    switch: str,
    prompt: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRATA_PREFILL_STREAM_MIN", "1")
    args = [*prompt, "--prefill=70", "--expert-cache=20", "--max-tokens=2", "--reuse=10"]
    result = arms_json(capsys, [*args, "--ab", switch, "--identity"])
    assert result["is_identical"] is True
    assert all(arm["copied"] > 0 for arm in result["arms"])
    assert all(arm["routed"] >= arm["hits"] > 0 for arm in result["arms"])
    assert result["arms"][0]["fingerprint"]["prompt_tokens"] == 90
