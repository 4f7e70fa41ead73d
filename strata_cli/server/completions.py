"""POST /v1/completions: prompts as they are, texts or token ids; with echo they are scored too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.server.answers import Answer
from strata_cli.server.asking import Wanted, ask
from strata_cli.server.failures import bad_request
from strata_cli.server.logprobs import CompletionLogprobs, Entry, Spelling
from strata_cli.server.replies import Completion, CompletionChoice, Usage
from strata_cli.server.running import Head, Run, Tail, Whole, new_head, respond, wants_usage
from strata_cli.server.schemas import CompletionRequest
from strata_cli.server.service import Service, request_id, service_of
from strata_cli.server.streaming import event

DEFAULT_TOKENS = 16  # OpenAI's
MOST_REPORTED = 1 << 18  # log-probabilities of prompts in one answer
QUICKLY_REPORTED = 1 << 12  # so many are written out at once


async def completions(request: Request) -> Response:
    """Complete one or several prompts."""
    service = service_of(request)
    parsed = await service.parse(request, CompletionRequest)
    completion = _CompletionRun(service, request, parsed.request)
    return await respond(request, service, parsed, completion)


class _CompletionRun:
    """One request for completions.

    Raises:
        RequestFailed: 400, fields contradict each other.
    """

    def __init__(self, service: Service, request: Request, body: CompletionRequest) -> None:
        self._has_usage = wants_usage(body)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise bad_request("best_of must equal n: choices are not ranked", "best_of")
        self._service = service
        self._request = request
        self._body = body
        self._head: Head = new_head(service, "cmpl", request_id(request))
        as_ids = bool(body.return_tokens_as_token_ids)
        self._spelling = Spelling(service.texts.tokenizer, as_ids=as_ids)
        self._top = body.logprobs

    async def whole(self) -> Completion:
        """The choices as one body."""
        with self._service.queue.enter():
            run = await self._run()
            wholes = await run.whole()
            num_reported = sum(len(whole.entries) for whole in wholes) * (1 + (self._top or 0))
            if num_reported <= QUICKLY_REPORTED:
                choices = self._choices(wholes)
            else:  # takes seconds, in which others are answered
                choices = await asyncio.to_thread(self._choices, wholes)
            tail = run.tail()
            return self._body_of(choices, tail, usage=tail.usage)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The choices as chunks."""
        no_usage = None if self._has_usage else UNSET
        with self._service.queue.enter():
            run = await self._run()
            async for output in run.outputs():
                part = output.part
                choice = self._choice(output.choice, part.text, part.entries, part.finish)
                tail = run.tail_if_over() if part.finish else None
                yield event(self._body_of([choice], tail, usage=no_usage))
            if self._has_usage:
                tail = run.tail()
                yield event(self._body_of([], tail, usage=tail.usage))

    async def _run(self) -> Run:
        service, body = self._service, self._body
        prompts = await _prompts(service, body)
        max_tokens = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        echoes = bool(body.echo)
        wanted = Wanted(body.logprobs, of_prompt=echoes and body.logprobs is not None)
        if wanted.of_prompt:
            _check_reported(prompts, body.n or 1, self._top or 0)
        asked = ask(body, prompts, max_tokens, wanted, await service.grounds(self._request))
        tokenizer = service.texts.tokenizer
        answers = [Answer(job, asked, tokenizer, echoes=echoes) for job in asked.jobs]
        return Run(service, asked, answers)

    def _body_of(
        self,
        choices: list[CompletionChoice],
        tail: Tail | None,
        *,
        usage: Usage | UnsetType | None,
    ) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            timings=tail.timings if tail else UNSET,
            strata=tail.strata if tail else UNSET,
        )

    def _choices(self, wholes: Sequence[Whole]) -> list[CompletionChoice]:
        return [
            self._choice(index, choice.text, choice.entries, choice.finish)
            for index, choice in enumerate(wholes)
        ]

    def _choice(
        self, index: int, text: str, entries: Sequence[Entry], finish: str | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index, text=text, logprobs=self._logprobs(entries), finish_reason=finish
        )

    def _logprobs(self, entries: Sequence[Entry]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        return self._spelling.completion(entries, has_chosen=self._top > 0)


def _check_reported(prompts: Sequence[Sequence[int]], num_choices: int, top: int) -> None:
    """Refuse answers of hundreds of megabytes."""
    num_tokens = num_choices * sum(map(len, prompts))
    if num_tokens * (top + 1) > MOST_REPORTED:
        raise bad_request(
            f"echo of {num_tokens} prompt tokens with {top} logprobs each would report "
            f"{num_tokens * (top + 1)} log-probabilities, and {MOST_REPORTED} are the most of one "
            "request; try: fewer logprobs, or fewer prompts",
            "logprobs",
        )


async def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    """Token ids of every prompt."""
    given = body.prompt
    if isinstance(given, str):
        given = [given]
    if not given:
        raise bad_request("prompt is an empty list; give at least one token or text", "prompt")
    ids = [item for item in given if isinstance(item, int)]
    if len(ids) == len(given):
        return [ids]
    if ids:
        raise bad_request("prompt mixes token ids with texts or lists", "prompt")
    if len(given) > service.limits.max_prompts:
        raise bad_request(
            f"{len(given)} prompts are more than the {service.limits.max_prompts} of one request",
            "prompt",
        )
    return [
        await service.texts.encode(item) if isinstance(item, str) else _ids(item) for item in given
    ]


def _ids(item: object) -> list[int]:
    assert isinstance(item, list)
    return item
