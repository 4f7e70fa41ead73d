"""Which question the flags of `strata decide` ask, or which file has the questions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click

from strata_cli.commands.options import in_order, written
from strata_cli.commands.prompt import input_bytes
from strata_cli.commands.prompt_flags import utf8_text
from strata_cli.decisions import questions
from strata_cli.decisions.question_file import parse_questions
from strata_cli.decisions.questions import Question
from strata_cli.errors import ConfigError, quoted
from strata_cli.parsers import file_path, to_int

DEFAULT_BINS = 5

_FILE = written(file_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFlags:
    """As they were given.

    Attributes:
        question: text of the one question.
        options: its options.
        yes_no: it is answered by yes or no.
        levels: its named levels, lowest first.
        scale: ends of its scale, as written.
        bins: of the scale, as written.
        by_text: options are scored by their own text.
        file: has several questions instead.
    """

    question: str | None
    options: tuple[str, ...]
    yes_no: bool
    levels: tuple[str, ...]
    scale: tuple[str, str] | None
    bins: str | None
    by_text: bool
    file: Path | None

    @classmethod
    def taken_from(cls, flags: dict[str, Any]) -> Self:
        """Take the keyword arguments that question_options added to a command out of all."""
        return cls(file=flags.pop("questions"), **{name: flags.pop(name) for name in _NAMES})

    def check(self) -> None:
        """Refuse flags that contradict each other, or say too little.

        Raises:
            ConfigError: naming the flags.
        """
        if self.file is not None:
            own = {
                "--question": self.question is not None,
                "--bins": self.bins is not None,
                "--by-text": self.by_text,
            }
            for flag in [*(flag for flag, given in own.items() if given), *self._answers()]:
                raise ConfigError(
                    f"--questions and {flag} cannot be used together",
                    hint="the file says what is asked and what can be answered",
                )
            return
        if self.question is None:
            raise ConfigError("no question", hint="give --question, or --questions FILE")
        given = self._answers()
        if len(given) > 1:
            raise ConfigError(
                f"{given[0]} and {given[1]} cannot be used together", hint="choose one"
            )
        if not given:
            raise ConfigError(
                "nothing says what can be answered",
                hint="give --option for each answer, --yes-no, --score or --scale",
            )
        if self.bins is not None and self.scale is None:
            raise ConfigError("--bins needs --scale", hint="for example --scale 0 10 --bins 5")
        if self.by_text and not self.options:
            raise ConfigError("--by-text needs --option", hint="other answers have labels")

    def questions(self) -> list[Question]:
        """What is asked; a file is read.

        Raises:
            StrataError: a question cannot be asked; names what is wrong.
        """
        if self.file is not None:
            return parse_questions(*input_bytes(self.file))
        assert self.question is not None
        if self.yes_no:
            return [questions.yes_no(self.question)]
        if self.levels:
            return [questions.levels(self.question, self.levels)]
        if self.scale is not None:
            low, high = (_number(end) for end in self.scale)
            return [questions.scale(self.question, low, high, _bins(self.bins))]
        return [questions.choice(self.question, self.options, by_text=self.by_text)]

    def _answers(self) -> list[str]:
        flags = {
            "--option": self.options,
            "--yes-no": self.yes_no,
            "--score": self.levels,
            "--scale": self.scale is not None,
        }
        return [flag for flag, is_given in flags.items() if is_given]


_NAMES = ("question", "options", "yes_no", "levels", "scale", "bins", "by_text")
# The flags of QuestionFlags.
question_options = in_order(
    click.option(
        "-q", "--question", callback=utf8_text, metavar="TEXT", help="What is to be decided."
    ),
    click.option(
        "-o",
        "--option",
        "options",
        multiple=True,
        callback=utf8_text,
        metavar="TEXT",
        help="An answer.",
    ),
    click.option("--yes-no", is_flag=True, help="The answers are yes and no."),
    click.option(
        "--score",
        "levels",
        multiple=True,
        callback=utf8_text,
        metavar="TEXT",
        help="A level, lowest first; the answer is the expected one, from 0.",
    ),
    click.option(
        "--scale",
        nargs=2,
        type=str,
        metavar="LO HI",
        help="The answer is a number from LO to HI, the expected one over equal bins.",
    ),
    click.option("--bins", metavar="N", help="Bins of the scale, 2 to 10.  [5]"),
    click.option(
        "--by-text",
        is_flag=True,
        help="Score each option by its own text, token by token; more than 26 always are.",
    ),
    click.option(
        "--questions",
        callback=_FILE,
        metavar="FILE",
        help="JSON (or .yaml) file with several questions by id; - is stdin.",
    ),
)


def expected_option(text: str | None, asked: list[Question]) -> str | None:
    """The option that --expect names; for yes or no in any case.

    Raises:
        ConfigError: there are several questions, or none of the options is this one.
    """
    if text is None:
        return None
    if len(asked) != 1:
        raise ConfigError(
            f"--expect needs one question, and there are {len(asked)}",
            hint="ask one, or look at --json",
        )
    (question,) = asked
    for option in question.options:
        if option == text or (question.kind == "noul" and option.lower() == text.lower()):
            return option
    raise ConfigError(
        f"--expect must be one of the options, got {quoted(text)}",
        hint=", ".join(map(quoted, question.options)),
    )


def _number(text: str) -> float:
    """A decimal number, which may be negative; Python's other spellings are no numbers here."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not text.isascii() or "_" in text or text.strip() != text or math.isnan(value):
        raise ConfigError(
            f"--scale must be two numbers, got {quoted(text)}", hint="for example --scale 0 10"
        )
    return value


def _bins(text: str | None) -> int:
    try:
        return DEFAULT_BINS if text is None else to_int(text)
    except ValueError:
        raise ConfigError(
            f"--bins must be a whole number, got {quoted(text or '')}", hint="for example --bins 5"
        ) from None
