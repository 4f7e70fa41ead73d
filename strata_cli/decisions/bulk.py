"""Many states, the same questions: a line in, a row out, in order.

A row follows from its line, the questions, the rules, the model and the build alone: it is the same
bytes whoever answers it, after whatever other lines. So a run goes on where another one ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import orjson

from strata_cli.decisions.bulk_input import InputLine, parse_line
from strata_cli.decisions.bulk_output import BulkOutput, row_beginning
from strata_cli.decisions.decider import DecisionRules, DecisionSet
from strata_cli.decisions.questions import Question
from strata_cli.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkJob:
    """What is asked of every line.

    Attributes:
        questions: at least one, of distinct ids.
        rules: how they are answered; nothing that depends on traffic.
        threshold: answers whose likeliest option has less abstain; None: there is none.
        engine: everything about model, device and build that moves a bit.
    """

    questions: tuple[Question, ...]
    rules: DecisionRules
    threshold: float | None
    engine: str

    @property
    def key(self) -> str:
        """What tells this job from others: engine, questions and rules, 12 hex digits each."""
        asked = [[one.id, one.key, list(one.options)] for one in self.questions]
        rules = self.rules
        how = [rules.level, rules.prior, rules.temperatures, self.threshold]
        return "-".join(map(_digest, (self.engine, asked, how)))


class Answerer(Protocol):
    """Answers questions about one state at a time; see Decider."""

    def decide(self, state: str, questions: tuple[Question, ...]) -> DecisionSet:
        """Answer questions about a state."""
        ...


class Row(NamedTuple):
    """A line's answer.

    Attributes:
        number: the line's.
        data: JSON and a line end.
        problem: why there is no answer; None: there is one.
    """

    number: int
    data: bytes
    problem: InputError | None


class BulkCounts(NamedTuple):
    """Rows that were there when a run began, that it added, and how many of those are problems."""

    resumed: int
    added: int
    problems: int


def answer_line(answerer: Answerer, job: BulkJob, line: InputLine) -> Row:
    """The row of a line; what is wrong with the line is in it."""
    beginning, problem = row_beginning(line, job.key), None
    row: dict[str, Any] = {}
    try:
        entry = parse_line(line.data)
        if entry.id is not None:
            row["id"] = entry.id
        found = answerer.decide(entry.state, job.questions)
    except InputError as error:
        row["error"], problem = error.message, error
    else:
        row |= found.as_dict()
        if job.threshold is not None:
            row["abstained"] = found.abstained(job.threshold)
        row["warnings"] = found.warnings
    return Row(line.number, beginning + orjson.dumps(row)[1:] + b"\n", problem)


def run_bulk(
    output: BulkOutput,
    lines: Iterator[InputLine],
    answer: Callable[[Iterator[InputLine]], Iterable[Row]],
    *,
    skip: Callable[[int, InputError], None] | None,
    progress: Callable[[int, int], None] | None = None,
) -> BulkCounts:
    """Answer the lines that the output does not answer yet.

    However this ends, every row that was written stays, whole or mended by the next run.

    Args:
        output: opened for this job.
        lines: all of them, from the first.
        answer: gives a row for each line, in order.
        skip: called with the number of a line that cannot be answered, and why, after its row
            with the reason was written; None: the first such line ends the run.
        progress: called with (rows that were there, rows added) after each row.

    Raises:
        InputError: a line cannot be answered, or the output belongs to something else.
    """
    resumed, rest = output.resume(lines)
    added, problems = 0, 0
    for row in answer(rest):
        if row.problem is not None:
            if skip is None:
                raise InputError(f"line {row.number}: {row.problem.message}", hint=row.problem.hint)
            skip(row.number, row.problem)
            problems += 1
        output.append(row.data)
        added += 1
        if progress is not None:
            progress(resumed, added)
    return BulkCounts(resumed, added, problems)


def _digest(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value)).hexdigest()[:12]
