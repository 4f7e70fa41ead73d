"""A client that calls an ASGI application directly, and may go away whenever a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from starlette.types import ASGIApp, Message

JSON = {"content-type": "application/json"}
Leaves = Callable[["Answer"], bool]


@dataclass
class Answer:
    """What came back so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The values of a stream's events; its end must be there."""
        blocks = [block for block in self.body.split(b"\n\n") if block.startswith(b"data: ")]
        values = [block.removeprefix(b"data: ") for block in blocks]
        assert values[-1] == b"[DONE]"
        return [orjson.loads(value) for value in values[:-1]]


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    body: bytes | list[bytes] = b"",
    *,
    headers: Mapping[str, str] | None = None,
    leaves: Leaves | None = None,
    hangs: bool = False,
) -> Answer:
    """One request.

    Args:
        app: answers it.
        method: of it.
        path: without a query.
        body: whole or in pieces.
        headers: in lower case.
        leaves: asked again and again whether the client goes away.
        hangs: the body's end never arrives.
    """
    answer = Answer()
    gone = asyncio.Event()
    pieces = [body] if isinstance(body, bytes) else list(body)

    async def receive() -> Message:
        if pieces:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces) or hangs}
        while leaves is not None and not gone.is_set():
            if leaves(answer):
                gone.set()
            await asyncio.sleep(0)
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            for name, value in message["headers"]:
                answer.headers[name.decode()] = value.decode()
        else:
            answer.body += message["body"]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
    }
    await app(scope, receive, send)
    return answer


async def post(app: ASGIApp, path: str, value: object, **more: Any) -> Answer:
    """One request with a JSON body."""
    headers = {**JSON, **more.pop("headers", {})}
    return await call(app, "POST", path, orjson.dumps(value), headers=headers, **more)


def ask(app: ASGIApp, path: str, **fields: Any) -> Answer:
    """One POST in an event loop of its own."""
    return asyncio.run(post(app, path, fields))


def get(app: ASGIApp, path: str, **headers: str) -> Answer:
    """One GET in an event loop of its own."""
    return asyncio.run(call(app, "GET", path, headers=headers))
