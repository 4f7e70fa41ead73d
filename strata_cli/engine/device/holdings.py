"""What a driver gave, and who it is for: given back once, wherever Ctrl-C comes in between."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from strata_cli.engine.device.shelter import Shelter


class Holding(Protocol):
    """What the driver gave to one owner: memory, a lock on pages, a handle."""

    def free(self) -> None:
        """Gives back what is still held. Never raises: used in cleanup, at times twice."""


class Claim(weakref.ref[object]):
    """Of an owner on its holding. Queued for Holdings.reap() when the owner is dropped.

    What queues it is written in C: Ctrl-C on the first line of a finalizer would go unnoticed, and
    so would what the finalizer had to give back.
    """

    __slots__ = ("holding", "key")
    holding: Holding
    key: int


class Holdings:
    """All that the driver gave to one context.

    An owner can be dropped in any thread, also in one that may not call the driver. Then its claim
    is queued, and reap() gives back.

    Args:
        shelter: where the driver is called.
    """

    def __init__(self, shelter: Shelter) -> None:
        self._shelter = shelter
        self._claims: dict[int, Claim] = {}
        self._keys = itertools.count()
        self._dropped: deque[weakref.ref[object]] = deque()

    def claim(self, owner: object, holding: Holding) -> int:
        """From now on what is in the holding goes with its owner; until then it is empty.

        Returns:
            what give() takes. Not the claim, which must not outlive what is known of it here.
        """
        claim = Claim(owner, self._dropped.append)
        claim.holding, claim.key = holding, next(self._keys)
        self._claims[claim.key] = claim
        return claim.key

    def take(self, owner: object, holding: Holding, fill: Callable[[], None]) -> int:
        """Calls the driver for what the owner is to have; returns what claim() does.

        Raises:
            whatever fill() raises.
        """
        key = self.claim(owner, holding)
        self._shelter.run(partial(_fill, fill, owner))
        return key

    def give(self, key: int) -> None:
        """Gives back now; nothing where that has been done."""
        claim = self._claims.get(key)
        if claim is not None:
            self._shelter.run(claim.holding.free)
            self._claims.pop(key, None)

    def reap(self) -> None:
        """Gives back what dropped owners had. Any thread may call it."""
        if self._dropped:
            self._shelter.run(self._reap)

    def _reap(self) -> None:
        while True:
            try:
                claim = self._dropped.popleft()
            except IndexError:
                return
            if isinstance(claim, Claim):
                claim.holding.free()
                self._claims.pop(claim.key, None)


def _fill(fill: Callable[[], None], _owner: object) -> None:
    """The owner goes along: were it dropped before, what comes would have none."""
    fill()
