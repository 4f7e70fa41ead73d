"""An engine that says what a test wants, in place of EngineProcess."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.errors import StrataError
from strata_cli.server.access import AccessRules
from strata_cli.server.app import create_app
from strata_cli.server.engine_process import EngineProcess, GenerateEvent, State
from strata_cli.server.protocol import (
    Done,
    Generate,
    Loading,
    ModelFacts,
    Progress,
    PromptLogprobs,
    PromptRow,
    Ranked,
    Started,
    Status,
    Timings,
    Token,
)
from strata_cli.server.queue import RequestQueue
from strata_cli.server.service import Service
from strata_cli.server.texts import ModelTexts
from tests.model.vocabularies import small_metadata

TEMPLATE = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
CONTEXT = 64


@functools.cache
def tokenizer() -> Tokenizer:
    ends = {"eos_token_id": 264}
    return Tokenizer.from_metadata(small_metadata(dict(ends)))


class FakeEngine:
    """Answers every request with the same tokens.

    Attributes:
        reply: token ids of the answer.
        asked: every request that came.
        stopped: requests that were closed before they were over.
        failure: raised instead of the first token.
        waits: if set, the answer goes on when the event is set.
    """

    def __init__(self, reply: Sequence[int] = (), *, ends: int | None = None) -> None:
        self.reply = list(reply)
        self.ends = ends
        self.asked: list[Generate] = []
        self.stopped: list[Generate] = []
        self.failure: StrataError | None = None
        self.waits: asyncio.Event | None = None
        self.facts: ModelFacts | None = ModelFacts(
            name="small",
            vocab_size=267,
            context_tokens=CONTEXT,
            model_context_tokens=CONTEXT,
            eos_ids=(264,),
            device="host",
            chunk_tokens=512,
            parallel=2,
        )
        self.state: State = "ready"
        self.loading: Loading | None = None
        self.starts = 1
        self.reserved_mib = 0

    async def start(self) -> None:
        self.state = "ready"

    async def load(self) -> None:
        await self.start()

    async def unload(self) -> None:
        self.state = "stopped"

    async def reserve(self, mib: int) -> None:
        self.reserved_mib = mib
        self.state = "ready"

    async def status(self) -> Status | None:
        return None

    async def generate(self, request: Generate) -> AsyncGenerator[GenerateEvent, None]:
        self.asked.append(request)
        is_over = False
        try:
            for event in self._events(request):
                if isinstance(event, Progress) and self.waits is not None:
                    await self.waits.wait()
                if isinstance(event, Progress) and self.failure is not None:
                    raise self.failure
                await asyncio.sleep(0)
                is_over = isinstance(event, Done)
                yield event
        finally:
            if not is_over:
                self.stopped.append(request)

    def _events(self, request: Generate) -> list[GenerateEvent]:
        name, prompt = request.request_id, request.prompt
        events: list[GenerateEvent] = [
            Started(request_id=name, reused_tokens=1),
            Progress(request_id=name, read_tokens=len(prompt) - 1, total_tokens=len(prompt) - 1),
        ]
        if request.prompt_logprobs is not None:
            rows = tuple(
                PromptRow(token, -0.5, likeliest(request.prompt_logprobs)) for token in prompt[1:]
            )
            events.append(PromptLogprobs(request_id=name, start=1, rows=rows))
        reply = self.reply[: request.max_tokens]
        events += [self._token(request, index, item) for index, item in enumerate(reply)]
        is_ended = self.ends is not None and len(reply) < request.max_tokens
        if is_ended and self.ends is not None:
            events.append(self._token(request, len(reply), self.ends, ends=True))
        done = Done(
            request_id=name,
            finish_reason="stop" if is_ended else "length",
            prompt_tokens=len(prompt),
            reused_tokens=1,
            read_tokens=len(prompt) - 1,
            generated_tokens=len(reply) + is_ended,
            canonical=request.canonical or (request.max_tokens == 1 and request.wants_logprobs),
            timings=Timings(wait_ms=0.0, prompt_ms=2.0, generate_ms=3.0),
        )
        return [*events, done]

    def _token(self, request: Generate, index: int, token_id: int, *, ends: bool = False) -> Token:
        return Token(
            request_id=request.request_id,
            index=index,
            token_id=token_id,
            ends=ends,
            logprob=None if request.logprobs is None else -0.25,
            top=likeliest(request.logprobs or 0),
            named=tuple(
                Ranked(item, -2.0 - place)
                for place, item in enumerate((*request.allowed_ids, *request.named_ids))
            ),
        )


def likeliest(count: int) -> tuple[Ranked, ...]:
    """Some tokens, best first: a, b, c, ... of the alphabet."""
    return tuple(Ranked(ord("a") + place, -1.0 - place) for place in range(count))


@functools.cache
def template() -> ChatTemplate:
    """One process that renders for all tests."""
    return ChatTemplate(TEMPLATE)


def new_service(engine: FakeEngine, **more: Any) -> Service:
    """A service whose engine is the fake."""
    fields: dict[str, Any] = {
        "texts": ModelTexts("small", tokenizer(), template()),
        "queue": RequestQueue(2, 4),
        "rules": AccessRules(listen="127.0.0.1"),
    }
    return Service(engine=cast(EngineProcess, engine), **{**fields, **more})


def new_app(engine: FakeEngine, **more: Any) -> Any:
    """An application whose engine is the fake."""
    return create_app(new_service(engine, **more))
