"""POST /v1/completions: prompts as they are, texts or token ids; with echo they are scored too."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.server.answers import Answer
from strata_cli.server.asking import Wanted, ask
from strata_cli.server.failures import bad_request
from strata_cli.server.logprobs import CompletionLogprobs, Entry, Spelling
from strata_cli.server.replies import Completion, CompletionChoice, Usage
from strata_cli.server.running import Head, Run, Tail, new_head, wants_usage
from strata_cli.server.schemas import CompletionRequest
from strata_cli.server.service import (
    Service,
    ignored_headers,
    json_response,
    request_id,
    service_of,
)
from strata_cli.server.streaming import EventStream, event, until_gone

DEFAULT_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Complete one or several prompts."""
    service = service_of(request)
    parsed = await service.parse(request, CompletionRequest)
    completion = _CompletionRun(service, request, parsed.request)
    headers = ignored_headers(parsed)
    if parsed.request.stream:
        return EventStream(completion.stream(), service.limits, headers)
    whole = await until_gone(request, completion.whole(), service.limits)
    return json_response(whole, headers=headers)


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

    async def whole(self) -> Completion:
        """The choices as one body."""
        with self._service.queue.enter():
            run = await self._run()
            choices = [
                self._choice(index, choice.text, choice.entries, choice.finish)
                for index, choice in enumerate(await run.whole())
            ]
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

    def _choice(
        self, index: int, text: str, entries: Sequence[Entry], finish: str | None
    ) -> CompletionChoice:
        return CompletionChoice(
            index=index, text=text, logprobs=self._logprobs(entries), finish_reason=finish
        )

    def _logprobs(self, entries: Sequence[Entry]) -> CompletionLogprobs | None:
        top = self._body.logprobs
        return None if top is None else self._spelling.completion(entries, has_chosen=top > 0)


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
