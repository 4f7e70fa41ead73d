"""Fits a question's temperature on half of its labelled states; the other half says its worth.

States take turns: the first, third, fifth ... are fitted on, the figures are about the others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from strata_cli.decisions.answers import Decision
from strata_cli.decisions.measures import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    RISK,
    Judged,
    Probabilities,
    calibration_error,
    cooled,
    fit_temperature,
    judge,
    risk_threshold,
    select,
)
from strata_cli.decisions.questions import Question
from strata_cli.errors import InputError, quoted

LEAST_STATES = 100
FEW_OF_LABEL = 8
"""So many or more of a label are all in one half by chance once in 128 files."""
MOST_NAMED = 5


class Sample(NamedTuple):
    """A labelled state: probabilities [K] of the first order and of L0, and what is right.

    Attributes:
        raw: nothing corrected.
        l0: the label's bias and that of positions divided out.
        right: index of the right option.
        flips: shares of the other orders with another answer, at raw and at L0; None: one order.
    """

    raw: Probabilities
    l0: Probabilities
    right: int
    flips: tuple[float, float] | None


class Figures(NamedTuple):
    """A level on states that were not fitted on.

    Attributes:
        accuracy: share of right answers.
        ece: expected calibration error.
        flips: mean share of the other orders with another answer, before they are averaged; None
            where there is one order.
        coverage: share of answers given at a threshold that keeps wrong ones among them below 5 %
            on the other states.
        risk: share of wrong ones among them here.
    """

    accuracy: float
    ece: float
    flips: float | None
    coverage: float
    risk: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fitting found.

    Attributes:
        question: see Question.
        temperature: of L1.
        num_fitted: states that it was fitted on.
        levels: by level, on the other states.
        judged: by level, the answers to those.
        labels: by half, fitted on and others, how many states have each option as their label.
    """

    question: Question
    temperature: float
    num_fitted: int
    levels: dict[str, Figures]
    judged: dict[str, Judged]
    labels: tuple[Counter[int], Counter[int]]

    @property
    def warnings(self) -> list[str]:
        """What makes the temperature or the figures worth less than they look; mostly nothing."""
        found = []
        if self.temperature in (LEAST_TEMPERATURE, MOST_TEMPERATURE):
            found.append(
                f"a temperature of {self.temperature:g} is as far as they go: too few answers are "
                "wrong, or right, to fit on"
            )
        fitted, tested = self.labels
        if len(fitted | tested) == 1:
            found.append(
                f"all states have the label {self._named(fitted)}: what is fitted and measured "
                "says nothing about other answers; label states of which another is right"
            )
        return [
            *found,
            *self._lacking("that were fitted on", fitted, tested),
            *self._lacking("that the figures are about", tested, fitted),
        ]

    @property
    def num_tested(self) -> int:
        """States that the figures are about."""
        return len(self.judged["L1"].hit)

    def as_dict(self) -> dict[str, Any]:
        """JSON values for the calibration's file and reports."""
        return {
            "id": self.question.id,
            "text": self.question.text,
            "options": list(self.question.options),
            "temperature": self.temperature,
            "fitted_states": self.num_fitted,
            "tested_states": self.num_tested,
            "tested": {level: figures._asdict() for level, figures in self.levels.items()},
            "warnings": self.warnings,
        }

    def _lacking(self, which: str, half: Counter[int], other: Counter[int]) -> list[str]:
        """A warning where a label of the other half is none of this one's."""
        missing = Counter({index: count for index, count in other.items() if index not in half})
        if not missing:
            return []
        is_chance = max(missing.values()) < FEW_OF_LABEL
        advice = "label more states so" if is_chance else "shuffle the lines of the file"
        return [
            f"none of the {half.total()} states {which} has the label {self._named(missing)}, and "
            f"{missing.total()} of the {other.total()} others have: {advice}, and calibrate again"
        ]

    def _named(self, labels: Counter[int]) -> str:
        names = [quoted(self.question.options[index]) for index in sorted(labels)]
        return " or ".join(names[:MOST_NAMED]) + ", …" * (len(names) > MOST_NAMED)


def check_enough(num_states: int) -> None:
    """Refuse to fit on few states.

    Raises:
        InputError: they are fewer than LEAST_STATES.
    """
    if num_states < LEAST_STATES:
        raise InputError(
            f"{num_states} labelled states are too few: {LEAST_STATES} are the least",
            hint="label more; a temperature from few is worth less than none",
        )


def sample(decision: Decision, right: int) -> Sample:
    """What is kept of an answer at L0."""
    raw = np.array(list(decision.diagnostics["raw_probs"].values()))
    l0 = np.array(list(decision.probabilities.values()))
    return Sample(raw, l0, right, decision.flips)


def fit(question: Question, samples: Sequence[Sample]) -> Fit:
    """Fit a temperature and measure all levels.

    Raises:
        InputError: there are too few samples.
    """
    check_enough(len(samples))
    fitted, tested = samples[::2], samples[1::2]
    temperature = fit_temperature([one.l0 for one in fitted], [one.right for one in fitted])
    halves = [_judged(half, temperature) for half in (fitted, tested)]
    flips = [one.flips for one in tested if one.flips is not None]
    raw_flips, l0_flips = map(_mean, zip(*flips, strict=True)) if flips else (None, None)
    by_level = {"raw": raw_flips, "L0": l0_flips, "L1": l0_flips}
    figures = {
        level: _figures(halves[0][level], halves[1][level], by_level[level]) for level in by_level
    }
    return Fit(
        question=question,
        temperature=temperature,
        num_fitted=len(fitted),
        levels=figures,
        judged=halves[1],
        labels=(Counter(one.right for one in fitted), Counter(one.right for one in tested)),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _judged(samples: Sequence[Sample], temperature: float) -> dict[str, Judged]:
    right = [one.right for one in samples]
    return {
        "raw": judge([one.raw for one in samples], right),
        "L0": judge([one.l0 for one in samples], right),
        "L1": judge([cooled(one.l0, temperature) for one in samples], right),
    }


def _figures(fitted: Judged, tested: Judged, flips: float | None) -> Figures:
    coverage, risk = select(tested, risk_threshold(fitted, RISK))
    return Figures(tested.accuracy, calibration_error(tested), flips, coverage, risk)
