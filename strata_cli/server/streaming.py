"""Answers that a client waits for: as one body or as server-sent events; none outlives its client.

Source of the format: the HTML standard's event streams; ``data: [DONE]`` ends one, as at OpenAI.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from strata_cli.errors import StrataError
from strata_cli.server.failures import (
    INTERNAL,
    NO_RETRY,
    TIMEOUT,
    Failure,
    RequestFailed,
    failure_of,
)
from strata_cli.server.limits import Limits

logger = logging.getLogger(__name__)

T = TypeVar("T")

COMMENT = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):  # noqa: N818 - says what happened
    """The client went away; nobody waits for an answer."""


def event(value: object) -> bytes:
    """One event of a stream."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def until_gone(request: Request, work: Coroutine[Any, Any, T], limits: Limits) -> T:
    """What the work returns; it is cancelled when the client goes away or time is up.

    Raises:
        ClientGone: the client went away.
        RequestFailed: 408, the time is up; or what the work raises.
    """
    task = asyncio.ensure_future(_within(work, limits.request_timeout_s))
    watcher = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, watcher)


class EventStream(Response):
    """Events as they are made.

    What fails before the first event is an ordinary error answer, unless the first sign of life was
    sent by then; what fails later is an event of its own. Signs of life are comments.

    Args:
        events: makes them; closed when the client goes away.
        limits: of time.
        headers: sent besides those of a stream.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], limits: Limits, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._limits = limits
        self._stream_headers = {**STREAM_HEADERS, **headers}
        self._ready: asyncio.Queue[bytes | Failure | None] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Send them until they end or the client goes away."""
        maker = asyncio.ensure_future(self._make())
        writer = asyncio.ensure_future(self._write(send))
        watcher = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
            else:
                logger.info("the client left its stream")
        finally:
            await _end(maker, writer, watcher)
            await self._events.aclose()

    async def _make(self) -> None:
        """Fill the queue, so that a slow reader does not hold up the engine."""
        try:
            await _within(self._fill(), self._limits.request_timeout_s)
        except RequestFailed as error:
            self._ready.put_nowait(error.failure)
        except StrataError as error:
            self._ready.put_nowait(failure_of(error))
        except Exception:
            logger.exception("a stream failed")
            self._ready.put_nowait(INTERNAL)
        self._ready.put_nowait(None)

    async def _fill(self) -> None:
        async for data in self._events:
            self._ready.put_nowait(data)

    async def _write(self, send: Send) -> None:
        is_begun = False
        async for item in self._with_signs_of_life():
            if isinstance(item, Failure) and not is_begun:
                await _send_failure(send, item)
                return
            if not is_begun:
                await self._begin(send)
                is_begun = True
            data = item if isinstance(item, bytes) else _error_event(item)
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": DONE})

    async def _with_signs_of_life(self) -> AsyncIterator[bytes | Failure]:
        while True:
            try:
                async with asyncio.timeout(self._limits.keep_alive_s):
                    item = await self._ready.get()
            except TimeoutError:
                item = COMMENT
            if item is None:
                return
            yield item

    async def _begin(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._stream_headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _within(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s or None) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise RequestFailed(
            Failure(
                status=408,
                kind=TIMEOUT,
                message=(
                    f"the answer took longer than the {timeout_s:g} s that a request may take; "
                    "try: a lower max_tokens, or raise request_timeout_s"
                ),
                code="request_timeout",
                headers=NO_RETRY,
            )
        ) from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _send_failure(send: Send, failure: Failure) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in failure.headers.items()]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": failure.body()})


def _error_event(failure: Failure) -> bytes:
    return b"data: " + failure.body() + b"\n\n"
