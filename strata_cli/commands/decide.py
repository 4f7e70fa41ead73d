"""`strata decide`: a state and questions with fixed answers in, probabilities out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import orjson

from strata_cli.commands.calibrate import calibrate
from strata_cli.commands.decide_bulk import BulkFlags, BulkRun, bulk_options, decide_in_bulk
from strata_cli.commands.decision_report import (
    Wanted,
    decisions_as_json,
    decisions_as_text,
    exit_code,
)
from strata_cli.commands.level_flags import LevelFlags
from strata_cli.commands.opening import ENGINE_SETTINGS, STDIN_FILE, model_files, open_engine
from strata_cli.commands.options import config_file_of, config_options, load_config, written
from strata_cli.commands.prompt import STDIN, input_text
from strata_cli.commands.prompt_flags import utf8_text
from strata_cli.commands.question_flags import QuestionFlags, expected_option, question_options
from strata_cli.commands.streams import require_stdout
from strata_cli.config import StrataConfig
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.questions import check_distinct
from strata_cli.decisions.rules import Level, Prior
from strata_cli.engine.model.fingerprint import model_hash
from strata_cli.errors import ConfigError, InputError
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.parsers import choice, file_path, number

FILE = written(file_path)


class DecideCommand(click.Command):
    """A command with a subcommand beside its argument: a first word "calibrate" is no state.

    Attributes:
        subcommands: all of them, for the reference.
    """

    subcommands = (calibrate,)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """The context of the command, or of the subcommand that the first word names."""
        if args[:1] != [calibrate.name]:
            return super().make_context(info_name, args, parent, **extra)
        return calibrate.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)


@click.command(cls=DecideCommand, short_help="Answer questions with fixed options about a text.")
@click.argument("state", required=False, callback=utf8_text)
@click.option(
    "-f", "--file", callback=FILE, metavar="FILE", help="Read the state from a file; - is stdin."
)
@question_options
@click.option(
    "--level",
    callback=written(choice("raw", "L0", "L1")),
    default="L0",
    metavar="raw|L0|L1",
    help="raw: one read, options as listed. L0: every rotation, label bias removed. L1: L0 at the "
    "temperature of --calibration.  [L0]",
)
@click.option(
    "--calibration",
    callback=FILE,
    metavar="FILE",
    help="What strata decide calibrate made for this model, question and prior; for L1.",
)
@click.option(
    "--prior",
    callback=written(choice("content_free", "none", "batch")),
    default="content_free",
    metavar="content_free|none|batch",
    help="What L0 takes for the labels' bias; batch depends on other states.  [content_free]",
)
@click.option(
    "--threshold",
    callback=written(number(0, 1)),
    metavar="P",
    help="Exit with 3 where the likeliest option has less.",
)
@click.option(
    "--expect",
    callback=utf8_text,
    metavar="TEXT",
    help="Exit with 4 where another option is the likeliest.",
)
@bulk_options
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@config_options(*ENGINE_SETTINGS, "reuse", "progress")
def decide(
    state: str | None,
    file: Path | None,
    level: Level,
    prior: Prior,
    threshold: float | None,
    expect: str | None,
    calibration: Path | None,
    is_json: bool,
    **flags: Any,
) -> int:
    """Decide about STATE and print the probability of every answer.

    STATE may also come from --file or stdin, whose last line end is not part of it. It is read once
    for all questions and orders of options. The same decision has the same bits every time.

    \b
    strata decide "A chess engine with a terminal interface." \\
        --question "Which section does this package belong to?" --option games --option mail
    strata decide --file report.txt --questions questions.json --json
    strata decide --file mail.txt -q "Is this spam?" --yes-no --threshold 0.9 --expect yes
    strata decide --jsonl mails.jsonl --out spam.jsonl -q "Is this spam?" --yes-no

    With --jsonl there is a row for each line, in order; the same command goes on where it was
    interrupted. See also: strata decide calibrate --help
    """
    asked_by = QuestionFlags.taken_from(flags)
    bulk = BulkFlags.taken_from(flags)
    config = load_config(flags)
    asked_by.check()
    level_flags = LevelFlags(level=level, prior=prior, calibration=calibration)
    level_flags.check()
    files = {"questions' file": asked_by.file, "calibration": calibration}
    if bulk is not None:
        others = {"STATE": state, "--file": file, "--expect": expect}
        _check_bulk(bulk, others, asked_by, prior)
        asked = asked_by.questions()
        check_distinct(asked)
        return decide_in_bulk(
            BulkRun(
                config=config,
                flags=bulk,
                questions=tuple(asked),
                rules=level_flags.rules(config),
                threshold=threshold,
                model_hash=model_hash(config.model or DEMO_MODEL_PATH),
                inputs=_inputs(config, files, config_file_of(flags)),
                is_json=is_json,
            )
        )
    source = _state_source(state, file)
    if source == Path(STDIN) == asked_by.file:
        raise ConfigError(
            "--questions and the state cannot both come from stdin", hint="give one as a file"
        )
    require_stdout()
    asked = asked_by.questions()
    check_distinct(asked)
    wanted = Wanted(threshold, expected_option(expect, asked))
    text = state if isinstance(source, str) else _without_line_end(input_text(source))
    assert text is not None
    if not text.strip():
        raise InputError("the state is empty", hint="give some text to decide about")
    files["state's file"] = source if isinstance(source, Path) else None
    inputs = _inputs(config, files, config_file_of(flags))
    rules = level_flags.rules(config)
    started = time.perf_counter()
    with (
        open_engine(config, will_chat=True, inputs=inputs) as engine,
        Decider(engine, rules) as decider,
    ):
        load_ms = (time.perf_counter() - started) * 1e3
        found = decider.decide(text, asked)
        if is_json:
            report = decisions_as_json(engine, found, wanted, load_ms)
            click.echo(orjson.dumps(report, option=orjson.OPT_INDENT_2))
        else:
            click.echo(decisions_as_text(found, wanted))
    return exit_code(found, wanted)


def _check_bulk(
    bulk: BulkFlags, others: dict[str, Any], asked_by: QuestionFlags, prior: Prior
) -> None:
    for flag, value in others.items():
        if value is not None:
            raise ConfigError(
                f"--jsonl and {flag} cannot be used together",
                hint="look at the rows instead" if flag == "--expect" else "give states once",
            )
    if prior == "batch":
        raise ConfigError(
            "--jsonl and --prior batch cannot be used together: rows would depend on where a run "
            "was resumed",
            hint="use --prior content_free",
        )
    if str(bulk.jsonl) == STDIN == str(asked_by.file):
        raise ConfigError(
            "--questions and --jsonl cannot both come from stdin", hint="give one as a file"
        )


def _state_source(state: str | None, file: Path | None) -> str | Path:
    """The state itself, or the file that has it."""
    if state is not None and file is not None:
        raise ConfigError("STATE and --file cannot be used together", hint="give the state once")
    if file is not None:
        return file
    if state is not None and state != STDIN:
        return state
    if state is None and sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty():
        raise InputError("no state", hint='strata decide "your text", --file FILE, or pipe it in')
    return Path(STDIN)


def _without_line_end(text: str) -> str:
    """A text as it would be given as an argument: `echo` and editors end it with a line end."""
    return text.removesuffix("\n").removesuffix("\r")


def _inputs(
    config: StrataConfig, files: Mapping[str, Path | None], config_file: Path | None
) -> dict[str, str]:
    """Every file that the run reads, by what it is: no output may go there."""
    files = {
        "config file": config_file,
        "expert profile": config.expert_profile,
        **files,
    }
    named = {
        what: STDIN_FILE if str(path) == STDIN else os.fspath(path)
        for what, path in files.items()
        if path is not None
    }
    return model_files(config) | named
