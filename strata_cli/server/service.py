"""What every route needs: the engine, the model's texts, the queue and the rules."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.server.access import AccessRules
from strata_cli.server.asking import Grounds, SamplingDefaults
from strata_cli.server.body import read_json
from strata_cli.server.deciders import Deciders
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.limits import Limits
from strata_cli.server.metrics import Metrics
from strata_cli.server.protocol import ModelFacts
from strata_cli.server.queue import RequestQueue
from strata_cli.server.schemas import Parsed, parse
from strata_cli.server.texts import ModelTexts

S = TypeVar("S", bound=msgspec.Struct)

IGNORED_HEADER = "x-strata-ignored"
MOST_IGNORED = 32


@dataclass(frozen=True, kw_only=True)
class Service:
    """One served model.

    Attributes:
        engine: makes the answers.
        texts: of its model.
        queue: in front of the engine.
        rules: who may ask.
        limits: of a request.
        defaults: of the sampler.
        metrics: what was done so far.
        started: when, in seconds since 1970.
        deciders: of typed decisions.
    """

    engine: EngineProcess
    texts: ModelTexts
    queue: RequestQueue
    rules: AccessRules
    limits: Limits = field(default_factory=Limits)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    metrics: Metrics = field(default_factory=Metrics)
    started: int = field(default_factory=lambda: int(time.time()))
    deciders: Deciders = field(default_factory=Deciders)

    async def facts(self) -> ModelFacts:
        """Of the model; waits until it is loaded.

        Raises:
            StrataError: it cannot be loaded.
        """
        if self.engine.facts is None:
            await self.engine.load()
        assert self.engine.facts is not None
        return self.engine.facts

    async def grounds(self, request: Request) -> Grounds:
        """What a request is asked on."""
        return Grounds(self.texts.tokenizer, await self.facts(), self.defaults, request_id(request))

    async def parse(self, request: Request, kind: type[S]) -> Parsed[S]:
        """The checked body of a request.

        Raises:
            RequestFailed: see body.read_json and schemas.parse.
        """
        return parse(await read_json(request, self.limits, kind), kind)


def service_of(request: Request) -> Service:
    """What the application serves."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def request_id(request: Request) -> str:
    """The name that the entrance gave a request."""
    return str(request.scope["request_id"])


def json_response(
    value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer of JSON."""
    return Response(
        msgspec.json.encode(value),
        status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


def ignored_headers(parsed: Parsed[Any]) -> dict[str, str]:
    """Names the fields of a body that nothing looked at."""
    names = [name if _is_word(name) else "?" for name in parsed.ignored[:MOST_IGNORED]]
    return {IGNORED_HEADER: ", ".join(names)} if names else {}


def _is_word(name: str) -> bool:
    return len(name) <= 64 and name.isascii() and name.replace("_", "").replace(".", "").isalnum()
