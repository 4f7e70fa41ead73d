"""The outermost layer of the application: access rules, CORS, request ids and the access log."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from strata_cli.server.access import AccessRules, is_cors_origin, refusal
from strata_cli.server.failures import SYSTEM_ONE_PATH, Failure, for_system_one

logger = logging.getLogger(__name__)

MOST_NAMED_REFUSALS = 64
CORS_METHODS = "GET, POST, OPTIONS"
CORS_HEADERS = "authorization, content-type, x-api-key"
CORS_MAX_AGE_S = 600

Pair = tuple[bytes, bytes]


class Entrance:
    """ASGI middleware that lets requests in.

    Logs one line for each request, at INFO: method, path, status and time; no query, no header, no
    text of a prompt.

    Args:
        app: what is behind it.
        rules: who may ask.
        observe: told path, status and seconds of each request; None stands for a client that went
            away before its answer began.
    """

    def __init__(
        self,
        app: ASGIApp,
        rules: AccessRules,
        observe: Callable[[str, int | None, float], None],
    ) -> None:
        self._app = app
        self._rules = rules
        self._observe = observe
        self._named: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or hand it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = uuid.uuid4().hex
        scope["request_id"] = request_id
        extra = [(b"x-request-id", request_id.encode()), *self._cors(scope["path"], headers)]
        outgoing = _Outgoing(send, extra)
        started = time.perf_counter()
        try:
            await self._answer(scope, headers, receive, outgoing)
        finally:
            seconds = time.perf_counter() - started
            self._observe(scope["path"], outgoing.status, seconds)
            shown = outgoing.status or "no answer"
            path = _printable(scope["path"])
            logger.info("%s %s: %s in %.1f ms", scope["method"], path, shown, seconds * 1e3)

    async def _answer(
        self, scope: Scope, headers: Headers, receive: Receive, outgoing: _Outgoing
    ) -> None:
        if self._is_preflight(scope, headers):
            await outgoing.respond(204, b"", _preflight_headers())
            return
        failure = refusal(self._rules, scope["method"], scope["path"], _plain(headers))
        if failure is None:
            await self._app(scope, receive, outgoing)
            return
        self._tell_once(failure)
        is_system_one = scope["path"] == SYSTEM_ONE_PATH
        await outgoing.fail(for_system_one(failure) if is_system_one else failure)

    def _cors(self, path: str, headers: Headers) -> list[Pair]:
        origin = headers.get("origin", "")
        if not path.startswith("/v1/") or not is_cors_origin(self._rules, origin) or not origin:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, x-strata-ignored"),
            (b"vary", b"origin"),
        ]

    def _is_preflight(self, scope: Scope, headers: Headers) -> bool:
        return (
            scope["method"] == "OPTIONS"
            and "access-control-request-method" in headers
            and bool(self._cors(scope["path"], headers))
        )

    def _tell_once(self, failure: Failure) -> None:
        """One line for each name that is refused, lest somebody fill the log."""
        if failure.status != 403 or failure.message in self._named:
            return
        if len(self._named) < MOST_NAMED_REFUSALS:
            self._named.add(failure.message)
            logger.warning("%s", failure.message)


class _Outgoing:
    """The way back to the client; adds headers and remembers the status."""

    def __init__(self, send: Send, extra: Iterable[Pair]) -> None:
        self._send = send
        self._extra = list(extra)
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message.get("headers", []), *self._extra]}
        await self._send(message)

    async def respond(self, status: int, body: bytes, headers: Iterable[Pair]) -> None:
        """Send a whole answer."""
        length = (b"content-length", str(len(body)).encode())
        await self({"type": "http.response.start", "status": status, "headers": [*headers, length]})
        await self({"type": "http.response.body", "body": body})

    async def fail(self, failure: Failure) -> None:
        """Send an error answer."""
        headers = [(b"content-type", b"application/json")]
        headers += [(name.encode(), value.encode()) for name, value in failure.headers.items()]
        await self.respond(failure.status, failure.body(), headers)


def _preflight_headers() -> list[Pair]:
    return [
        (b"access-control-allow-methods", CORS_METHODS.encode()),
        (b"access-control-allow-headers", CORS_HEADERS.encode()),
        (b"access-control-max-age", str(CORS_MAX_AGE_S).encode()),
    ]


def _plain(headers: Headers) -> dict[str, str]:
    return dict(headers.items())


def _printable(path: str) -> str:
    shown = path if path.isprintable() else repr(path)
    return shown if len(shown) <= 100 else f"{shown[:100]}…"
