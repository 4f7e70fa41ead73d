"""The application: its routes, and how errors become answers."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from strata_cli.errors import StrataError
from strata_cli.server import control
from strata_cli.server.anyjev_decide import decide
from strata_cli.server.chat import chat_completions
from strata_cli.server.completions import completions
from strata_cli.server.entrance import Entrance
from strata_cli.server.failures import (
    INTERNAL,
    INVALID,
    SYSTEM_ONE_PATH,
    Failure,
    RequestFailed,
    failure_of,
)
from strata_cli.server.openai_decisions import decisions
from strata_cli.server.openapi import openapi
from strata_cli.server.service import Service
from strata_cli.server.streaming import ClientGone
from strata_cli.server.systemone import systemone
from strata_cli.server.tokens import detokenize, tokenize, tokenizer_info

logger = logging.getLogger(__name__)

GONE_STATUS = 499
"""Stands in the log and the metrics for a client that did not wait for its answer."""

ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route(SYSTEM_ONE_PATH, systemone, methods=["POST"]),
    Route("/v1/decisions", decisions, methods=["POST"]),
    Route("/v1/decide", decide, methods=["POST"]),
    Route("/v1/models", control.models, methods=["GET"]),
    Route("/v1/models/{name:path}", control.model, methods=["GET"]),
    Route("/v1/load", control.load, methods=["POST"]),
    Route("/v1/unload", control.unload, methods=["POST"]),
    Route("/v1/status", control.status, methods=["GET"]),
    Route("/models", control.models, methods=["GET"]),
    Route("/status", control.status, methods=["GET"]),
    Route("/metrics", control.metrics, methods=["GET"]),
    Route("/health", control.health, methods=["GET"]),
    Route("/api/health", control.health, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
)
_PATHS = frozenset(route.path for route in ROUTES)


def create_app(service: Service) -> ASGIApp:
    """The application that serves a model."""

    def observe(path: str, status: int | None, seconds: float) -> None:
        route = path if path in _PATHS else "other"
        service.metrics.observe(route, status or GONE_STATUS, seconds)

    app = Starlette(
        routes=list(ROUTES),
        exception_handlers={
            RequestFailed: _request_failed,
            StrataError: _strata_error,
            ClientGone: _client_gone,
            ClientDisconnect: _client_gone,
            HTTPException: _http_exception,
            Exception: _bug,
        },
    )
    app.state.service = service
    return Entrance(app, service.rules, observe)


def answer_of(failure: Failure) -> Response:
    """An error answer."""
    return Response(
        failure.body(),
        failure.status,
        headers=dict(failure.headers),
        media_type="application/json",
    )


def _request_failed(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestFailed)
    return answer_of(error.failure)


def _strata_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StrataError)
    failure = failure_of(error)
    if failure.status >= 500:
        logger.error("%s", error)
    return answer_of(failure)


def _client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=GONE_STATUS)


def _http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return answer_of(control.NO_ROUTE)
    return answer_of(
        Failure(
            status=error.status_code,
            kind=INVALID,
            message=f"{error.detail}; /openapi.json lists routes and methods",
            headers=error.headers or {},
        )
    )


def _bug(_request: Request, _error: Exception) -> Response:
    return answer_of(INTERNAL)
