"""Requests to an engine process, and what comes of them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

from strata_cli.config import StrataConfig
from strata_cli.server.engine_process import EngineProcess, GenerateEvent
from strata_cli.server.protocol import Done, Generate, Token

LIMIT_S = 60.0  # of a test that hangs


def fake(mode: str, *, silence_s: float = 300.0) -> EngineProcess:
    """An engine process over a worker of fake_worker.py."""
    root = os.fspath(Path(__file__).parents[2])
    boot = f"import sys; sys.path[0] = {root!r}; import tests.server.fake_worker as w; w.main()"
    command = [sys.executable, "-c", boot, mode]
    return EngineProcess(StrataConfig(), silence_s=silence_s, command=command)


def with_engine(
    engine: EngineProcess, body: Callable[[EngineProcess], Coroutine[Any, Any, None]]
) -> None:
    """Run the body in a loop of its own, and close the engine whatever happens."""

    async def run() -> None:
        try:
            await asyncio.wait_for(body(engine), LIMIT_S)
        finally:
            await engine.close(grace_s=5)

    asyncio.run(run())


async def ask(engine: EngineProcess, request: Generate) -> list[GenerateEvent]:
    """All that comes of a request."""
    async with aclosing(engine.generate(request)) as events:
        return [event async for event in events]


async def answer(engine: EngineProcess, request: Generate) -> tuple[list[int], Done]:
    """The tokens that come of a request, and how it ended."""
    events = await ask(engine, request)
    done = events[-1]
    assert isinstance(done, Done)
    return [event.token_id for event in events if isinstance(event, Token)], done
