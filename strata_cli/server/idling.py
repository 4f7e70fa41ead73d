"""Gives the model's memory back while nobody asks for anything."""

from __future__ import annotations

import asyncio
import logging

from strata_cli.server.engine_process import EngineProcess
from strata_cli.server.queue import RequestQueue

logger = logging.getLogger(__name__)


async def unload_when_idle(engine: EngineProcess, queue: RequestQueue, idle_s: float) -> None:
    """Unload the model whenever no request was inside for so long, until cancelled.

    The next request loads it again.

    Args:
        engine: to be unloaded.
        queue: knows when the last request left.
        idle_s: seconds; 0 returns at once.
    """
    while idle_s > 0:
        left_s = idle_s - queue.idle_s
        if left_s > 0:
            await asyncio.sleep(left_s)
            continue
        if engine.state == "ready":
            logger.info("no request for %g s: the model's memory is given back", idle_s)
            await engine.unload()
        await asyncio.sleep(idle_s)
