"""Connections: how many, how long they may be silent, and clients that speak no HTTP."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest

from strata_cli.server import connections, serving
from strata_cli.server.listening import listen
from tests.server.fake_engine import FakeEngine, new_service

BODY = orjson.dumps({"prompt": "hello"})
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


CONNECTIONS: set[Any] = set()
"""Those of the server that runs."""


@asynccontextmanager
async def server(engine: FakeEngine) -> AsyncIterator[int]:
    """A real server of a made-up engine; its port."""
    running = serving.new_server(new_service(engine))
    running.server_state.connections = CONNECTIONS
    CONNECTIONS.clear()
    (opened,) = listen("127.0.0.1", 0)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # what is sent must be taken soon
    task = asyncio.create_task(running.serve([opened]))
    await running.listens.wait()
    try:
        yield opened.getsockname()[1]
    finally:
        running.stop()
        await task
        opened.close()


async def talk(port: int, data: bytes, *, ends: bool = False) -> bytes:
    """All that comes back until the server closes; ends closes our side at once."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    if ends:
        writer.close()
    received = b"" if ends else await reader.read()
    writer.close()
    return received


def status(received: bytes) -> int:
    return int(received.split(b" ")[1])


async def answers(port: int) -> bool:
    closing = WHOLE.replace(b"host:", b"connection: close\r\nhost:")
    return status(await talk(port, closing)) == 200


@pytest.mark.parametrize("start", [b"", b"POST /v1/compl", HEAD])
def test_a_connection_that_says_nothing_whole_is_closed(
    monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.05)

    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            assert await talk(port, start) == b""
            assert await answers(port)

    asyncio.run(run())


UNSENT = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "rest"), [(WHOLE, b"POST /v1/compl"), (UNSENT, b"x"), (UNSENT, b"x" * 9)]
)
def test_what_comes_behind_an_answer_holds_no_connection(
    monkeypatch: pytest.MonkeyPatch, request_: bytes, rest: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.05)

    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            assert length
            await reader.readexactly(int(length[1]))
            writer.write(rest)
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()
            assert await answers(port)

    asyncio.run(run())


def test_more_connections_than_allowed_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_most_connections", lambda: 2)

    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            received = await talk(port, b"")
            assert status(received) == 503
            body = orjson.loads(received.rpartition(b"\r\n\r\n")[2])
            assert body["error"]["code"] == "too_many_connections"
            for _, writer in idle:
                writer.close()
                await writer.wait_closed()
            while not await answers(port):
                pass

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"\r\n",
        b"nonsense\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n",
        HEAD + b"x: " + b"a" * 100_000,
    ],
)
def test_what_is_no_http_is_a_bad_request(data: bytes) -> None:
    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            received = await talk(port, data)
            assert status(received) == 400
            head, _, body = received.partition(b"\r\n\r\n")
            assert b"content-type: application/json" in head
            assert orjson.loads(body)["error"]["type"] == "invalid_request_error"
            assert await answers(port)

    asyncio.run(run())


def test_a_body_that_is_too_large_is_answered_before_it_came() -> None:
    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            received = await talk(port, HEAD + b"content-length: 1073741824\r\n\r\n" + b"x" * 1000)
            assert status(received) == 413
            assert await answers(port)

    asyncio.run(run())


def test_clients_that_leave_in_the_middle_of_anything_do_no_harm() -> None:
    async def run() -> None:
        engine = FakeEngine([1])
        async with server(engine) as port:
            for size in (0, 10, len(HEAD), len(WHOLE) - 5, len(WHOLE)):
                await talk(port, WHOLE[:size], ends=True)
            assert await answers(port)
            many = await asyncio.gather(*(answers(port) for _ in range(4)))
            assert all(many)

    asyncio.run(run())


def test_a_client_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TAKE_TIMEOUT_S", 0.05)
    fields = {"prompt": "hello", "n": 64, "logprobs": 100, "max_tokens": 16}
    body = orjson.dumps(fields)
    request = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body

    async def run() -> None:
        async with server(FakeEngine([1] * 16)) as port:
            loop = asyncio.get_running_loop()
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.setblocking(False)
                await loop.sock_connect(slow, ("127.0.0.1", port))
                await loop.sock_sendall(slow, request)
                assert status(await loop.sock_recv(slow, 100)) == 200
                assert await answers(port)
                while CONNECTIONS:  # nobody reads on
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_requests_may_follow_each_other_on_one_connection() -> None:
    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            closing = WHOLE.replace(b"host:", b"connection: close\r\nhost:")
            received = await talk(port, WHOLE + WHOLE + closing)
            assert received.count(b"HTTP/1.1 200 OK") == 3

    asyncio.run(run())


def test_answers_are_sent_without_waiting_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[int] = []

    class Watched(connections.BoundedConnection):
        most = 9

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            accepted = transport.get_extra_info("socket")
            delays.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(serving, "connections_of", lambda _most: Watched)

    async def run() -> None:
        async with server(FakeEngine([1])) as port:
            assert await answers(port)

    asyncio.run(run())
    assert delays
    assert all(delays)
