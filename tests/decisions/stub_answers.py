"""Answers that follow from a state's text by a hash: for tests of what happens around them.

    python -m tests.decisions.stub_answers LINES ROWS

answers a file of states, and writes a byte to stdout after each row.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from strata_cli.decisions.answers import Decision, DecisionSet
from strata_cli.decisions.bulk import BulkCounts, BulkJob, answer_lines, run_bulk
from strata_cli.decisions.bulk_input import read_lines
from strata_cli.decisions.bulk_output import BulkOutput
from strata_cli.decisions.questions import Question, choice
from strata_cli.decisions.reads import TokenCounts
from strata_cli.decisions.rules import DEFAULT_RULES
from strata_cli.errors import InputError

QUESTION = choice("Which?", ["a", "b"], "which")
JOB = BulkJob(questions=(QUESTION,), rules=DEFAULT_RULES, threshold=0.9, engine="stub")


class StubAnswerer:
    """Decides by the first byte of a hash; refuses a state that says so."""

    lanes = 3

    def decide(self, state: str, questions: tuple[Question, ...]) -> DecisionSet:
        if state == "refuse":
            raise InputError("no answer to this", hint="ask another")
        share = (hashlib.sha256(state.encode()).digest()[0] + 1) / 258
        (question,) = questions
        found = Decision(
            question=question,
            level="L0",
            answer="a" if share >= 0.5 else "b",
            top="a" if share >= 0.5 else "b",
            probabilities={"a": share, "b": 1 - share},
            diagnostics={"answer_mass": 1.0, "filler": state * 20},
        )
        counts = TokenCounts(0, 0)
        return DecisionSet(rules=DEFAULT_RULES, decisions=(found,), tokens=counts, seconds=0.0)

    def decide_many(self, states: list[str], questions: tuple[Question, ...]) -> list[DecisionSet]:
        return [self.decide(state, questions) for state in states]


def answer_file(lines: Path, rows: Path, **how: object) -> BulkCounts:
    """Run the stub over a file, as the command does the engine."""
    answerer = StubAnswerer()
    with BulkOutput(rows, JOB.key) as output, lines.open("rb") as file:
        return run_bulk(
            output,
            read_lines(file),
            lambda some: answer_lines(answerer, JOB, some),
            **{"skip": None, **how},  # type: ignore[arg-type] # checked by those who call
        )


if __name__ == "__main__":
    answer_file(
        Path(sys.argv[1]), Path(sys.argv[2]), progress=lambda *_: os.write(1, b".") and None
    )
