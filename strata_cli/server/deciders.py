"""Decisions for requests: made in threads of the server's process, read by the engine's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from strata_cli.decisions.answers import Decision
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.questions import Question
from strata_cli.decisions.rules import DEFAULT_RULES, DecisionRules
from strata_cli.errors import Cancelled, InputError
from strata_cli.server.decision_backend import DecisionBackend
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.protocol import ModelFacts, Score, Scores
from strata_cli.server.texts import ModelTexts

MOST_THREADS = 8
MOST_CHARACTERS = 1 << 26
"""Of all prompts that are made at a time, about; of more questions, some are answered first."""

MOST_QUESTIONS = 1024
"""A decider that has answered so many different ones is replaced: it keeps a prior of each."""


class Decided(NamedTuple):
    """The answers about one state.

    Attributes:
        decisions: in the order asked.
        input_tokens: see DecisionBackend.
        read_tokens: that were read for them.
    """

    decisions: tuple[Decision, ...]
    input_tokens: int
    read_tokens: int


class _Lent(NamedTuple):
    """A decider, its reads, and the keys of the questions that it has met."""

    decider: Decider
    backend: DecisionBackend
    keys: set[str]


class Deciders:
    """Makes deciders, and keeps them for the priors that they have read.

    Each decision has one for itself. No answer depends on which. Belongs to the event loop.

    Args:
        rules: by which questions are answered.

    Attributes:
        rules: as given.
    """

    def __init__(self, rules: DecisionRules = DEFAULT_RULES) -> None:
        self.rules = rules
        self._idle: list[_Lent] = []  # the last one knows most
        self._threads = ThreadPoolExecutor(MOST_THREADS, "decide")

    async def decide(
        self,
        engine: EngineProcess,
        texts: ModelTexts,
        state: str,
        questions: Sequence[Question],
    ) -> Decided:
        """Answer questions about a state. Cancelling stops it within a chunk.

        Args:
            engine: reads.
            texts: of its model.
            state: see Decider.decide.
            questions: likewise.

        Raises:
            InputError: see Decider.decide.
            StrataError: the engine failed.
        """
        if engine.facts is None:
            await engine.load()
        assert engine.facts is not None
        lent = self._idle.pop() if self._idle else self._new(texts, engine.facts)
        asker = _Asker(engine, asyncio.get_running_loop())
        try:
            decided = await asyncio.get_running_loop().run_in_executor(
                self._threads, _decide, lent, asker, state, questions
            )
        except InputError:
            self._take_back(lent)
            raise
        finally:
            asker.stop()  # if this was cancelled, the thread still runs, and has its decider
        self._take_back(lent)
        return decided

    def _new(self, texts: ModelTexts, facts: ModelFacts) -> _Lent:
        backend = DecisionBackend(texts, facts)
        return _Lent(Decider(backend, self.rules), backend, set())

    def _take_back(self, lent: _Lent) -> None:
        if len(lent.keys) < MOST_QUESTIONS:
            self._idle.append(lent)


class _Asker:
    """Sends a thread's questions to the engine, on the event loop.

    Args:
        engine: answers them.
        loop: its event loop.
    """

    def __init__(self, engine: EngineProcess, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._lock = threading.Lock()
        self._is_stopped = False
        self._asked: concurrent.futures.Future[Scores] | None = None

    def ask(self, score: Score) -> Scores:
        """The answer; any thread but the loop's.

        Raises:
            Cancelled: stop() was called.
            StrataError: the engine failed.
        """
        with self._lock:
            if self._is_stopped:
                raise _cancelled()
            asked = asyncio.run_coroutine_threadsafe(self._engine.score(score), self._loop)
            self._asked = asked
        try:
            return asked.result()
        except concurrent.futures.CancelledError:
            raise _cancelled() from None

    def stop(self) -> None:
        """Nobody waits for answers any more. Safe to call twice."""
        with self._lock:
            self._is_stopped = True
            if self._asked is not None:
                self._asked.cancel()


def _decide(lent: _Lent, asker: _Asker, state: str, questions: Sequence[Question]) -> Decided:
    lent.keys.update(question.key for question in questions)
    decisions, input_tokens, read_tokens = list[Decision](), 0, 0
    for some in _parts(state, questions):
        with lent.backend.asking(state, asker.ask):
            found = lent.decider.decide(state, some)
            decisions += found.decisions
            input_tokens += lent.backend.input_tokens
            read_tokens += found.tokens.read_tokens
    return Decided(tuple(decisions), input_tokens, read_tokens)


def _parts(state: str, questions: Sequence[Question]) -> Iterator[list[Question]]:
    """The questions in order, so many at a time that their prompts are not too much together."""
    some, characters = list[Question](), 0
    for question in questions:
        orders = 1 if question.by_text or question.kind == "score" else len(question.options)
        text = len(state) + len(question.text) + sum(map(len, question.options))
        if some and characters + orders * text > MOST_CHARACTERS:
            yield some
            some, characters = [], 0
        some.append(question)
        characters += orders * text
    yield some


def _cancelled() -> Cancelled:
    return Cancelled("the client went away", hint="send the request again")
