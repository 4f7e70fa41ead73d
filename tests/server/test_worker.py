"""The engine's process: its numbers, its faults, and its end."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest

from strata_cli.commands.main import run, strata
from strata_cli.config import StrataConfig
from strata_cli.engine.decode.sampling import Sampler
from strata_cli.errors import ConfigError, InputError, ModelError, StrataError
from strata_cli.server.engine_errors import EngineGone
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.protocol import Done, Generate, Open, Progress, Score, Started, Token
from strata_cli.server.worker import EngineWorker
from strata_cli.server.worker_channel import Channel
from tests.server.asking import answer, ask, with_engine

TEXT = tuple(int(i) for i in np.random.default_rng(8).integers(3, 8000, 1500))
READS = tuple(TEXT[start : start + 40 + start // 4] for start in (0, 100, 330))
LABELS = (7, 900, 31)
LONG = Generate(prompt=TEXT, max_tokens=1)
CHAT = Generate(prompt=TEXT[:60], max_tokens=100, ignore_eos=True)
END_S = 20.0  # a process that should end at once and has not is stuck


def engine(**settings: Any) -> EngineProcess:
    return EngineProcess(
        StrataConfig(**{"device": "host", "threads": 2, "prefill": 64, "parallel": 4, **settings})
    )


def canonical(ids: tuple[int, ...], **more: Any) -> Generate:
    return Generate(prompt=ids, max_tokens=1, logprobs=5, allowed_ids=LABELS, **more)


async def scores(engine: EngineProcess, request: Generate) -> tuple[object, ...]:
    """All the numbers of a one-token read."""
    return (await scores_and_reuse(engine, request))[0]


async def scores_and_reuse(
    engine: EngineProcess, request: Generate
) -> tuple[tuple[object, ...], int]:
    """The same, and how many tokens of its prompt were known."""
    events = await ask(engine, request)
    (token,) = (event for event in events if isinstance(event, Token))
    done = events[-1]
    assert isinstance(done, Done)
    return (token.logprob, token.top, token.named), done.reused_tokens


def printed(capsys: pytest.CaptureFixture[str], ids: tuple[int, ...]) -> tuple[Any, ...]:
    """What `strata read` prints of the same."""
    args = ["read", "--tokens", ",".join(map(str, ids)), "--top", "5", "--json"]
    args += ["--allowed-token-ids", ",".join(map(str, LABELS)), "--device", "host"]
    assert run(strata, args) == 0
    result = orjson.loads(capsys.readouterr().out)
    return tuple(
        tuple((entry["id"], entry["logprob"]) for entry in result[name])
        for name in ("top_logprobs", "allowed")
    )


def test_canonical_reads_are_those_of_strata_read_whatever_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Alone, all at once, between chats, reused or not, and from another worker."""
    expected = [printed(capsys, ids) for ids in READS]

    async def body(engine: EngineProcess) -> None:
        async def check(**more: Any) -> None:
            told = await asyncio.gather(*(scores(engine, canonical(ids, **more)) for ids in READS))
            for (logprob, *lists), values in zip(told, expected, strict=True):
                assert tuple(map(tuple, map(plain, lists))) == values
                assert logprob == max(value for _, value in values[1])

        def plain(entries: Any) -> list[tuple[int, float]]:
            return [(entry.token_id, entry.logprob) for entry in entries]

        await check()
        chats = [msgspec.structs.replace(CHAT, sampling=Sampler(temperature=1.0, seed=3))] * 2
        running = [asyncio.create_task(answer(engine, chat)) for chat in chats]
        await check()
        await check(reuse=False)
        (first, _), (second, _) = await asyncio.gather(*running)
        assert first == second
        row = await engine.score(
            Score(prefix=READS[0][:20], suffixes=(READS[0][20:],), ids=(LABELS,))
        )
        assert row.rows == (tuple(value for _, value in expected[0][1]),)
        await engine.unload()
        await check()
        assert engine.starts == 2

    with_engine(engine(), body)


def test_cold_and_warm_reads_are_equal_and_warm_ones_are_warm() -> None:
    async def body(engine: EngineProcess) -> None:
        request = canonical(READS[1])
        for _ in range(2):
            cold, none = await scores_and_reuse(engine, request)
            warm, some = await scores_and_reuse(engine, request)
            anew, again = await scores_and_reuse(
                engine, msgspec.structs.replace(request, reuse=False)
            )
            assert (none, again) == (0, 0)
            assert some > len(READS[1]) // 2
            assert cold == warm == anew
            await engine.unload()

    with_engine(engine(parallel=1), body)


def test_a_killed_worker_fails_what_runs_and_is_replaced() -> None:
    """While a prompt is read, while an answer comes, and while nothing is done."""

    async def kill(engine: EngineProcess) -> None:
        assert engine._link is not None
        os.kill(engine._link.pid, signal.SIGKILL)

    async def kill_halfway(engine: EngineProcess, request: Generate, kind: type[object]) -> None:
        async with aclosing(engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, kind):
                    await kill(engine)

    async def body(engine: EngineProcess) -> None:
        before = await scores(engine, canonical(READS[0]))
        for starts, (request, kind) in enumerate(((LONG, Progress), (CHAT, Token)), 2):
            with pytest.raises(EngineGone, match="was ended by SIGKILL while it was in use"):
                await kill_halfway(engine, request, kind)
            assert engine.state == "dead"
            assert await scores(engine, canonical(READS[0])) == before
            assert engine.starts == starts
        await kill(engine)
        while engine.state == "ready":
            await asyncio.sleep(0)  # until the loop has heard of it
        assert await scores(engine, canonical(READS[0])) == before
        assert engine.starts == 4

    with_engine(engine(), body)


def test_others_go_on_while_a_grammar_is_made() -> None:
    """And none is made for whoever has left by then."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = EngineWorker(Channel(theirs), Open(config=StrataConfig()))
        left: set[str] = set()
        asked, go_on = threading.Event(), threading.Event()

        class Waiting:
            def expect(self, name: str) -> None: ...

            def is_cancelled(self, name: str) -> bool:
                return name in left

        def make(text: str) -> Any:
            asked.set()
            assert go_on.wait(END_S)
            if text == "bad":
                raise InputError("no grammar")
            return text

        worker._scheduler, worker._make = Waiting(), make  # type: ignore[assignment]
        for text in ("good", "bad", "late"):
            request = Generate(request_id=text, prompt=(1,), max_tokens=1, constraint=text)
            assert worker._hear(request)
        assert asked.wait(END_S)
        assert worker._hear(msgspec.structs.replace(CHAT, request_id="plain"))
        arrived = worker._inbox.get(timeout=END_S)
        assert arrived is not None
        assert (arrived.request.request_id, arrived.made) == ("plain", None)
        left.add("late")
        go_on.set()
        for text, made in (("good", "good"), ("bad", ""), ("late", None)):
            arrived = worker._inbox.get(timeout=END_S)
            assert arrived is not None
            assert arrived.made is not None
            assert arrived.request.request_id == text
            if text == "bad":
                assert isinstance(arrived.made.exception(), InputError)
            else:
                assert str(arrived.made.result()) == str(made)


def test_leaving_a_long_prompt_frees_the_engine_at_once() -> None:
    async def body(engine: EngineProcess) -> None:
        async with aclosing(engine.generate(LONG)) as events:
            async for event in events:
                if isinstance(event, Progress):
                    break
        assert engine.running == 0
        await answer(engine, canonical(READS[0]))
        status = await engine.status()
        assert status is not None
        assert (status.counters.requests_cancelled, status.counters.requests) == (1, 2)
        assert status.counters.read_tokens < len(TEXT)
        # What was read is known: an interrupted prompt goes on from there.
        async with aclosing(engine.generate(LONG)) as events:
            started = await anext(events)
        assert isinstance(started, Started)
        assert started.reused_tokens > 0

    with_engine(engine(parallel=1), body)


@pytest.mark.parametrize(
    ("settings", "cls", "text"),
    [
        ({"model": Path("/no/such/model.gguf")}, ModelError, "/no/such/model.gguf"),
        ({"device": "cuda:77"}, ConfigError, "cuda-python|NVIDIA driver|cuda:77"),
        ({"max_context": 10**8}, StrataError, "--max-context 100000000 is more"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(
    settings: dict[str, Any], cls: type[StrataError], text: str
) -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(cls, match=text) as caught:
            await engine.start()
        assert not isinstance(caught.value, EngineGone)
        assert caught.value.hint

    with_engine(engine(**settings), body)


MISSING = """
import sys
sys.modules["llguidance"] = None
from strata_cli.server.worker import main
sys.exit(main())
"""


def test_a_package_that_is_missing_is_named() -> None:
    async def body(engine: EngineProcess) -> None:
        with pytest.raises(ConfigError, match="needs the package llguidance") as caught:
            await engine.start()
        assert "strata-cli[serve]" in caught.value.hint

    with_engine(EngineProcess(StrataConfig(), command=[sys.executable, "-c", MISSING]), body)


def test_closing_ends_a_worker_that_is_busy() -> None:
    async def body(engine: EngineProcess) -> None:
        task = asyncio.create_task(answer(engine, CHAT))
        while not engine.running:
            await asyncio.sleep(0)
        assert engine._link is not None
        process = engine._link._process
        await engine.close(grace_s=END_S)
        assert process.returncode == 0
        with pytest.raises(EngineGone, match="shutting down"):
            await task

    with_engine(engine(), body)


SERVER = """
import asyncio, sys
from contextlib import aclosing
from strata_cli.config import StrataConfig
from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.protocol import Generate, Token

async def main():
    engine = EngineProcess(StrataConfig(device="host"))
    await engine.start()
    if sys.argv[1] == "idle":
        print(engine._link.pid, flush=True)
        await asyncio.Event().wait()
    request = Generate(prompt=tuple(range(9, 60)), max_tokens=1500, ignore_eos=True)
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Token) and event.index == 0:
                print(engine._link.pid, flush=True)

assert not {name for name in sys.modules if name.split(".")[0] in ("numba", "llvmlite", "cuda")}
assert "strata_cli.engine.engine" not in sys.modules
asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["idle", "busy"])
def test_a_worker_ends_with_its_server(moment: str) -> None:
    """However the server came to its end; and the server itself has loaded no engine."""
    command = [sys.executable, "-c", SERVER, moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        descriptor = os.pidfd_open(worker)
        try:
            server.kill()
            readable, _, _ = select.select([descriptor], [], [], END_S)
            assert readable, "the worker still runs"
        finally:
            os.close(descriptor)


def test_settings_reach_the_worker_and_signals_meant_for_the_server_do_not(tmp_path: Path) -> None:
    dump = tmp_path / "dump \udcff.f32"

    async def body(engine: EngineProcess) -> None:
        await engine.start()
        assert engine._link is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(engine._link.pid, number)
        await answer(engine, canonical(READS[0]))
        assert engine.starts == 1
        assert engine.facts is not None
        assert (engine.facts.parallel, engine.facts.chunk_tokens) == (3, 48)

    with_engine(engine(parallel=3, prefill=48, prefill_dump_r=dump), body)
    assert dump.stat().st_size > 0
