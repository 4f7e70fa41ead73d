"""The document that describes the routes: made from the classes that bodies are checked with."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from strata_cli import __version__
from strata_cli.server import anyjev_decide, openai_decisions, replies, schemas, systemone
from strata_cli.server.access import PUBLIC_PATHS
from strata_cli.server.service import json_response

REF = "#/components/schemas/{name}"
JSON = "application/json"
ERRORS = {
    "400": "The request cannot be served as it is.",
    "401": "The key is missing or wrong.",
    "403": "Host or Origin is not allowed.",
    "408": "The body or the answer took too long.",
    "413": "The body is too large.",
    "415": "The body is not declared as JSON.",
    "500": "The run failed.",
    "503": "Too many requests wait, or the engine is not there; see Retry-After.",
}


class ErrorBody(Struct, frozen=True):
    """What failed."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Struct, frozen=True):
    """Body of every answer that is an error."""

    error: ErrorBody


class Detail(Struct, frozen=True):
    """What is wrong in a body, and where."""

    loc: list[str]
    msg: str
    type: str


class ErrorKind(Struct, frozen=True):
    """What failed."""

    error_type: str
    message: str


class SystemOneError(Struct, frozen=True):
    """Body of an error of /v1/systemone."""

    error: ErrorBody
    detail: list[Detail] | ErrorKind


class TextError(Struct, frozen=True):
    """Body of an error of /v1/decide, unless the route is not reached."""

    error: str | ErrorBody


class Tokens(Struct, frozen=True):
    """Answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class Text(Struct, frozen=True):
    """Answer of /detokenize."""

    prompt: str


class Loaded(Struct, frozen=True):
    """Answer of /v1/load and /v1/unload."""

    model: str
    loaded: bool


class _Post(NamedTuple):
    summary: str
    body: type[Struct]
    answer: type[Struct]
    chunk: type[Struct] | None = None
    errors: tuple[str, ...] = ()
    another: type[Struct] | None = None
    failure: type[Struct] = ErrorAnswer


_CHAT = _Post("Answer a conversation.", schemas.ChatRequest, replies.Chat, replies.ChatChunk)
_COMPLETION = _Post(
    "Complete prompts.", schemas.CompletionRequest, replies.Completion, replies.Completion
)
_POSTS = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": _COMPLETION,
    "/v1/systemone": _Post(
        "Answer questions about a state, as System One.",
        systemone.SystemOneRequest,
        systemone.SystemOneAnswer,
        errors=("422",),
        failure=SystemOneError,
    ),
    "/v1/decisions": _Post(
        "Answer questions about an input, as OpenAI's Decisions.",
        openai_decisions.DecisionsRequest,
        openai_decisions.DecisionsAnswer,
    ),
    "/v1/decide": _Post(
        "Answer a question about a state, or a list of them, as AnyJev's gateway.",
        anyjev_decide.DecideRequest,
        anyjev_decide.DecideAnswer,
        another=anyjev_decide.DecideAnswers,
        failure=TextError,
    ),
    "/tokenize": _Post("Token ids of a text or a chat.", schemas.TokenizeRequest, Tokens),
    "/detokenize": _Post("Text of token ids.", schemas.DetokenizeRequest, Text),
    "/v1/load": _Post(
        "Load the model, perhaps into less memory.",
        schemas.LoadRequest,
        Loaded,
        errors=("404", "409"),
    ),
    "/v1/unload": _Post(
        "Give the model's memory back.", schemas.UnloadRequest, Loaded, errors=("404", "409")
    ),
}
_GETS = {
    "/v1/models": "The served model.",
    "/health": "Whether a request would be answered now.",
    "/status": "What the server is doing.",
    "/metrics": "Counters for Prometheus.",
    "/tokenizer_info": "Special tokens and the chat template.",
    "/openapi.json": "This document.",
}


async def openapi(_request: Request) -> Response:
    """The document."""
    return json_response(document())


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document, as JSON values."""
    paths: dict[str, Any] = {path: {"get": _get(path, text)} for path, text in _GETS.items()}
    paths |= {path: {"post": _post(route)} for path, route in _POSTS.items()}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "strata",
            "version": __version__,
            "description": (
                "An OpenAI-compatible server. Log-probabilities are those of the whole "
                "vocabulary, before temperature, penalties and masks."
            ),
        },
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": _KEYS},
        "security": [{}, {"bearer": []}, {"header": []}],
    }


_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _schemas() -> dict[str, Any]:
    kinds: list[type[Struct]] = [ErrorAnswer]
    for route in _POSTS.values():
        more = [kind for kind in (route.chunk, route.another) if kind is not None]
        kinds += [route.body, route.answer, route.failure, *more]
    _, components = msgspec.json.schema_components(dict.fromkeys(kinds), ref_template=REF)
    return components


def _get(path: str, summary: str) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain" if path == "/metrics" else JSON: {}}
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if path == "/health":
        answers["503"] = {"description": "It would not.", "content": {JSON: {}}}
    if path in PUBLIC_PATHS:
        return {"summary": summary, "security": [], "responses": answers | _errors("403")}
    return {"summary": summary, "responses": answers | _errors("401", "403")}


def _post(route: _Post) -> dict[str, Any]:
    schema: dict[str, Any] = _ref(route.answer)
    if route.another is not None:
        schema = {"anyOf": [schema, _ref(route.another)]}
    content: dict[str, Any] = {JSON: {"schema": schema}}
    if route.chunk is not None:
        content["text/event-stream"] = {}
    return {
        "summary": route.summary,
        "requestBody": {
            "required": bool(schemas.needed_fields(route.body)),
            "content": {JSON: {"schema": _ref(route.body)}},
        },
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **_errors(*ERRORS, *route.errors, kind=route.failure),
        },
    }


def _errors(*codes: str, kind: type[Struct] = ErrorAnswer) -> dict[str, Any]:
    content = {JSON: {"schema": _ref(kind)}}
    return {
        code: {"description": ERRORS.get(code, "Not now, or not here."), "content": content}
        for code in sorted(codes)
    }


def _ref(kind: type[Struct]) -> dict[str, str]:
    return {"$ref": REF.format(name=kind.__name__)}
