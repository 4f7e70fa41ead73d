"""The server's side of the engine: what it does when a worker dies, hangs or talks nonsense."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing

import pytest

from strata_cli.config import StrataConfig
from strata_cli.errors import ConfigError, InputError, OutOfMemory, StrataError
from strata_cli.server.engine_errors import EngineGone
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.failures import failure_of
from strata_cli.server.protocol import Generate, ProtocolError, Started
from tests.server.asking import answer, ask, fake, with_engine

REQUEST = Generate(prompt=(5,), max_tokens=1)


def test_a_request_starts_the_worker_that_it_needs() -> None:
    async def body(engine: EngineProcess) -> None:
        assert (engine.state, engine.facts) == ("stopped", None)
        results = await asyncio.gather(*(answer(engine, REQUEST) for _ in range(3)))
        assert [tokens for tokens, _ in results] == [[5]] * 3
        assert engine.facts is not None
        assert (engine.state, engine.starts, engine.running) == ("ready", 1, 0)

    with_engine(fake("works"), body)


@pytest.mark.parametrize(
    ("mode", "cls", "text"),
    [
        ("refuses", OutOfMemory, "does not fit on cuda:0: need 9 GiB"),
        ("dies first", EngineGone, "ended with exit code 3 before its model was loaded"),
        ("is another version", ProtocolError, "version 1"),
    ],
)
def test_a_worker_that_cannot_start_says_why(mode: str, cls: type[StrataError], text: str) -> None:
    async def body(engine: EngineProcess) -> None:
        for _ in range(2):
            with pytest.raises(cls, match=text):
                await ask(engine, REQUEST)
            assert engine.state == "dead"

    with_engine(fake(mode), body)


def test_a_wrong_setting_is_no_fault_of_a_request() -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(ConfigError, match=r"^--max-context 9 is too much"):
            await engine.start()
        for work in (ask(engine, REQUEST), engine.load()):
            with pytest.raises(EngineGone, match="cannot be loaded: --max-context 9") as caught:
                await work
            assert failure_of(caught.value).status == 503
            assert caught.value.hint == "at most 8"

    with_engine(fake("is set wrong"), body)


def test_a_command_that_is_not_there() -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(EngineGone, match="cannot start"):
            await engine.start()

    with_engine(EngineProcess(StrataConfig(), command=["/no/such/program"]), body)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("is killed", "was ended by SIGKILL while it was in use"),
        ("babbles", "no message of this protocol"),
        ("gives up", "cuda:0 fell off the bus"),
        ("hangs", "got nothing done for 0.2 s"),
    ],
)
def test_a_worker_that_is_lost_fails_its_requests_and_is_replaced(mode: str, text: str) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    async def body(engine: EngineProcess) -> None:
        for starts in (1, 2):
            engine._silence.limit_s = 300
            await engine.start()
            engine._silence.limit_s = 0.2 if mode == "hangs" else 300
            results = await asyncio.gather(
                *(ask(engine, REQUEST) for _ in range(3)), return_exceptions=True
            )
            assert all(isinstance(result, EngineGone) for result in results), results
            assert text in str(results[0])
            assert (engine.state, engine.starts, engine.running) == ("dead", starts, 0)

    with_engine(fake(mode), body)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_worker_that_never_loads_is_given_up() -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(EngineGone, match="got nothing done"):
            await engine.start()

    with_engine(fake("says nothing", silence_s=0.3), body)


def test_an_error_of_a_request_keeps_its_class() -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(InputError, match="bad"):
            await ask(engine, REQUEST)
        assert engine.state == "ready"

    with_engine(fake("fails"), body)


def test_leaving_a_request_stops_it_and_drops_what_comes_late() -> None:
    async def body(engine: EngineProcess) -> None:
        async with aclosing(engine.generate(REQUEST)) as events:
            assert isinstance(await anext(events), Started)
        assert engine.running == 0
        tokens, _ = await answer(engine, REQUEST)
        assert tokens == [99]  # the worker knows that one was stopped

    with_engine(fake("waits for stop"), body)


def test_a_task_that_is_cancelled_stops_its_request() -> None:
    async def body(engine: EngineProcess) -> None:
        await engine.start()
        started = asyncio.Event()

        async def ask_and_tell() -> None:
            async with aclosing(engine.generate(REQUEST)) as events:
                async for _ in events:
                    started.set()

        task = asyncio.create_task(ask_and_tell())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await answer(engine, REQUEST))[0] == [99]

    with_engine(fake("waits for stop"), body)


def test_unloading_ends_the_worker_and_the_next_request_starts_another() -> None:
    async def body(engine: EngineProcess) -> None:
        for starts in (1, 2):
            events = engine.generate(REQUEST)
            await anext(events)
            assert engine.starts == starts
            await engine.unload()
            assert engine.state == "stopped"
            with pytest.raises(EngineGone, match="unloaded"):
                await anext(events)
        assert await engine.status() is None

    with_engine(fake("waits for stop"), body)


def test_a_start_outlives_the_request_that_began_it() -> None:
    async def body(engine: EngineProcess) -> None:
        first = asyncio.create_task(ask(engine, REQUEST))
        await asyncio.sleep(0)
        assert engine.state in ("stopped", "starting")
        first.cancel()
        await ask(engine, REQUEST)
        assert engine.starts == 1

    with_engine(fake("works"), body)


def test_memory_is_left_to_others_by_loading_anew() -> None:
    async def body(engine: EngineProcess) -> None:
        await engine.start()
        assert engine.facts is not None
        assert engine.facts.placement == "700 MiB are left"
        reserving = asyncio.create_task(engine.reserve(9000))
        while engine.state == "ready":
            await asyncio.sleep(0)
        await ask(engine, REQUEST)  # comes while the engine is away
        await reserving
        assert (engine.facts.placement, engine.starts) == ("9000 MiB are left", 2)
        with pytest.raises(OutOfMemory, match="too little"):
            await engine.reserve(9001)
        await ask(engine, REQUEST)
        assert (engine.facts.placement, engine.starts) == ("9000 MiB are left", 3)

    with_engine(fake("is on a GPU"), body)


@pytest.mark.parametrize("mode", ["works", "is on a GPU"])
def test_a_reserve_that_would_change_nothing_is_refused(mode: str) -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(InputError, match="vram_reserve_mib 5 would change nothing"):
            await engine.reserve(5)
        assert (engine.state, engine.starts) == ("ready", 1)

    engine = fake(mode)
    if mode == "is on a GPU":
        engine._config = StrataConfig(vram_bytes=1 << 30)
    with_engine(engine, body)


def test_nothing_starts_after_the_end() -> None:
    async def body(engine: EngineProcess) -> None:
        starting = asyncio.create_task(engine.start())
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineGone):
            await starting
        with pytest.raises(EngineGone, match="shutting down"):
            await ask(engine, REQUEST)

    with_engine(fake("works"), body)
