"""A completion request from its checked fields to the end: what chats and completions share."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response

from strata_cli.server.answers import Answer, Output, Part, answer_all, sum_counts
from strata_cli.server.asking import Asked
from strata_cli.server.failures import bad_request
from strata_cli.server.logprobs import Entry
from strata_cli.server.replies import StrataFacts, Timings, Usage, timings_of, usage_of
from strata_cli.server.schemas import ChatRequest, CompletionRequest, Parsed
from strata_cli.server.service import Service, ignored_headers, json_response
from strata_cli.server.streaming import EventStream, until_gone


class Answering(Protocol):
    """A request that is answered in one of two ways."""

    async def whole(self) -> Any:
        """The answer as one body."""
        ...

    def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        ...


async def respond(
    request: Request,
    service: Service,
    parsed: Parsed[ChatRequest] | Parsed[CompletionRequest],
    answering: Answering,
) -> Response:
    """Answer a request as it wants it: as a stream, or whole.

    Raises:
        ClientGone: nobody waits for the whole answer any more.
    """
    headers = ignored_headers(parsed)
    if parsed.request.stream:
        return EventStream(answering.stream(), service.limits, headers)
    whole = await until_gone(request, answering.whole(), service.limits)
    return json_response(whole, headers=headers)


class Head(NamedTuple):
    """What all chunks of an answer begin with."""

    id: str
    created: int
    model: str


class Tail(NamedTuple):
    """What is known when all choices are over."""

    usage: Usage
    timings: Timings
    strata: StrataFacts


class Whole(NamedTuple):
    """A choice from beginning to end."""

    text: str
    reasoning: str
    entries: tuple[Entry, ...]
    finish: str | None


class Run:
    """The choices of one request.

    Args:
        service: answers.
        asked: what the engine is asked.
        answers: one for each job.
    """

    def __init__(self, service: Service, asked: Asked, answers: list[Answer]) -> None:
        self.asked = asked
        self._service = service
        self._answers = answers
        self._unfinished = len(answers)

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """What the choices come to, as it comes."""
        service, jobs = self._service, self.asked.jobs
        stream = answer_all(service.engine, service.queue, jobs, self._answers)
        async with aclosing(stream) as outputs:
            async for output in outputs:
                self._unfinished -= output.part.finish is not None
                yield output

    async def whole(self) -> list[Whole]:
        """All choices, when they are over."""
        parts: list[list[Output]] = [[] for _ in self._answers]
        async with aclosing(self.outputs()) as outputs:
            async for output in outputs:
                parts[output.choice].append(output)
        return [_joined([output.part for output in each]) for each in parts]

    def tail_if_over(self) -> Tail | None:
        """Counts and times, once the end of the last choice was handed out."""
        return None if self._unfinished else self.tail()

    def tail(self) -> Tail:
        """Counts and times."""
        counts = sum_counts(self.asked, self._answers)
        is_canonical = all(answer.is_canonical for answer in self._answers)
        facts = StrataFacts(canonical=is_canonical, seed=self.asked.seed)
        return Tail(usage_of(counts), timings_of(counts), facts)


def new_head(service: Service, prefix: str, request_id: str) -> Head:
    """The head of a new answer."""
    return Head(f"{prefix}-{request_id}", int(time.time()), service.texts.name)


def wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    """Whether a stream ends with its usage.

    Raises:
        RequestFailed: 400, there is no stream to end.
    """
    options = request.stream_options
    if options is not None and not request.stream:
        raise bad_request("stream_options needs stream", "stream_options")
    return bool(options and options.include_usage)


def _joined(parts: list[Part]) -> Whole:
    finish = [part.finish for part in parts if part.finish is not None]
    return Whole(
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(entry for part in parts for entry in part.entries),
        finish[-1] if finish else None,
    )
