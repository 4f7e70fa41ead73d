"""Connections of the HTTP server: how many there may be, and how long one may do nothing.

uvicorn bounds neither: a client that opens connections and sends nothing, or half a head, or takes
nothing of its answer, would hold descriptors and memory for ever.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from strata_cli.server.failures import INVALID, OVERLOADED, Failure

HEAD_TIMEOUT_S = 20.0
TAKE_TIMEOUT_S = 120.0
FULL = Failure(
    status=503,
    kind=OVERLOADED,
    message="too many connections are open; try again later",
    code="too_many_connections",
    headers={"retry-after": "1"},
)


def connections_of(most: int) -> type[H11Protocol]:
    """The class of connections of a server that takes no more than so many."""
    return type("Connection", (BoundedConnection,), {"most": most})


class BoundedConnection(H11Protocol):
    """One connection. What is no HTTP gets an error in our form, too.

    Attributes:
        most: of them at once.
    """

    most = 0
    _waiting: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Take it, or answer 503 and close."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.write(_whole_answer(FULL))
            transport.close()
            return
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        self._unstick()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None and self.timeout_keep_alive_task is None:
            # Whatever comes behind an answer ends uvicorn's own bound of an idle connection.
            self._wait_for_head()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close."""
        self.transport.write(_whole_answer(Failure(status=400, kind=INVALID, message=msg)))
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not take what is sent; it has some time left to do so."""
        super().pause_writing()
        self._unstick()
        self._stuck = self.loop.call_later(TAKE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The client takes it."""
        self._unstick()
        super().resume_writing()

    def _unstick(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _whole_answer(failure: Failure) -> bytes:
    body = failure.body()
    head = [
        f"HTTP/1.1 {failure.status} {HTTPStatus(failure.status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in failure.headers.items()),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
