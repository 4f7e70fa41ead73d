"""Whether a window asks the pool for help: as it turned out to pay. Pure decisions.

What a pool costs a window is there whether it has much to do or little, and how much there is
depends on the model, the cache and the conversation. So windows are timed, some with the pool and
some without, and most of them go the way that was faster; now and then the other is tried again.
"""

from __future__ import annotations

from statistics import median

TRIAL = 12  # windows of one way that are compared
SETTLING = 3  # of these, the first ones do not count: the cache and a graph are new
AGAIN = 240  # windows until the other way is tried again
GAIN = 0.98  # of the time without, that a window with the pool may take


class PoolGate:
    """For windows of one number of rows.

    Attributes:
        is_open: whether the next window asks the pool.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._left = TRIAL
        self._is_trial = True
        self._seconds: list[float] = []
        self._medians: dict[bool, float] = {}

    def add(self, seconds: float) -> None:
        """The next window took so long, as is_open said."""
        self._seconds.append(seconds)
        self._left -= 1
        if self._left:
            return
        self._medians[self.is_open] = median(self._seconds[SETTLING:])
        self._seconds.clear()
        pays = self._pays()
        if pays is None or (pays is self.is_open and not self._is_trial):
            self._begin(not self.is_open, is_trial=True)
        else:
            self._begin(pays, is_trial=False)

    def _pays(self) -> bool | None:
        """Whether the pool does; None: not known yet."""
        if len(self._medians) < 2:
            return None
        return self._medians[True] < GAIN * self._medians[False]

    def _begin(self, is_open: bool, *, is_trial: bool) -> None:
        self.is_open, self._is_trial = is_open, is_trial
        self._left = TRIAL if is_trial else AGAIN
