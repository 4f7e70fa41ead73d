"""Clients that wait: signs of life, errors before and after the first byte, and clients that go."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata_cli.errors import InputError, OutOfMemory, StrataError
from strata_cli.server.app import create_app
from strata_cli.server.engine_errors import EngineFailed, EngineGone
from strata_cli.server.engine_process import GenerateEvent
from strata_cli.server.limits import Limits
from strata_cli.server.protocol import Generate
from strata_cli.server.queue import RequestQueue
from strata_cli.server.service import Service
from tests.server.asgi import Answer, get, post
from tests.server.fake_engine import FakeEngine, new_app, new_service, tokenizer

WORLD = tokenizer().encode(" world", parse_special=False)
QUICK = Limits(keep_alive_s=0.01)


def complete(app: Any, **fields: Any) -> Answer:
    return asyncio.run(post(app, "/v1/completions", {"prompt": "hello", **fields}))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("the prompt is bad", hint="mend it"), 400),
        (EngineGone("the engine ended"), 503),
        (OutOfMemory("no room"), 503),
        (EngineFailed("it failed"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_fails_before_the_first_byte_has_a_status(
    error: StrataError, status: int, stream: bool
) -> None:
    engine = FakeEngine(WORLD)
    engine.failure = error
    app = new_app(engine)
    answer = complete(app, stream=stream)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert error.message in answer.error["message"]
    engine.failure = None
    assert complete(app, stream=stream).status == 200


def test_what_fails_later_is_an_event_in_front_of_the_end() -> None:
    async def run() -> Answer:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        engine.failure = EngineGone("the engine ended")
        app = new_app(engine, limits=QUICK)

        def fail_when_begun(answer: Answer) -> bool:
            if answer.status and engine.waits is not None:
                engine.waits.set()
            return False

        return await post(
            app,
            "/v1/completions",
            {"prompt": "hello", "stream": True},
            leaves=fail_when_begun,
        )

    answer = asyncio.run(run())
    assert answer.status == 200
    (event,) = answer.events
    assert event["error"]["message"] == "the engine ended"


def test_a_long_silence_has_signs_of_life() -> None:
    async def run() -> Answer:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        app = new_app(engine, limits=QUICK)

        def go_on_after_three(answer: Answer) -> bool:
            if answer.body.count(b": keep-alive\n\n") == 3 and engine.waits is not None:
                engine.waits.set()
            return False

        body = {"prompt": "hello", "stream": True}
        return await post(app, "/v1/completions", body, leaves=go_on_after_three)

    answer = asyncio.run(run())
    assert answer.body.startswith(b": keep-alive\n\n" * 3)
    assert "".join(event["choices"][0]["text"] for event in answer.events) == " world"
    assert answer.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_stops_its_request(path: str, stream: bool) -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        service = new_service(engine)
        app = create_app(service)
        body: dict[str, Any] = {"stream": stream, "prompt": "hello"}
        if "chat" in path:
            body = {"stream": stream, "messages": [{"role": "user", "content": "hello"}]}
        answer = await post(app, path, body, leaves=lambda _: bool(engine.asked))
        assert answer.body == b""
        assert engine.stopped == engine.asked != []
        assert (service.queue.entered, service.queue.running, service.queue.waiting) == (0, 0, 0)
        engine.waits = None
        assert (await post(app, path, body)).status == 200

    asyncio.run(run())


def test_a_client_that_goes_in_the_middle_of_its_stream_stops_it() -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD * 5)
        app = new_app(engine)
        body = {"prompt": "hello", "stream": True, "max_tokens": 30}
        answer = await post(app, "/v1/completions", body, leaves=lambda got: b"w" in got.body)
        assert b"[DONE]" not in answer.body
        assert engine.stopped == engine.asked

    asyncio.run(run())


def test_a_client_that_goes_while_it_waits_in_line_is_never_begun() -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        service: Service = new_service(engine, queue=RequestQueue(1, 5))
        app = create_app(service)
        first = asyncio.create_task(post(app, "/v1/completions", {"prompt": "hello"}))
        while not engine.asked:
            await asyncio.sleep(0)
        gone = await post(
            app, "/v1/completions", {"prompt": "hello"}, leaves=lambda _: service.queue.waiting > 0
        )
        assert gone.body == b""
        engine.waits.set()
        assert (await first).status == 200
        assert len(engine.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_answers_503_with_a_time_to_come_back(stream: bool) -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        app = new_app(engine, queue=RequestQueue(1, 1))
        body = {"prompt": "hello", "stream": stream}
        inside = [asyncio.create_task(post(app, "/v1/completions", body)) for _ in range(2)]
        while not engine.asked:
            await asyncio.sleep(0)
        refused = await post(app, "/v1/completions", body)
        assert (refused.status, refused.error["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        engine.waits.set()
        assert [(await task).status for task in inside] == [200, 200]

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_take_so_long_and_no_longer(stream: bool) -> None:
    async def run() -> None:
        engine = FakeEngine(WORLD)
        engine.waits = asyncio.Event()
        app = new_app(engine, limits=Limits(request_timeout_s=0.05))
        answer = await post(app, "/v1/completions", {"prompt": "hello", "stream": stream})
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["x-should-retry"] == "false"
        assert engine.stopped == engine.asked

    asyncio.run(run())


def test_many_prompts_take_turns_with_others() -> None:
    async def run() -> list[int]:
        engine = FakeEngine([1])
        app = new_app(engine, queue=RequestQueue(1, 5))
        many = {"prompt": [[10], [11], [12], [13], [14]]}
        tasks = [
            asyncio.create_task(post(app, "/v1/completions", many)),
            asyncio.create_task(post(app, "/v1/completions", {"prompt": [20]})),
        ]
        assert [(await task).status for task in tasks] == [200, 200]
        return [job.prompt[0] for job in engine.asked]

    order = asyncio.run(run())
    assert order.index(20) < 3
    assert [item for item in order if item < 20] == [10, 11, 12, 13, 14]


def test_a_bug_is_told_as_such_and_leaves_its_trace_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(FakeEngine):
        def _events(self, request: Generate) -> list[GenerateEvent]:
            raise ZeroDivisionError(f"a secret of the code: {request.prompt}")

    app = new_app(Broken())
    answer = complete(app, stream=True)
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert "secret" not in answer.error["message"]
    assert any(record.exc_info for record in caplog.records)
    with pytest.raises(ZeroDivisionError):
        complete(app)
    assert get(app, "/health").status == 200
