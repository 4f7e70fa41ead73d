"""POST /v1/chat/completions: a conversation, as the model's chat template writes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.server.answers import Answer, Part
from strata_cli.server.asking import Wanted, ask
from strata_cli.server.chat_prompts import (
    ChatSetup,
    ReadChat,
    chat_setup,
    ignored_variables,
    read_chat,
)
from strata_cli.server.failures import bad_request
from strata_cli.server.formats import constraint_of
from strata_cli.server.logprobs import ChatLogprobs, Entry, Spelling
from strata_cli.server.replies import (
    CalledFunction,
    CallReply,
    Chat,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    Delta,
    DeltaChoice,
)
from strata_cli.server.running import Head, Run, Tail, Whole, new_head, respond, wants_usage
from strata_cli.server.schemas import ChatRequest
from strata_cli.server.service import Service, request_id, service_of
from strata_cli.server.streaming import event
from strata_cli.server.tool_calls import CallReader, ToolCall

REST_OF_CONTEXT = -1


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    parsed = await service.parse(request, ChatRequest)
    setup = await _setup(service, parsed.request)
    chat = _ChatRun(service, request, parsed.request, setup)
    ignored = (*parsed.ignored, *ignored_variables(service.texts, parsed.request))
    return await respond(request, service, parsed._replace(ignored=ignored), chat)


async def _setup(service: Service, body: ChatRequest) -> ChatSetup:
    if body.response_format is None and body.tools is None:
        return chat_setup(service.texts, service.limits, body)
    # A schema is compiled to check it, which may take seconds, in which others are answered.
    return await asyncio.to_thread(chat_setup, service.texts, service.limits, body)


class _ChatRun:
    """One request for an answer.

    Raises:
        RequestFailed: 400, fields contradict each other or are not served.
    """

    def __init__(
        self, service: Service, request: Request, body: ChatRequest, setup: ChatSetup
    ) -> None:
        self._max_tokens = _max_tokens(body)
        self._top = _top(body)
        self._has_usage = wants_usage(body)
        self._setup = setup
        self._service = service
        self._request = request
        self._body = body
        self._head: Head = new_head(service, "chatcmpl", request_id(request))
        as_ids = bool(body.return_tokens_as_token_ids)
        self._spelling = Spelling(service.texts.tokenizer, as_ids=as_ids)

    async def whole(self) -> Chat:
        """The answer as one body."""
        with self._service.queue.enter():
            run = await self._run()
            choices = [
                self._choice(index, choice) for index, choice in enumerate(await run.whole())
            ]
            tail = run.tail()
            return Chat(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=choices,
                usage=tail.usage,
                timings=tail.timings,
                strata=tail.strata,
            )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The answer as chunks."""
        with self._service.queue.enter():
            run = await self._run()
            readers: dict[int, CallReader] = {}
            async for output in run.outputs():
                index, part = output.choice, output.part
                if index not in readers:
                    readers[index] = CallReader(self._setup.use)
                    yield event(self._chunk(index, Delta(role="assistant", content="")))
                for chunk in self._chunks(index, part, readers[index], run.tail_if_over()):
                    yield event(chunk)
            if self._has_usage:
                yield event(self._usage_chunk(run.tail()))

    async def _run(self) -> Run:
        service, body = self._service, self._body
        prompt = await read_chat(service.texts, self._setup)
        asked = ask(
            body,
            [prompt.ids],
            self._max_tokens,
            Wanted(self._top),
            await service.grounds(self._request),
            constraint=constraint_of(self._setup.grammar, _thought_end(prompt)),
        )
        tokenizer = service.texts.tokenizer
        answers = [Answer(job, asked, tokenizer, thinking=prompt.thinking) for job in asked.jobs]
        return Run(service, asked, answers)

    def _choice(self, index: int, choice: Whole) -> ChatChoice:
        reader = CallReader(self._setup.use)
        text, calls = reader.push(choice.text)
        text += reader.finish()
        answer = ChatAnswer(
            content=text if text or not calls else None,
            reasoning_content=choice.reasoning or UNSET,
            tool_calls=[_reply(call) for call in calls] or UNSET,
        )
        return ChatChoice(
            index=index,
            message=answer,
            logprobs=self._logprobs(choice.entries),
            finish_reason=_finish(choice.finish, reader),
        )

    def _chunks(
        self, index: int, part: Part, reader: CallReader, tail: Tail | None
    ) -> Iterator[ChatChunk]:
        first = reader.num_calls
        text, calls = reader.push(part.text)
        if part.finish is not None:
            text += reader.finish()
        if text or part.entries or part.reasoning or calls:
            delta = Delta(
                content=text if text or part.entries else UNSET,
                reasoning_content=part.reasoning or UNSET,
                tool_calls=[_reply(call, first + n) for n, call in enumerate(calls)] or UNSET,
            )
            yield self._chunk(index, delta, part.entries)
        if part.finish is not None:
            yield self._chunk(index, Delta(), finish=_finish(part.finish, reader), tail=tail)

    def _chunk(
        self,
        index: int,
        delta: Delta,
        entries: Sequence[Entry] = (),
        *,
        finish: str | None = None,
        tail: Tail | None = None,
    ) -> ChatChunk:
        logprobs = self._logprobs(entries) if entries else None
        choice = DeltaChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[choice],
            usage=None if self._has_usage else UNSET,
            timings=tail.timings if tail else UNSET,
            strata=tail.strata if tail else UNSET,
        )

    def _usage_chunk(self, tail: Tail) -> ChatChunk:
        return ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[],
            usage=tail.usage,
            timings=tail.timings,
            strata=tail.strata,
        )

    def _logprobs(self, entries: Sequence[Entry]) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return ChatLogprobs([self._spelling.chat(entry) for entry in entries])


def _thought_end(prompt: ReadChat) -> int | None:
    """The token that an answer's grammar waits for: the end of a thought that is begun."""
    thinking = prompt.thinking
    return thinking.close_id if thinking is not None and thinking.is_open else None


def _reply(call: ToolCall, index: int | UnsetType = UNSET) -> CallReply:
    called = CalledFunction(name=call.name, arguments=call.arguments)
    return CallReply(index=index, id=call.new_id(), function=called)


def _finish(finish: str | None, reader: CallReader) -> str | None:
    return "tool_calls" if finish == "stop" and reader.num_calls else finish


def _max_tokens(body: ChatRequest) -> int:
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise bad_request(
            "max_tokens and max_completion_tokens differ; give one of them",
            "max_completion_tokens",
        )
    if 0 in given:
        raise bad_request(
            "max_tokens is 0, which would give no answer; "
            "try: 1 or more, or -1 for the rest of the context",
            "max_tokens" if body.max_tokens == 0 else "max_completion_tokens",
        )
    return next((value for value in given if value is not None), REST_OF_CONTEXT)


def _top(body: ChatRequest) -> int | None:
    """How many alternatives are reported; None: no log-probabilities at all."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return None
