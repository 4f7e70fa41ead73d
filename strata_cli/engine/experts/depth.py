"""How many copies may be queued and unfinished: what the link needs so as not to run dry.

Every copy that is queued can no longer be skipped, so the queue should be as short as the link
allows.
"""

from __future__ import annotations

from typing import Protocol

from strata_cli.errors import ConfigError

DEFAULT_DEPTH = 16
MOST_DEPTH = 256
LEAST_AUTO_DEPTH = 4
CALM_POLLS = 64  # in which less than half of the queue was needed, before it is made shorter


class DepthRule(Protocol):
    """Says the depth, and is told what it led to."""

    @property
    def depth(self) -> int:
        """Most copies queued and unfinished, 1..MOST_DEPTH."""
        ...

    def polled(self, unfinished: int, *, was_full: bool) -> None:
        """Told whenever finished copies were counted.

        Args:
            unfinished: copies still queued.
            was_full: when last looked at, the queue held all that the depth allows.
        """
        ...


class FixedDepth:
    """A depth that stays.

    Raises:
        ConfigError: it is outside 1..MOST_DEPTH.
    """

    def __init__(self, depth: int = DEFAULT_DEPTH) -> None:
        if not 1 <= depth <= MOST_DEPTH:
            raise ConfigError(
                f"the depth of the routed stream must be 1..{MOST_DEPTH}, got {depth}",
                hint=f"the usual one is {DEFAULT_DEPTH}",
            )
        self._depth = depth

    @property
    def depth(self) -> int:
        """The one it was made with."""
        return self._depth

    def polled(self, unfinished: int, *, was_full: bool) -> None:
        """A fixed depth learns nothing."""


class AutoDepth:
    """A depth that doubles when the link ran dry and shrinks while half of it is not needed."""

    def __init__(self, depth: int = DEFAULT_DEPTH) -> None:
        self._depth = depth
        self._calm = 0

    @property
    def depth(self) -> int:
        """The one that suits the link, as far as it is known."""
        return self._depth

    def polled(self, unfinished: int, *, was_full: bool) -> None:
        """Learn from one look at the queue; only one that had been full says anything."""
        if not was_full:
            return
        if unfinished == 0:
            self._depth = min(2 * self._depth, MOST_DEPTH)
        self._calm = self._calm + 1 if 2 * unfinished > self._depth else 0
        if self._calm >= CALM_POLLS:
            self._depth = max(self._depth * 7 // 8, LEAST_AUTO_DEPTH)
            self._calm = 0
