"""Who is next: a bounded number of requests, whose reads get the engine first come, first served.

A request *enters* once, or is turned away. Each of its reads then takes a *turn*; a request of many
prompts takes many, one behind the other in the line, so that it cannot keep others out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from strata_cli.server.failures import OVERLOADED, Failure, RequestFailed

SMOOTHING = 0.2  # weight of the last turn in the running mean of their times


class RequestQueue:
    """The line in front of the engine. Belongs to the event loop.

    Args:
        parallel: requests that the engine works on at once.
        most_waiting: requests that may wait besides those.
        ahead: of these, so many have a turn already: they wait in the engine's own line.

    Attributes:
        parallel, most_waiting: as given.
        turns: that may be taken at once.
        refused: requests that were turned away.
    """

    def __init__(self, parallel: int, most_waiting: int, *, ahead: int = 0) -> None:
        self.parallel = parallel
        self.most_waiting = most_waiting
        self.turns = parallel + min(ahead, most_waiting)
        self.refused = 0
        self._entered = 0
        self._running = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._turn_s = 0.0
        self._left_at = time.monotonic()

    @property
    def entered(self) -> int:
        """Requests inside: answered now, or waiting."""
        return self._entered

    @property
    def idle_s(self) -> float:
        """Seconds since the last request left; 0 while one is inside."""
        return 0.0 if self._entered else time.monotonic() - self._left_at

    @property
    def running(self) -> int:
        """Turns that are taken."""
        return self._running

    @property
    def waiting(self) -> int:
        """Reads that wait for a turn."""
        return sum(not future.done() for future in self._line)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Come in, until the block ends.

        Raises:
            RequestFailed: 503, too many are inside.
        """
        if self._entered >= self.parallel + self.most_waiting:
            self.refused += 1
            raise RequestFailed(self._full())
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1
            self._left_at = time.monotonic()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it until the block ends. Cancelling gives the place up."""
        await self._wait()
        started = time.monotonic()
        try:
            yield
        finally:
            self._turn_s += SMOOTHING * (time.monotonic() - started - self._turn_s)
            self._pass_on()

    async def _wait(self) -> None:
        if self._running < self.turns:
            self._running += 1
            return
        mine = asyncio.get_running_loop().create_future()
        self._line.append(mine)
        try:
            await mine
        except BaseException:
            if mine.done() and not mine.cancelled():
                self._pass_on()  # the turn had come, and nobody takes it
            else:
                self._line.remove(mine)
            raise

    def _pass_on(self) -> None:
        """Give a turn to the first in line, or back."""
        while self._line:
            first = self._line.popleft()
            if not first.done():
                first.set_result(None)
                return
        self._running -= 1

    def _full(self) -> Failure:
        wait_s = max(1, math.ceil(self._turn_s * self._entered / self.turns))
        return Failure(
            status=503,
            kind=OVERLOADED,
            message=(
                f"{self._entered} requests are being answered or wait, and no more may; "
                f"try again in {wait_s} s"
            ),
            code="queue_full",
            headers={"retry-after": str(wait_s)},
        )
