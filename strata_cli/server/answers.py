"""Choices as they are made: what the engine says becomes text, tokens and counts, side by side."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol, TypeAlias

from strata_cli.engine.model.tokenizer import StreamDecoder, Tokenizer
from strata_cli.server.answer_text import AnswerText, Piece
from strata_cli.server.asking import Asked
from strata_cli.server.engine_process import GenerateEvent
from strata_cli.server.logprobs import Entry, reported
from strata_cli.server.protocol import (
    Done,
    Generate,
    PromptLogprobs,
    PromptRow,
    Started,
    Timings,
    Token,
)
from strata_cli.server.queue import RequestQueue

FinishReason: TypeAlias = str
"""OpenAI's: "stop" or "length"; a chat's may be others."""


class Part(NamedTuple):
    """More of a choice.

    Attributes:
        text: of the answer.
        entries: of the positions whose text begins in it, where log-probabilities are wanted.
        reasoning: of the thought in front of the answer.
        finish: why the choice is over; None: it goes on.
    """

    text: str = ""
    entries: tuple[Entry, ...] = ()
    reasoning: str = ""
    finish: FinishReason | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (self.text or self.entries or self.reasoning or self.finish)


class Counts(NamedTuple):
    """Tokens of one or several choices, and how long they took."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    prompt_ms: float = 0.0
    generate_ms: float = 0.0


class Thinking(NamedTuple):
    """A thought that may stand in front of an answer.

    Attributes:
        open_id: token that begins one.
        close_id: token that ends one.
        is_open: the prompt has begun one.
    """

    open_id: int
    close_id: int
    is_open: bool


class Answer:
    """One choice that is being made.

    Args:
        job: what the engine is asked.
        asked: what the request wants of it.
        tokenizer: the model's.
        echoes: the prompt's own text comes first.
        thinking: of the answer's beginning.

    Attributes:
        is_over: no more is wanted of the engine.
        is_canonical: what the engine says; None: it was stopped before it could.
    """

    def __init__(
        self,
        job: Generate,
        asked: Asked,
        tokenizer: Tokenizer,
        *,
        echoes: bool = False,
        thinking: Thinking | None = None,
    ) -> None:
        self.is_over = False
        self.is_canonical: bool | None = None
        self._job = job
        self._asked = asked
        self._tokenizer = tokenizer
        rules = asked.text_rules
        self._text = AnswerText(
            tokenizer,
            stops=rules.stops,
            keeps_stop=rules.keeps_stop,
            skips_control=rules.skips_control,
        )
        self._thinking = thinking
        self._thought = AnswerText(tokenizer) if thinking and thinking.is_open else None
        self._is_after_thought = False
        self._echo = _Echo(tokenizer, job.prompt) if echoes else None
        self._started = self._prompt_read = self._last = time.monotonic()
        self._reused = self._generated = self._reasoning = 0
        self._timings: Timings | None = None

    @property
    def counts(self) -> Counts:
        """So far."""
        timings = self._timings
        return Counts(
            len(self._job.prompt),
            self._reused,
            self._generated,
            self._reasoning,
            timings.prompt_ms if timings else (self._prompt_read - self._started) * 1e3,
            timings.generate_ms if timings else (self._last - self._prompt_read) * 1e3,
        )

    def take(self, event: GenerateEvent) -> Part:
        """What an event adds to the choice."""
        if isinstance(event, Started):
            self._started, self._reused = time.monotonic(), event.reused_tokens
            return self._echo.begin(self._wants) if self._echo else Part()
        if isinstance(event, PromptLogprobs):
            return self._echo.rows(event) if self._echo else Part()
        if isinstance(event, Token):
            return self._token(event)
        if isinstance(event, Done):
            return self._done(event)
        return Part()

    @property
    def _wants(self) -> bool:
        return self._asked.wanted.top is not None

    def _token(self, token: Token) -> Part:
        self._last = time.monotonic()
        if not self._generated:
            self._prompt_read = self._last
        self._generated += 1
        if self._opens_thought(token):
            self._thought = AnswerText(self._tokenizer)
            self._reasoning += 1
            return Part()
        if self._thought is not None:
            return self._think(token)
        part = self._part(self._text.push(token))
        # A stop string that comes with the very last token leaves nothing to be stopped.
        if self._text.is_stopped and self._generated < self._job.max_tokens:
            self.is_over = True
            self.is_canonical = self._job.canonical is True
            return part._replace(finish="stop")
        return part

    def _opens_thought(self, token: Token) -> bool:
        is_first = self._generated == 1 and self._thought is None
        return is_first and self._thinking is not None and token.token_id == self._thinking.open_id

    def _think(self, token: Token) -> Part:
        assert self._thought is not None
        assert self._thinking is not None
        if not token.ends and token.token_id != self._thinking.close_id:
            self._reasoning += 1
            return Part(reasoning=self._thought.push(token).text)
        rest = self._thought.finish().text
        self._thought, self._is_after_thought = None, True
        if token.ends:
            return self._part(self._text.push(token))._replace(reasoning=rest)
        self._reasoning += 1
        return Part(reasoning=rest)

    def _done(self, done: Done) -> Part:
        self.is_over = True
        self.is_canonical = done.canonical
        self._timings = done.timings
        self._reused = done.reused_tokens
        thought = "" if self._thought is None else self._thought.finish().text
        part = self._part(self._text.finish())
        is_stopped = self._text.is_stopped or done.finish_reason == "stop"
        return part._replace(reasoning=thought, finish="stop" if is_stopped else "length")

    def _part(self, piece: Piece) -> Part:
        text = piece.text
        if self._is_after_thought:  # a thought and its answer stand apart
            text = text.lstrip("\n")
            self._is_after_thought = not text
        base = self._echo.num_chars if self._echo else 0
        entries = tuple(
            Entry(
                placed.token.token_id,
                placed.token.logprob,
                reported(placed.token, self._asked.num_allowed),
                base + placed.offset,
            )
            for placed in piece.tokens
        )
        return Part(text, entries if self._wants else ())


class _Echo:
    """A prompt that comes back in front of its answer.

    Attributes:
        num_chars: of its text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        decoder = StreamDecoder(tokenizer)
        self._prompt = prompt
        self._offsets: list[int] = []
        self._text = ""
        for token_id in prompt:
            self._offsets.append(len(self._text))
            self._text += decoder.push(token_id)
        self._text += decoder.finish()
        self.num_chars = len(self._text)

    def begin(self, wants: bool) -> Part:
        """The whole text, and the first token, of which nothing is known."""
        first = Entry(self._prompt[0], None, None, 0)
        return Part(self._text, (first,) if wants else ())

    def rows(self, event: PromptLogprobs) -> Part:
        """The tokens that follow."""
        rows = enumerate(event.rows, event.start)
        return Part(entries=tuple(self._entry(position, row) for position, row in rows))

    def _entry(self, position: int, row: PromptRow) -> Entry:
        return Entry(row.token_id, row.logprob, tuple(row.top), self._offsets[position])


class Output(NamedTuple):
    """More of one choice, by its index."""

    choice: int
    part: Part


class Engine(Protocol):
    """What is asked of the engine here; EngineProcess has it."""

    def generate(self, request: Generate) -> AsyncGenerator[GenerateEvent, None]:
        """See EngineProcess."""


async def answer_all(
    engine: Engine, queue: RequestQueue, jobs: Sequence[Generate], answers: Sequence[Answer]
) -> AsyncGenerator[Output, None]:
    """Everything that the choices come to, as it comes; choices take turns and overlap.

    Closing the generator stops those that are being made.

    Args:
        engine: makes them.
        queue: for turns.
        jobs: one for each choice.
        answers: the same.

    Raises:
        StrataError: one of them failed; the others are stopped.
    """
    outputs: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()
    left = iter(zip(range(len(jobs)), jobs, answers, strict=True))

    async def work() -> None:
        for index, job, answer in left:
            async with queue.turn():
                await _answer_one(engine, index, job, answer, outputs)

    async def work_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(queue.turns, len(jobs))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            outputs.put_nowait(errors.exceptions[0])
        else:
            outputs.put_nowait(None)

    task = asyncio.create_task(work_all())
    try:
        while (output := await outputs.get()) is not None:
            if isinstance(output, BaseException):
                raise output
            yield output
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _answer_one(
    engine: Engine,
    index: int,
    job: Generate,
    answer: Answer,
    outputs: asyncio.Queue[Output | BaseException | None],
) -> None:
    async with aclosing(engine.generate(job)) as events:
        async for event in events:
            part = answer.take(event)
            if not part.is_empty:
                outputs.put_nowait(Output(index, part))
            if answer.is_over:
                return


def sum_counts(asked: Asked, answers: Sequence[Answer]) -> Counts:
    """Of a whole request; a prompt counts once, however many choices it has."""
    each = [answer.counts for answer in answers]
    firsts = each[:: asked.num_choices]
    return Counts(
        prompt_tokens=sum(item.prompt_tokens for item in firsts),
        reused_tokens=sum(item.reused_tokens for item in firsts),
        generated_tokens=sum(item.generated_tokens for item in each),
        reasoning_tokens=sum(item.reasoning_tokens for item in each),
        prompt_ms=sum(item.prompt_ms for item in each),
        generate_ms=sum(item.generate_ms for item in each),
    )
