from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from strata_cli.commands.options import config_options, load_config, written
from strata_cli.config import StrataConfig
from strata_cli.errors import ConfigError
from strata_cli.parsers import file_path, whole_number

RESULTS: list[StrataConfig] = []


@click.command()
@config_options("max_context", "state_hash", "deterministic")
def probe(**flags: Any) -> None:
    RESULTS.append(load_config(flags))


def resolve(*args: str) -> StrataConfig:
    outcome = CliRunner().invoke(probe, args, catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return RESULTS.pop()


def test_options_left_out_give_the_defaults() -> None:
    assert resolve() == StrataConfig()


def test_options_are_spelled_with_dashes_and_switches_have_both_forms() -> None:
    config = resolve("--max-context", "128", "--state-hash", "--no-deterministic")
    assert (config.max_context, config.state_hash, config.deterministic) == (128, True, False)


def test_a_switch_on_the_command_line_beats_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_STATE_HASH", "1")
    assert resolve().state_hash
    assert not resolve("--no-state-hash").state_hash


def test_a_wrong_flag_is_a_config_error_that_names_the_flag() -> None:
    with pytest.raises(ConfigError, match="--max-context must be auto or a whole number"):
        CliRunner().invoke(probe, ["--max-context", "lots"], catch_exceptions=False)


def test_help_shows_form_default_and_variable() -> None:
    text = " ".join(CliRunner().invoke(probe, ["--help"]).output.split())
    assert "--max-context auto|N" in text
    assert "[auto; STRATA_MAX_CONTEXT]" in text
    assert "--deterministic / --no-deterministic" in text
    assert "[STRATA_CONFIG]" in text


def test_unknown_variables_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRATA_MAX_CONTEX", "1")
    resolve()
    assert caplog.messages == [
        "STRATA_MAX_CONTEX is not a setting and is ignored; did you mean STRATA_MAX_CONTEXT?"
    ]


def test_each_is_warned_about_once_and_a_long_name_is_cut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STRATA_" + "X" * 5000, "1")
    monkeypatch.setenv("STRATA_SED", "1")
    resolve("--max-context", "7")
    assert len(caplog.messages) == 2
    assert all(len(message) < 160 for message in caplog.messages)
    assert "did you mean STRATA_SEED?" in caplog.messages[0]


@click.command()
@click.option("--top", callback=written(whole_number(0)))
@click.option("--out", callback=written(file_path))
def own(top: int | None, out: Path | None) -> None:
    click.echo(repr((top, out)))


def test_a_command_s_own_options_are_written_like_settings() -> None:
    outcome = CliRunner().invoke(own, ["--top", "5", "--out", "x.npy"])
    assert outcome.output == f"{(5, Path('x.npy'))!r}\n"
    assert CliRunner().invoke(own, []).output == "(None, None)\n"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--top", "1_0"], "--top must be a whole number from 0 to 2147483647, got '1_0'"),
        (["--top", "-1"], "--top must be a whole number from 0 to 2147483647, got '-1'"),
        (["--out", ""], "--out must be the path of a file, got ''"),
        (["--out", "a\0b"], "--out has a NUL character, which no path can have: 'a\\x00b'"),
        (["--out", "~nosuchuser/x"], "--out starts with ~, but that user has no home folder here"),
    ],
)
def test_and_refused_like_settings(args: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(own, args, catch_exceptions=False)
    assert caught.value.message.startswith(problem)
    assert caught.value.hint


def test_the_log_level_holds_for_the_whole_package() -> None:
    resolve("--log-level", "debug")
    assert logging.getLogger("strata_cli.engine.anything").isEnabledFor(logging.DEBUG)
    resolve()
    assert not logging.getLogger("strata_cli.engine.anything").isEnabledFor(logging.INFO)
