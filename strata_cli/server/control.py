"""What the server says about itself, and loading and unloading the model."""

from __future__ import annotations

import contextlib
import time
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from strata_cli import __version__
from strata_cli.errors import StrataError
from strata_cli.server.failures import (
    INVALID,
    NOT_FOUND,
    OVERLOADED,
    Failure,
    RequestFailed,
)
from strata_cli.server.metrics import CONTENT_TYPE
from strata_cli.server.protocol import Status
from strata_cli.server.schemas import LoadRequest, UnloadRequest
from strata_cli.server.service import Service, json_response, service_of

U = TypeVar("U", bound=UnloadRequest)

HEALTHY = frozenset({"ready", "stopped"})
"""Stopped counts as healthy: the model was unloaded on purpose, and the next request loads it."""


DECISION_ALIAS = "jev-latest"
"""What System One's clients ask for unless they are told otherwise."""


async def health(request: Request) -> Response:
    """Whether a request would be answered now: 200, else 503."""
    service = service_of(request)
    state, facts = service.engine.state, service.engine.facts
    body = {
        "status": "ok" if state in HEALTHY else "loading" if state == "starting" else "error",
        "engine": state,
        "loaded": state == "ready",
        "model": service.texts.name,
        "max_context": None if facts is None else facts.context_tokens,
        "images": False,
        "api_key": service.rules.api_key is not None,
        "service": f"strata {__version__}",
    }
    return json_response(body, status=200 if state in HEALTHY else 503)


async def status(request: Request) -> Response:
    """What the server is doing, and what requests get that do not say otherwise."""
    service = service_of(request)
    engine, queue = service.engine, service.queue
    loading = engine.loading
    worker = await _engine_status(service)
    return json_response(
        {
            "version": __version__,
            "model": service.texts.name,
            "uptime_s": int(time.time()) - service.started,
            "engine": {
                "state": engine.state,
                "starts": engine.starts,
                "loading": None if loading is None else msgspec.to_builtins(loading),
                "facts": None if engine.facts is None else msgspec.to_builtins(engine.facts),
                "now": None if worker is None else msgspec.to_builtins(worker),
            },
            "queue": {
                "inside": queue.entered,
                "waiting": queue.waiting,
                "running": queue.running,
                "turns": queue.turns,
                "parallel": queue.parallel,
                "most_waiting": queue.most_waiting,
                "refused": queue.refused,
            },
            "sampling": msgspec.to_builtins(service.defaults),
            "limits": msgspec.to_builtins(service.limits),
        }
    )


async def metrics(request: Request) -> Response:
    """Counters in the text format of Prometheus."""
    service = service_of(request)
    worker = await _engine_status(service)
    page = service.metrics.page(service.queue, worker, service.engine.starts)
    return Response(page, headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    """The served model, as the lists of OpenAI and of System One in one. Loads nothing."""
    service = service_of(request)
    since = time.strftime("%Y-%m-%d", time.gmtime(service.started))
    described = {
        service.texts.name: "The served model.",
        DECISION_ALIAS: f"Another name of {service.texts.name}, for typed decisions.",
    }
    names = [
        {"name": name, "description": text, "release_date": since}
        for name, text in described.items()
    ]
    return json_response({"object": "list", "data": [_card(service)], "models": names})


async def model(request: Request) -> Response:
    """One model by its name."""
    service = service_of(request)
    if request.path_params["name"] != DECISION_ALIAS:
        _check_name(service, request.path_params["name"])
    return json_response(_card(service))


async def load(request: Request) -> Response:
    """Load the model, and wait until it is there; anew, where others are to have more memory."""
    service, body = await _controlled(request, LoadRequest)
    if body.vram_reserve_mib is None:
        await service.engine.load()
    else:
        await service.engine.reserve(body.vram_reserve_mib)
    return json_response({"model": service.texts.name, "loaded": True})


async def unload(request: Request) -> Response:
    """Give the model's memory back; the next request loads it again."""
    service, _ = await _controlled(request, UnloadRequest)
    await service.engine.unload()
    return json_response({"model": service.texts.name, "loaded": False})


async def _controlled(request: Request, kind: type[U]) -> tuple[Service, U]:
    """The service, if nobody is using it, and what is wanted of it.

    Raises:
        RequestFailed: 404, another model is meant; 409, requests are being answered.
    """
    service = service_of(request)
    parsed = await service.parse(request, kind)
    if parsed.request.model is not None:
        _check_name(service, parsed.request.model)
    if service.queue.entered:
        raise RequestFailed(
            Failure(
                status=409,
                kind=OVERLOADED,
                message=f"{service.queue.entered} requests are being answered; try again later",
                code="model_busy",
            )
        )
    return service, parsed.request


def _check_name(service: Service, name: str) -> None:
    if name != service.texts.name:
        raise RequestFailed(
            Failure(
                status=404,
                kind=INVALID,
                message=f"there is no such model here; this server has {service.texts.name}",
                param="model",
                code="model_not_found",
            )
        )


def _card(service: Service) -> dict[str, object]:
    facts = service.engine.facts
    return {
        "id": service.texts.name,
        "object": "model",
        "created": service.started,
        "owned_by": "strata",
        "max_model_len": None if facts is None else facts.context_tokens,
        "loaded": service.engine.state == "ready",
    }


async def _engine_status(service: Service) -> Status | None:
    """What the engine does; None while it is not there."""
    with contextlib.suppress(StrataError):
        return await service.engine.status()
    return None


NO_ROUTE = Failure(
    status=404, kind=NOT_FOUND, message="there is no such route; /openapi.json lists them"
)
