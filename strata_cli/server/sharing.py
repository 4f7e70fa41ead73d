"""How requests share the engine: pure decisions, and the account of who is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata_cli.engine.model.prefixes import common_tokens

DECODE_SHARE = 0.5
"""Of the engine's time, while prompts are read beside answers that are generated."""


def share_rows(wanted: Sequence[int], most: int) -> list[int]:
    """Rows of a pass for each of several prompts: alike, but none more than it wants.

    What one does not want is for the others, earlier ones first where it cannot be divided. So
    short prompts are done soon, however long the others are.

    Args:
        wanted: tokens that each has left, all positive.
        most: rows of the pass.
    """
    shares = [0] * len(wanted)
    left = most
    while left and (open_ := [i for i, want in enumerate(wanted) if shares[i] < want]):
        each = max(1, left // len(open_))
        for index in open_[:left]:
            more = min(each, wanted[index] - shares[index])
            shares[index] += more
            left -= more
    return shares


LEAST_ADOPTED = 64
"""Tokens that are copied from another slot rather than read again."""

LEAST_SHARED = 32
"""Tokens that prompts must have in common to be read together."""


class SlotUse(NamedTuple):
    """What a prompt would do to a slot that is idle.

    Attributes:
        read_tokens: of the prompt, that it would have to read there.
        lost_tokens: of what the slot holds, that it would take away.
        idle_turns: how many requests have begun since the slot was used.
        adopts_from: the number of another slot that knows more of the prompt, which is copied;
            None: nothing is.
    """

    read_tokens: int
    lost_tokens: int
    idle_turns: int
    adopts_from: int | None = None


def choose_slot(uses: Sequence[SlotUse]) -> int:
    """The slot that makes the least work, now and probably later.

    What a slot holds is worth the less the longer nobody has asked for it: it counts half as much
    with every request that went by.

    Args:
        uses: at least one.
    """

    def cost(index: int) -> tuple[float, int]:
        use = uses[index]
        # A conversation that is going on is found here at once, a forgotten one never is.
        return use.read_tokens + use.lost_tokens * 0.5 ** (1 + use.idle_turns), -use.idle_turns

    return min(range(len(uses)), key=cost)


class Company(NamedTuple):
    """Prompts that are read together: the first one, and these others.

    Attributes:
        others: their numbers.
        shared_tokens: that all of them begin with; a token is left of each.
    """

    others: tuple[int, ...]
    shared_tokens: int


def find_company(prompt: Sequence[int], others: Sequence[Sequence[int]], most_rows: int) -> Company:
    """Which of other prompts are read together with one: what all begin with once, then their ends.

    Args:
        prompt: the one.
        others: those that wait.
        most_rows: no end of a prompt may be longer.
    """
    chosen: list[int] = []
    shared = len(prompt) - 1
    for number, other in enumerate(others):
        common = min(common_tokens(prompt, other), len(other) - 1, shared)
        ends = (len(ids) - common for ids in (prompt, other, *(others[i] for i in chosen)))
        if is_worth_sharing(common, prompt) and max(ends) <= most_rows:
            chosen.append(number)
            shared = common
    return Company(tuple(chosen), shared)


def is_worth_sharing(common: int, prompt: Sequence[int]) -> bool:
    """Whether so many common tokens are a good part of a prompt."""
    return common >= LEAST_SHARED and 2 * common >= len(prompt)


class DecodeTurns:
    """Whether steps are due before more of a prompt is read.

    Args:
        share: of the time that steps get beside prompts.
    """

    def __init__(self, share: float = DECODE_SHARE) -> None:
        self._ratio = share / (1 - share)
        self._owed_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether steps are next."""
        return self._owed_s > 0

    def prompts_took(self, seconds: float) -> None:
        """A pass over prompts made answers wait."""
        self._owed_s += seconds * self._ratio

    def steps_took(self, seconds: float) -> None:
        """A pass of steps."""
        self._owed_s = max(0.0, self._owed_s - seconds)

    def forget(self) -> None:
        """Nobody waits for steps."""
        self._owed_s = 0.0
