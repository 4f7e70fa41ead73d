"""Waiting for a GPU in Python: asleep, and awake to Ctrl-C.

The driver's own waits cannot be interrupted, so a wait here is a query, again and again, with
sleeps between that grow with the time already waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SPIN_S = 30e-6  # a shorter wait than a sleep can measure
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 1e-3
SHARE = 1 / 64  # of the time waited so far: what a wait may overshoot by


def wait_until(done: Callable[[], bool]) -> None:
    """Returns once done() answers True. A signal handler that raises ends the wait."""
    start = time.perf_counter()
    while not done():
        waited = time.perf_counter() - start
        if waited > SPIN_S:
            time.sleep(min(max(waited * SHARE, SHORTEST_SLEEP_S), LONGEST_SLEEP_S))
