"""Reads states at every level, and with their options listed otherwise."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.decisions import questions
from strata_cli.decisions.answers import Decision
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.fitting import sample
from strata_cli.decisions.questions import Question
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.engine import Engine
from tools.decision_quality.asking import Labelled, side_by_side

LANES = 8
RELISTED_EVERY = 8


class Reader:
    """Decides about states with one engine. Owned by the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._l0 = Decider(engine, lanes=LANES)
        self._plain = Decider(engine, DecisionRules(prior="none"), lanes=LANES)
        self._raw = Decider(engine, DecisionRules(level="raw"), lanes=LANES)
        self._priors: dict[str, NDArray[np.float64]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        for decider in (self._l0, self._plain, self._raw):
            decider.close()

    def read(self, group: Sequence[Labelled], *, is_relisted: bool) -> list[dict[str, Any]]:
        """What was found about states with one question.

        Args:
            group: at least one.
            is_relisted: decide again with the options in other orders.

        Returns:
            For each state probabilities of the options, in the question's order: "raw", "l0" and
            "plain", L0 without a prior; "right" and "flips" as in Sample; and, where they are
            relisted, "relisted": for each other order whether raw has another likeliest option,
            and whether L0 has another bit anywhere.
        """
        question, states = group[0].question, [one.state for one in group]
        decisions = _decide(self._l0, states, question)
        if question.key not in self._priors:  # one for all states of a question, so one tells it
            (other,) = _decide(self._plain, states[:1], question)
            self._priors[question.key] = _values(other) / _values(decisions[0])
        found: list[dict[str, Any]] = []
        for one, decision in zip(group, decisions, strict=True):
            kept = sample(decision, one.right)
            plain = kept.l0 * self._priors[question.key]
            found.append(
                {
                    "question": question.key,
                    "raw": kept.raw.tolist(),
                    "l0": kept.l0.tolist(),
                    "plain": np.round(plain / plain.sum(), 12).tolist(),
                    "right": kept.right,
                    "flips": kept.flips,
                }
            )
        if is_relisted and question.kind == "choice":
            for line in found:
                line["relisted"] = []
            for again in relistings(question):
                self._compare(again, states, decisions, found)
        return found

    def _compare(
        self,
        again: Question,
        states: Sequence[str],
        decisions: Sequence[Decision],
        found: Sequence[dict[str, Any]],
    ) -> None:
        raw, l0 = _decide(self._raw, states, again), _decide(self._l0, states, again)
        for line, decision, at_raw, at_l0 in zip(found, decisions, raw, l0, strict=True):
            before = decision.question.options[int(np.argmax(line["raw"]))]
            line["relisted"].append(
                [at_raw.top != before, at_l0.probabilities != decision.probabilities]
            )


def relistings(question: Question) -> list[Question]:
    """The same question, its options the other way round and in a random order."""
    options = list(question.options)
    mixed = Random(question.key).sample(options, len(options))
    return [questions.choice(question.text, listed) for listed in (options[::-1], mixed)]


def read_all(
    engine: Engine, states: dict[str, list[Labelled]], path: Path, until: float
) -> Iterator[int]:
    """Read what a file of samples lacks, and append it.

    All tasks take turns. Those whose questions have many states are read eight at a time, and are
    that much ahead of the others while a file is not complete.

    Args:
        engine: decides.
        states: of each task.
        path: of the samples.
        until: time.monotonic() at which to stop.

    Yields:
        After each group how many states it had.
    """
    known = {(one["task"], one["number"]) for one in lines(path)}
    groups = [
        (number, len(states[task]), task, group)
        for task in states
        for number, group in enumerate(
            side_by_side(
                (item for item in enumerate(states[task]) if (task, item[0]) not in known), LANES
            )
        )
    ]
    groups.sort(key=lambda group: group[0] / group[1])
    with Reader(engine) as reader, path.open("a", encoding="utf-8") as file:
        for _, _, task, group in groups:
            if time.monotonic() > until:
                return
            first = group[0][0]
            found = reader.read([one for _, one in group], is_relisted=first % RELISTED_EVERY == 0)
            for (number, _), one in zip(group, found, strict=True):
                file.write(json.dumps({"task": task, "number": number, **one}) + "\n")
            file.flush()
            yield len(group)


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a file, if there is one."""
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def _values(decision: Decision) -> NDArray[np.float64]:
    return np.array(list(decision.probabilities.values()))


def _decide(decider: Decider, states: Sequence[str], question: Question) -> list[Decision]:
    return [one.decisions[0] for one in decider.decide_many(list(states), [question])]
