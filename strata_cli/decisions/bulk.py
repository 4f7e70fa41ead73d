"""Many states, the same questions: a line in, a row out, in order.

A row follows from its line, the questions, the rules, the model and the build alone: it is the same
bytes whoever answers it, after whatever other lines. So a run goes on where another one ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol

import orjson

from strata_cli.decisions.answers import DecisionSet
from strata_cli.decisions.bulk_input import Entry, InputLine, parse_line
from strata_cli.decisions.bulk_output import BulkOutput, row_beginning
from strata_cli.decisions.questions import Question
from strata_cli.decisions.rules import DecisionRules
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
    """Answers questions about states; see Decider.

    Attributes:
        lanes: states that are best given at once.
    """

    lanes: int

    def decide(self, state: str, questions: tuple[Question, ...]) -> DecisionSet:
        """Answer questions about a state."""
        ...

    def decide_many(self, states: list[str], questions: tuple[Question, ...]) -> list[DecisionSet]:
        """Answer questions about several states, each as decide() does."""
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


def answer_lines(answerer: Answerer, job: BulkJob, lines: Iterable[InputLine]) -> Iterator[Row]:
    """The row of each line; what is wrong with a line is in its row."""
    rest = iter(lines)
    while some := list(islice(rest, answerer.lanes)):
        yield from _answer(answerer, job, some)


def _answer(answerer: Answerer, job: BulkJob, lines: list[InputLine]) -> Iterator[Row]:
    read = [_read(line) for line in lines]
    states = [one.state for one in read if isinstance(one, Entry)]
    try:
        found = iter(answerer.decide_many(states, job.questions) if states else [])
    except InputError:  # one of them: by themselves, to tell which
        found = None
    for line, entry in zip(lines, read, strict=True):
        if isinstance(entry, InputError):
            yield _row(job, line, {"error": entry.message}, entry)
            continue
        start = {} if entry.id is None else {"id": entry.id}
        try:
            answer = answerer.decide(entry.state, job.questions) if found is None else next(found)
        except InputError as error:
            yield _row(job, line, {**start, "error": error.message}, error)
        else:
            yield _row(job, line, {**start, **_fields(job, answer)}, None)


def _read(line: InputLine) -> Entry | InputError:
    try:
        return parse_line(line.data)
    except InputError as error:
        return error


def _fields(job: BulkJob, found: DecisionSet) -> dict[str, Any]:
    fields = found.as_dict()
    if job.threshold is not None:
        fields["abstained"] = found.abstained(job.threshold)
    return {**fields, "warnings": found.warnings}


def _row(job: BulkJob, line: InputLine, fields: dict[str, Any], problem: InputError | None) -> Row:
    data = row_beginning(line, job.key) + orjson.dumps(fields)[1:] + b"\n"
    return Row(line.number, data, problem)


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
