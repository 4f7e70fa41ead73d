"""`strata decide calibrate`: labelled states in; a temperature, and what it is worth, out."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from strata_cli.commands.calibration_plot import reliability_png, require_matplotlib
from strata_cli.commands.calibration_report import fits_as_text
from strata_cli.commands.opening import ENGINE_SETTINGS, model_files, open_engine
from strata_cli.commands.options import config_options, load_config, written
from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import STDIN
from strata_cli.commands.question_flags import QuestionFlags, question_options
from strata_cli.commands.result_file import ResultFile, check_result_file
from strata_cli.commands.state_lines import file_of, open_lines, origin_of
from strata_cli.commands.streams import require_stdout
from strata_cli.decisions.bulk_input import InputLine, count_lines, parse_line, read_lines
from strata_cli.decisions.calibration import Calibration, calibration_as_json
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.fitting import Sample, check_enough, fit, sample
from strata_cli.decisions.labelled import right_answers
from strata_cli.decisions.questions import Question, check_distinct
from strata_cli.decisions.rules import DecisionRules, Prior
from strata_cli.engine.model.fingerprint import model_hash
from strata_cli.errors import ConfigError, InputError, path_text
from strata_cli.models import DEMO_MODEL_PATH
from strata_cli.parsers import choice, file_path

logger = logging.getLogger(__name__)

FILE = written(file_path)
BadLines = Literal["stop", "skip"]


@click.command(short_help="Fit the temperature of level L1 on labelled states.")
@click.option(
    "--jsonl",
    callback=FILE,
    metavar="FILE",
    help='Labelled states: each line {"state": ..., "label": ...}, or "labels" by question id.',
)
@click.option("--out", callback=FILE, metavar="FILE", help="Where the calibration goes, as JSON.")
@click.option(
    "--plot",
    callback=FILE,
    metavar="FILE",
    help="Reliability plot as PNG; needs the plot extra.",
)
@question_options
@click.option(
    "--prior",
    callback=written(choice("content_free", "none")),
    default="content_free",
    metavar="content_free|none",
    help="What L0 takes for the labels' bias; L1 must be asked with the same.  [content_free]",
)
@click.option(
    "--bad-lines",
    callback=written(choice("stop", "skip")),
    default="stop",
    metavar="stop|skip",
    help="stop: a line that cannot be used ends the run. skip: it is left out.  [stop]",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@config_options(*ENGINE_SETTINGS, "reuse", "progress")
def calibrate(
    jsonl: Path | None,
    out: Path | None,
    plot: Path | None,
    prior: Prior,
    bad_lines: BadLines,
    is_json: bool,
    **flags: Any,
) -> int:
    """Fit a temperature for each question on half of the labelled states, tell what it is worth.

    At least 100 states. Accuracy, calibration error, order flips and coverage at 5 % risk are
    measured on the other half. The file serves this model, these questions and this prior alone.

    \b
    strata decide calibrate --jsonl labelled.jsonl --out spam.json -q "Is this spam?" --yes-no
    strata decide --level L1 --calibration spam.json --file mail.txt -q "Is this spam?" --yes-no
    """
    asked_by = QuestionFlags.taken_from(flags)
    config = load_config(flags)
    if jsonl is None or out is None:
        missing = "--jsonl" if jsonl is None else "--out"
        raise ConfigError(
            f"calibrate needs {missing}", hint="strata decide calibrate --jsonl FILE --out FILE"
        )
    asked_by.check()
    if str(jsonl) == STDIN == str(asked_by.file):
        raise ConfigError(
            "--questions and --jsonl cannot both come from stdin", hint="give one as a file"
        )
    require_stdout()
    asked = asked_by.questions()
    check_distinct(asked)
    inputs = {**model_files(config), "states' file": file_of(jsonl)}
    target = check_result_file("--out", os.fspath(out), inputs)
    plot_target = None if plot is None else _plot_target(plot, out, inputs)
    rules = DecisionRules(prior=prior, reuse=config.reuse)
    with (
        open_engine(config, will_chat=True, inputs=inputs) as engine,
        Decider(engine, rules) as decider,
    ):
        decider.check(asked)
        labelled = LabelledFile(jsonl, bad_lines)
        samples = labelled.answered(decider, asked, config.progress)
        model_name = engine.model_name
    fits = [fit(question, of_it) for question, of_it in zip(asked, samples, strict=True)]
    calibration = Calibration(
        origin=path_text(out),
        model_hash=model_hash(config.model or DEMO_MODEL_PATH),
        prior=prior,
        temperatures={one.question.key: one.temperature for one in fits},
    )
    entries = {one.question.key: one.as_dict() for one in fits}
    data = calibration_as_json(calibration, model_name, entries)
    target.save(data)
    if plot_target is not None:
        plot_target.save(reliability_png(fits))
    click.echo(data if is_json else fits_as_text(fits), nl=not is_json)
    return 0


@dataclass(frozen=True, slots=True)
class LabelledFile:
    """Labelled states, and what a line that cannot be used does to the run."""

    path: Path
    bad_lines: BadLines

    def answered(
        self, decider: Decider, asked: Sequence[Question], wants_bar: bool | None
    ) -> list[list[Sample]]:
        """What is kept of the answers, for each question one by one.

        Raises:
            InputError: the file cannot be read, or a line ends the run.
        """
        samples: list[list[Sample]] = [[] for _ in asked]
        with open_lines(self.path) as file, progress_bar("reading", " states", wants_bar) as bar:
            num_lines = count_lines(file) if file.seekable() else 0
            if num_lines:
                check_enough(num_lines)  # before the first is read
            for line in read_lines(file):
                try:
                    found = _samples(decider, asked, line)
                except InputError as error:
                    self._report(line.number, error)
                    continue
                for of_question, one in zip(samples, found, strict=True):
                    of_question.append(one)
                if bar is not None:
                    bar(line.number, num_lines or line.number + 1)
        return samples

    def _report(self, number: int, error: InputError) -> None:
        message = f"{origin_of(self.path)}, line {number}: {error.message}"
        if self.bad_lines == "stop":
            raise InputError(
                message, hint=f"{error.hint}; or --bad-lines skip to go on without it"
            ) from None
        logger.warning("%s", message)


def _samples(decider: Decider, asked: Sequence[Question], line: InputLine) -> list[Sample]:
    entry = parse_line(line.data)
    right = right_answers(asked, entry.fields)
    decisions = decider.decide(entry.state, asked).decisions
    return [sample(*pair) for pair in zip(decisions, right, strict=True)]


def _plot_target(plot: Path, out: Path, inputs: dict[str, str]) -> ResultFile:
    require_matplotlib()
    if os.path.realpath(plot) == os.path.realpath(out):
        raise ConfigError(
            f"--out and --plot are the same file, {path_text(out)}", hint="give each its own"
        )
    return check_result_file("--plot", os.fspath(plot), inputs)
