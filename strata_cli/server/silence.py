"""When an engine counts as stuck: too long without a sign that it gets anything done."""

from __future__ import annotations

import time
from collections.abc import Callable

from strata_cli.server.protocol import Beat

TOKENS_PER_S = 50  # a pass over many tokens may be as slow as this
MOST_TOKENS = 32_768


class Silence:
    """Measures how long an engine has been silent.

    Its beats alone are no sign: they come from a thread that lives on when the engine hangs.

    Args:
        limit_s: so long it may be silent, and longer while a pass over many tokens runs.
        clock: seconds.

    Attributes:
        limit_s: as given.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._progress = -1
        self._pending_tokens = 0
        self.sign()

    def sign(self) -> None:
        """Something was done, or has just been asked for."""
        self._last = self._clock()

    def beat(self, beat: Beat) -> None:
        """A beat came: a sign if there is progress since the last one."""
        if beat.progress != self._progress:
            self._progress = beat.progress
            self.sign()
        self._pending_tokens = beat.pending_tokens

    def left_s(self) -> float:
        """Seconds that it may still be silent; 0 or less: it is stuck."""
        allowed = self.limit_s + min(self._pending_tokens, MOST_TOKENS) / TOKENS_PER_S
        return self._last + allowed - self._clock()
