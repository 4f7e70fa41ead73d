"""Decides: a state and questions in, a probability for every answer out.

Prompts, readout and what removes the bias of positions and labels are AnyJev's; this module chooses
what keeps an answer free of everything but state, question, model and build.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import anyjev
from anyjev.readout import LabelTokenError, resolve_labels

from strata_cli.decisions.answers import (
    Decision,
    DecisionSet,
    cooled_answer,
    label_answer,
    text_answer,
)
from strata_cli.decisions.by_text import TextReader
from strata_cli.decisions.orders import Orders
from strata_cli.decisions.questions import Question, check_distinct
from strata_cli.decisions.reads import Backend, TokenCounts
from strata_cli.decisions.rules import DEFAULT_RULES, DecisionRules, Level
from strata_cli.errors import InputError

if TYPE_CHECKING:
    from strata_cli.engine.engine import Engine


class Decider:
    """Answers questions with one engine. Owned by the engine's thread.

    Args:
        source: reads: an engine, or what reads for one that is elsewhere.
        rules: how.
        lanes: states that decide_many() reads side by side on an engine; changes no value.

    Raises:
        OutOfMemory: a sequence does not fit.
    """

    def __init__(
        self, source: Engine | Backend, rules: DecisionRules = DEFAULT_RULES, *, lanes: int = 1
    ) -> None:
        self.rules = rules
        self.lanes = lanes
        self._backend = _backend(source, rules, lanes)
        self._by_text = TextReader(
            self._backend,
            sorts=rules.level != "raw",
            has_prior=rules.level != "raw" and rules.prior == "content_free",
        )
        self._decider = anyjev.Decider(
            self._backend,
            level="raw" if rules.level == "raw" else "L0",
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
        self.check(questions)
        _check_state(state)
        started, before = time.perf_counter(), self._backend.counts
        self._protect([state], questions)
        decisions = [
            *self._by_label(state, [one for one in questions if not one.by_text]),
            *self._by_their_text(state, [one for one in questions if one.by_text]),
        ]
        places = {question.id: place for place, question in enumerate(questions)}
        decisions.sort(key=lambda decision: places[decision.question.id])
        tokens = self._backend.counts.since(before)
        return self._set(decisions, tokens, time.perf_counter() - started)

    def decide_many(
        self, states: Sequence[str], questions: Sequence[Question]
    ) -> list[DecisionSet]:
        """Answer questions about several states, the same as decide() about each.

        One question about several states is asked side by side. Tokens and time of all are then in
        the first of the sets.

        Raises:
            InputError: see decide(); of any of the states.
        """
        (question, *others), several = questions, len(states) > 1 and self.lanes > 1
        if others or question.by_text or not several or self.rules.depends_on_traffic:
            return [self.decide(state, questions) for state in states]
        self.check(questions)
        for state in states:
            _check_state(state)
        started, before = time.perf_counter(), self._backend.counts
        self._protect(states, questions)
        found = self._decider.decide_batch(list(states), self._spec(question))
        tokens = self._backend.counts.since(before)
        seconds = time.perf_counter() - started
        nothing = TokenCounts(0, 0)
        return [
            self._set(
                [label_answer(question, one)],
                nothing if number else tokens,
                0.0 if number else seconds,
            )
            for number, one in enumerate(found)
        ]

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
        tokenizer, asked = self._backend.tokenizer, [self._orders(one) for one in questions]
        another = asked[0].prompt(tokenizer, _another(state), asked[0].orders[0])
        parting = [
            one.prompt(tokenizer, state, order) for one in asked for order in one.parting(tokenizer)
        ]
        self._backend.expect(parting, another, at_once=len(asked) == 1)
        found = self._decider.decide(state, [one.spec for one in asked])
        return [label_answer(*pair) for pair in zip(questions, found, strict=True)]

    def _by_their_text(self, state: str, questions: Sequence[Question]) -> list[Decision]:
        if not questions:
            return []
        prompts = [self._by_text.prompt(state, question) for question in questions]
        self._backend.expect(prompts, self._by_text.prompt(_another(state), questions[0]))
        level: Level = "raw" if self.rules.level == "raw" else "L0"
        return [text_answer(one, level, self._by_text.answer(state, one)) for one in questions]

    def check(self, questions: Sequence[Question]) -> None:
        """Refuse questions that this model cannot answer by these rules, whatever the state.

        Raises:
            InputError: two have one id, the model has no single tokens for a question's labels,
                or there is no prior or no temperature of the wanted kind.
        """
        check_distinct(questions)
        for question in questions:
            if self.rules.level == "L1" and self.rules.calibration is not None:
                self.rules.calibration.temperature(question)
            if not question.by_text:
                self._labels(question)
            if question.by_text and self.rules.depends_on_traffic:
                raise InputError(
                    f"{question.id} is answered by its options' text, for which there is no batch "
                    "prior",
                    hint="use --prior content_free or none",
                )

    def _set(self, decisions: list[Decision], tokens: TokenCounts, seconds: float) -> DecisionSet:
        if self.rules.calibration is not None and self.rules.level == "L1":
            decisions = [cooled_answer(item, self.rules.calibration) for item in decisions]
        return DecisionSet(
            rules=self.rules, decisions=tuple(decisions), tokens=tokens, seconds=seconds
        )

    def _protect(self, states: Sequence[str], questions: Sequence[Question]) -> None:
        texts = [*states]
        for question in questions:
            texts += [question.text, *question.options]
        self._backend.tokenizer.protect(texts)

    def _spec(self, question: Question) -> anyjev.Question:
        return question.spec if self.rules.level == "raw" else question.canonical()

    def _orders(self, question: Question) -> Orders:
        is_raw = self.rules.level == "raw"
        return Orders.of(self._spec(question), self._labels(question), is_raw=is_raw)

    def _labels(self, question: Question) -> list[str]:
        try:
            return resolve_labels(self._backend.tokenizer, question.spec)[0]  # type: ignore[no-any-return] # untyped
        except LabelTokenError as error:
            raise self._no_labels(question, error) from None

    def _no_labels(self, question: Question, error: LabelTokenError) -> InputError:
        shown = {"choice": "letters", "noul": "Yes and No", "score": "digits or letters"}
        return InputError(
            f"{self._backend.name} cannot answer {question.id}: {error}",
            hint=f"options are labelled by {shown[question.kind]}, each of which must be a single "
            "token of the model, and another one than the others'; use another model, or score "
            "options by their own text with --by-text",
        )


def _backend(source: Engine | Backend, rules: DecisionRules, lanes: int) -> Backend:
    if isinstance(source, Backend):
        return source
    # Not at the top of the file: a process that holds no engine decides as well.
    from strata_cli.decisions.backend import EngineBackend

    return EngineBackend(source, reuse=rules.reuse, lanes=lanes)


def _check_state(state: str) -> None:
    if not state.strip():
        raise InputError("the state is empty", hint="give some text to decide about")


def _another(state: str) -> str:
    """A state of which no more than the words in front of it are shared."""
    return "N/A" if state.startswith("(empty)") else "(empty)"
