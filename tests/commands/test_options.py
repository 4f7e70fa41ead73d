from __future__ import annotations

import logging
from typing import Any

import click
import pytest
from click.testing import CliRunner

from strata_cli.commands.options import config_options, load_config
from strata_cli.config import StrataConfig
from strata_cli.errors import ConfigError

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


def test_the_log_level_holds_for_the_whole_package() -> None:
    resolve("--log-level", "debug")
    assert logging.getLogger("strata_cli.engine.anything").isEnabledFor(logging.DEBUG)
    resolve()
    assert not logging.getLogger("strata_cli.engine.anything").isEnabledFor(logging.INFO)
