"""Decides: a state and questions in, a probability for every answer out.

Prompts, readout and what removes the bias of positions and labels are AnyJev's; this module chooses
what keeps an answer free of everything but state, question, model and build.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import anyjev
import numpy as np
from anyjev.readout import (
    LabelTokenError,
    build_prompt,
    render_chat_parts,
    resolve_labels,
)

from strata_cli.decisions.backend import EngineBackend, TokenCounts
from strata_cli.decisions.by_text import TextAnswer, TextReader
from strata_cli.decisions.questions import Question, check_distinct
from strata_cli.engine.engine import Engine
from strata_cli.errors import InputError

Level: TypeAlias = Literal["raw", "L0"]
Prior: TypeAlias = Literal["content_free", "none", "batch"]

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
class DecisionRules:
    """How answers are read.

    Attributes:
        level: "raw" reads one prompt, options as listed; "L0" reads every rotation of the sorted
            options and divides the labels' prior out.
        prior: where that prior comes from: states without content, nowhere, or the states decided
            on so far ("batch"), which makes answers depend on traffic.
        reuse: read once what prompts have in common; changes no value.
    """

    level: Level = "L0"
    prior: Prior = "content_free"
    reuse: bool = True

    @property
    def depends_on_traffic(self) -> bool:
        """Whether states decided on earlier move an answer."""
        return self.level != "raw" and self.prior == "batch"


DEFAULT_RULES = DecisionRules()


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

    def as_dict(self) -> dict[str, Any]:
        """AnyJev's dictionary of a set of decisions."""
        return {
            "level": self.rules.level,
            "questions": {item.question.id: item.as_dict() for item in self.decisions},
        }


class Decider:
    """Answers questions with one engine. Owned by the engine's thread.

    Args:
        engine: reads.
        rules: how.

    Raises:
        OutOfMemory: a sequence does not fit.
    """

    def __init__(self, engine: Engine, rules: DecisionRules = DEFAULT_RULES) -> None:
        self.rules = rules
        self._engine = engine
        self._backend = EngineBackend(engine, reuse=rules.reuse)
        self._by_text = TextReader(
            self._backend,
            sorts=rules.level != "raw",
            has_prior=rules.level != "raw" and rules.prior == "content_free",
        )
        self._decider = anyjev.Decider(
            self._backend,
            level=rules.level,
            prior=rules.prior,
            shared_prefix=True,
            canonical_order=True,
        )

    def decide(self, state: str, questions: Sequence[Question]) -> DecisionSet:
        """Answer questions about a state, which is read once for all of them.

        No answer depends on the other questions, or on the ids of any.

        Raises:
            InputError: the state is empty or does not fit the context with a question, two
                questions have one id, or the model has no single tokens for a question's labels.
        """
        check_distinct(questions)
        self._check_prior(questions)
        if not state.strip():
            raise InputError("the state is empty", hint="give some text to decide about")
        started, before = time.perf_counter(), self._backend.counts
        self._protect(state, questions)
        decisions = [
            *self._by_label(state, [one for one in questions if not one.by_text]),
            *self._by_their_text(state, [one for one in questions if one.by_text]),
        ]
        places = {question.id: place for place, question in enumerate(questions)}
        decisions.sort(key=lambda decision: places[decision.question.id])
        return DecisionSet(
            rules=self.rules,
            decisions=tuple(decisions),
            tokens=self._backend.counts.since(before),
            seconds=time.perf_counter() - started,
        )

    def close(self) -> None:
        """Gives memory back. Safe to call twice."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _by_label(self, state: str, questions: Sequence[Question]) -> list[Decision]:
        if not questions:
            return []
        specs = [self._spec(question) for question in questions]
        self._backend.expect(self._first_prompts(state, questions, specs))
        found = self._decider.decide(state, specs)
        return [_decision(*pair) for pair in zip(questions, found, strict=True)]

    def _by_their_text(self, state: str, questions: Sequence[Question]) -> list[Decision]:
        if not questions:
            return []
        self._backend.expect([self._by_text.prompt(state, question) for question in questions])
        level = self.rules.level
        return [_told(one, level, self._by_text.answer(state, one)) for one in questions]

    def _check_prior(self, questions: Sequence[Question]) -> None:
        for question in questions:
            if question.by_text and self.rules.depends_on_traffic:
                raise InputError(
                    f"{question.id} is answered by its options' text, for which there is no batch "
                    "prior",
                    hint="use --prior content_free or none",
                )

    def _protect(self, state: str, questions: Sequence[Question]) -> None:
        texts = [state]
        for question in questions:
            texts += [question.text, *question.options]
        self._backend.tokenizer.protect(texts)

    def _spec(self, question: Question) -> anyjev.Question:
        return question.spec if self.rules.level == "raw" else question.canonical()

    def _first_prompts(
        self, state: str, questions: Sequence[Question], specs: Sequence[anyjev.Question]
    ) -> list[str]:
        """One prompt of each question, which tells what all begin with."""
        tokenizer, prompts = self._backend.tokenizer, []
        for question, spec in zip(questions, specs, strict=True):
            try:
                labels, _ = resolve_labels(tokenizer, spec)
            except LabelTokenError as error:
                raise self._no_labels(question, error) from None
            prompt = build_prompt(state, spec, range(spec.k), labels=labels)
            prompts.append("".join(render_chat_parts(tokenizer, prompt)))
        return prompts

    def _no_labels(self, question: Question, error: LabelTokenError) -> InputError:
        shown = {"choice": "letters", "noul": "Yes and No", "score": "digits or letters"}
        return InputError(
            f"{self._engine.model_name} cannot answer {question.id}: {error}",
            hint=f"options are labelled by {shown[question.kind]}, each of which must be a single "
            "token of the model, and another one than the others'; use another model, or score "
            "options by their own text with --by-text",
        )


def _decision(question: Question, found: anyjev.Decision) -> Decision:
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


def _told(question: Question, level: Level, found: TextAnswer) -> Decision:
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


def _in_order(question: Question, values: dict[str, float | np.float64]) -> dict[str, float]:
    return {option: float(values[option]) for option in question.options}
