"""How the streaming threads sleep, and how a wait that leads nowhere ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from strata_cli.engine.experts.walk import Walk
from strata_cli.errors import StallError

SHORTEST_NAP_S = 20e-6
LONGEST_NAP_S = 1e-3
LONGEST_POLL_S = 100e-6  # a GPU that waits for us does nothing meanwhile
FIRST_NAP_S = 100e-6  # before the link's pace is known
LONGEST_WAIT_S = 0.25  # between two looks at the watchdog


class Bell:
    """Wakes one sleeping thread. A ring that nobody hears yet is kept, a second one is not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wakes who waits, or the next one to wait. Any thread may."""
        if self._lock.locked():
            with suppress(RuntimeError):  # another thread rang in between
                self._lock.release()

    def wait(self, seconds: float) -> None:
        """Sleeps until rung, or for so long; -1 waits for ever."""
        self._lock.acquire(timeout=seconds)


class Pace:
    """How long to sleep while the link is full, from the pace at which copies land."""

    def __init__(self) -> None:
        self._copy_s = 0.0
        self._since_s: float | None = None
        self._landed = 0

    def interrupt(self) -> None:
        """The link may idle from here on, so the time until the next look says nothing."""
        self._since_s = None

    def nap_s(self, landed: int, spare: int, now_s: float) -> float:
        """Seconds to sleep.

        Args:
            landed: copies so far.
            spare: of those queued, how many may land meanwhile.
            now_s: the time.
        """
        if self._since_s is not None and landed > self._landed:
            latest = (now_s - self._since_s) / (landed - self._landed)
            self._copy_s = latest if not self._copy_s else (3 * self._copy_s + latest) / 4
        if self._since_s is None or landed > self._landed:
            self._since_s, self._landed = now_s, landed
        if not self._copy_s:
            return FIRST_NAP_S
        return min(max(spare * self._copy_s, SHORTEST_NAP_S), LONGEST_NAP_S)


class Watchdog:
    """Raises when nothing has moved for too long; 0 seconds: never."""

    def __init__(self, walk: Walk, seconds: float) -> None:
        self._walk = walk
        self._seconds = seconds
        self._seen = self._progress()
        self._since = time.monotonic()

    def check(self, what: str) -> None:
        """Look for progress.

        Raises:
            StallError: there was none since the watchdog was made, or last saw some.
        """
        seen, now = self._progress(), time.monotonic()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif self._seconds and now - self._since >= self._seconds:
            raise StallError(
                f"nothing moved for {now - self._since:.1f} s while waiting for {what}; "
                + self._walk.report(),
                hint="the device or the disk hangs; STRATA_WATCHDOG_S sets the time, 0 waits on",
            )

    def _progress(self) -> tuple[int, int, int]:
        return self._walk.issued, self._walk.landed, self._walk.consumed


def poll(is_reached: Callable[[], bool], watchdog: Watchdog, what: str) -> None:
    """Ask until the answer is True, asleep in between, for longer and longer.

    Raises:
        StallError: the watchdog saw no progress for its time.
    """
    nap_s = SHORTEST_NAP_S
    while not is_reached():
        time.sleep(nap_s)
        nap_s = min(1.1 * nap_s, LONGEST_POLL_S)
        watchdog.check(what)
