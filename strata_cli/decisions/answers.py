"""The answers: a probability for every option, and how it came about."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import anyjev
import numpy as np

from strata_cli.decisions.by_text import TextAnswer
from strata_cli.decisions.calibration import Calibration
from strata_cli.decisions.measures import cooled
from strata_cli.decisions.questions import Question
from strata_cli.decisions.reads import TokenCounts
from strata_cli.decisions.rules import DecisionRules, Level

LEAST_MASS = 0.1
"""Options that hold less of the probability are warned of."""

DIAGNOSTICS = (
    "answer_mass",
    "permutations",
    "prior_method",
    "prior_strength",
    "order_flip_raw",
    "order_flip_l0",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One question's answer.

    Attributes:
        question: as it was asked.
        level: that was reached.
        answer: an option; yes or no as a bool; or the expected level or value.
        top: the likeliest option; of equal ones the first, in sorted order where level is L0.
        probabilities: of every option, in the caller's order; they sum to 1.
        diagnostics: how the answer came about, JSON values only (docs/decide-json.md).
    """

    question: Question
    level: Level
    answer: str | bool | float
    top: str
    probabilities: dict[str, float]
    diagnostics: dict[str, Any]

    @property
    def confidence(self) -> float:
        """Probability of the likeliest option."""
        return self.probabilities[self.top]

    @property
    def flips(self) -> tuple[float, float] | None:
        """Shares of the other orders with another answer, at raw and at L0; None: no other read."""
        known = self.diagnostics
        if "order_flip_raw" not in known or known["permutations"] < 2:
            return None
        return known["order_flip_raw"], known["order_flip_l0"]

    @property
    def warnings(self) -> list[str]:
        """What makes this answer worth less than it looks; mostly nothing."""
        found = []
        mass = self.diagnostics["answer_mass"]
        if mass < LEAST_MASS:
            found.append(
                f"all options together hold {mass:.3g} of the probability: the model would rather "
                "answer something else"
            )
        tokens = set(self.diagnostics.get("option_tokens", {}).values())
        if len(tokens) > 1:
            found.append(
                f"options have {min(tokens)} to {max(tokens)} tokens: sums of log-probabilities "
                "favour short ones"
            )
        return found

    def as_dict(self) -> dict[str, Any]:
        """AnyJev's dictionary of a decision, and its diagnostics."""
        result: dict[str, Any] = {
            "kind": self.question.kind,
            "level": self.level,
            "answer": self.answer,
            "confidence": self.confidence,
        }
        if self.question.kind == "noul":
            result["probability"] = self.probabilities["Yes"]
        else:
            if self.question.kind == "score":
                result["value"] = self.answer
            result["distribution"] = self.probabilities
        return {**result, "diagnostics": self.diagnostics}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSet:
    """The answers about one state, in the order asked.

    Attributes:
        rules: by which they were read.
        decisions: one for each question.
        tokens: of all prompts, those that estimate the prior included.
        seconds: wall time of all reads.
    """

    rules: DecisionRules
    decisions: tuple[Decision, ...]
    tokens: TokenCounts
    seconds: float

    @property
    def warnings(self) -> list[str]:
        """What makes answers worth less than they look, each after its question's id."""
        return [f"{item.question.id}: {one}" for item in self.decisions for one in item.warnings]

    def abstained(self, threshold: float) -> list[str]:
        """Ids of the questions whose likeliest option has less."""
        return [item.question.id for item in self.decisions if item.confidence < threshold]

    def as_dict(self) -> dict[str, Any]:
        """AnyJev's dictionary of a set of decisions."""
        return {
            "level": self.rules.level,
            "questions": {item.question.id: item.as_dict() for item in self.decisions},
        }


def label_answer(question: Question, found: anyjev.Decision) -> Decision:
    """An answer read by labels, its options in the caller's order."""
    raw = dict(zip(found.question.options, found.diagnostics["raw_probs"], strict=True))
    known = {key: found.diagnostics[key] for key in DIAGNOSTICS if key in found.diagnostics}
    return Decision(
        question=question,
        level=found.level,
        answer=found.answer,
        top=found.argmax,
        probabilities=_in_order(question, found.distribution),
        diagnostics={"readout": "label", "raw_probs": _in_order(question, raw), **known},
    )


def text_answer(question: Question, level: Level, found: TextAnswer) -> Decision:
    """An answer read by the options' text, in the caller's order."""
    probabilities = dict(zip(found.options, map(float, found.probabilities), strict=True))
    top = found.options[int(np.argmax(found.probabilities))]
    raw, tokens = found.diagnostics["raw_probs"], found.diagnostics["option_tokens"]
    return Decision(
        question=question,
        level=level,
        answer=top,
        top=top,
        probabilities=_in_order(question, probabilities),
        diagnostics={
            **found.diagnostics,
            "raw_probs": _in_order(question, raw),
            "option_tokens": {option: tokens[option] for option in question.options},
        },
    )


def cooled_answer(decision: Decision, calibration: Calibration) -> Decision:
    """A decision of L0 at its temperature: the same order of options, other confidences."""
    question, temperature = decision.question, calibration.temperature(decision.question)
    values = np.array(list(decision.probabilities.values()))
    probabilities = dict(
        zip(question.options, map(float, cooled(values, temperature)), strict=True)
    )
    answer = decision.answer
    if question.kind == "score":
        centers = question.spec.bin_centers()
        answer = math.fsum(p * c for p, c in zip(probabilities.values(), centers, strict=True))
    return replace(
        decision,
        level="L1",
        answer=answer,
        probabilities=probabilities,
        diagnostics={**decision.diagnostics, "temperature": temperature},
    )


def _in_order(question: Question, values: dict[str, float | np.float64]) -> dict[str, float]:
    return {option: float(values[option]) for option in question.options}
