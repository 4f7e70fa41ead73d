"""Which experts change places between slots and host memory, by what the last steps routed to.

Pure decisions. A window is one pass of the decode path; each distinct expert of a layer that it
routes to counts once. Source of the rules: Strata's adaptive tier, which brings what was used
twice. Where that turns out to be used again, once is enough: most of what a conversation comes back
to then misses once or twice instead of until the second round. Where it does not, as in routing
without memory, bringing what was used once would only load the link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

USUAL_SWAPS = 96
USUAL_GBPS = 25.0  # of a link that copies so many beside a few windows
LEAST_SWAPS = 8
WORTHWHILE = 0.125  # of what a round brings, used until the next one, less what it drove out
KEPT = 0.5  # of what earlier rounds showed


class Bar(NamedTuple):
    """What a pair must have to be brought.

    Attributes:
        windows: that used it, decayed.
        gain: that it must be ahead of the one that makes room.
    """

    windows: float
    gain: float


HIGH_BAR, LOW_BAR = Bar(2.0, 1.5), Bar(1.0, 0.5)


@dataclass(frozen=True, slots=True)
class AdaptRules:
    """When experts change places. No result depends on it.

    Attributes:
        every: windows from one round of swaps to the next; 0: never.
        swaps: most of one round; None: as many as suit the link; 0: none.
        decay: what all counts are multiplied by after each round, 0..1.
    """

    every: int = 4
    swaps: int | None = None
    decay: float = 0.7

    @property
    def is_static(self) -> bool:
        """Whether experts keep their places."""
        return self.every == 0 or self.swaps == 0

    def most_swaps(self, link_gbps: float) -> int:
        """Swaps of one round.

        Args:
            link_gbps: of copies from host memory, in GB/s; 0: unknown.
        """
        if self.swaps is not None:
            return self.swaps
        if not link_gbps:
            return USUAL_SWAPS
        return max(LEAST_SWAPS, round(USUAL_SWAPS * link_gbps / USUAL_GBPS))


STATIC = AdaptRules(every=0)


class Swaps(NamedTuple):
    """Pairs, layer * E + expert, and the slots whose experts make room for them, both int64 [n]."""

    pairs: NDArray[np.int64]
    slots: NDArray[np.int64]


def plan_swaps(
    counts: NDArray[np.float32],
    slot_of: NDArray[np.int32],
    may_come: NDArray[np.bool_],
    most: int,
    bar: Bar = HIGH_BAR,
) -> Swaps:
    """One round's swaps: in each layer the most used outside against the least used inside.

    The most used pair outside takes the slot of the least used one inside, the next the next one's,
    as long as each passes the bar. Equal counts go by id.

    Args:
        counts: decayed windows of each pair, [L, E].
        slot_of: slot of each, negative outside, [L, E].
        may_come: pairs outside that may be brought, [L, E].
        most: swaps of all layers together; those that gain most.
        bar: for each of them.

    Returns:
        The swaps, those that gain most first; equal gains by layer, then by the candidate's place.
    """
    num_experts = counts.shape[1]
    is_inside = slot_of >= 0
    is_candidate = may_come & ~is_inside & (counts >= bar.windows)
    is_candidate &= np.any(is_inside, axis=1, keepdims=True)
    if most <= 0 or not is_candidate.any():
        return Swaps(np.empty(0, np.int64), np.empty(0, np.int64))
    is_victim = is_inside & np.any(is_candidate, axis=1, keepdims=True)
    incoming = _by_count(counts, is_candidate, most_first=True)
    outgoing = _by_count(counts, is_victim, most_first=False)
    layer = incoming // num_experts
    place = np.arange(incoming.size) - np.searchsorted(layer, layer)
    bounds = np.concatenate([[0], np.cumsum(is_victim.sum(axis=1))])
    has_partner = place < (bounds[1:] - bounds[:-1])[layer]
    incoming, layer, place = incoming[has_partner], layer[has_partner], place[has_partner]
    outgoing = outgoing[bounds[layer] + place]
    flat = counts.reshape(-1)
    gains = flat[incoming] - flat[outgoing]
    at = np.flatnonzero(gains >= bar.gain)
    chosen = at[np.argsort(-gains[at], kind="stable")][:most]
    slots = slot_of.reshape(-1)[outgoing[chosen]]
    return Swaps(incoming[chosen], slots.astype(np.int64))


class Returns:
    """What rounds of swaps turn out to be worth, and the bar for the next one that follows."""

    def __init__(self) -> None:
        self._came = self._left = _Watched(np.empty(0, np.int64), np.empty(0, np.float32))
        self._tried = self._won = 0.0

    def bar(self, counts: NDArray[np.float32]) -> Bar:
        """At a round, before its counts decay: the bar for it, by what the ones before brought.

        Args:
            counts: decayed windows of each pair, [L, E].
        """
        won = self._came.num_used(counts) - self._left.num_used(counts)
        self._won = KEPT * self._won + won
        self._tried = KEPT * self._tried + self._came.pairs.size
        is_worthwhile = self._tried > 0 and self._won >= WORTHWHILE * self._tried
        return LOW_BAR if is_worthwhile else HIGH_BAR

    def watch(
        self, came: NDArray[np.int64], left: NDArray[np.int64], counts: NDArray[np.float32]
    ) -> None:
        """Behind a round, once its counts have decayed.

        Args:
            came: pairs that it brings, [n].
            left: pairs that make room for them, [n].
            counts: as of bar().
        """
        flat = counts.reshape(-1)
        self._came, self._left = (_Watched(pairs, flat[pairs]) for pairs in (came, left))


class _Watched(NamedTuple):
    """Pairs, and their counts behind a round."""

    pairs: NDArray[np.int64]
    counts: NDArray[np.float32]

    def num_used(self, counts: NDArray[np.float32]) -> int:
        """How many of them have been used since."""
        return int(np.count_nonzero(counts.reshape(-1)[self.pairs] > self.counts))


def _by_count(
    counts: NDArray[np.float32], is_in: NDArray[np.bool_], *, most_first: bool
) -> NDArray[np.int64]:
    """The pairs of a mask, layer by layer, by count; equal counts by id.

    As numbers of which the high bits are the layer, then the count (the bits of a float that is
    not negative order as it does), then the id: one plain sort, fifty times faster than sorting
    each layer's floats.
    """
    num_experts = counts.shape[1]
    pairs = np.flatnonzero(is_in)
    bits = counts.reshape(-1)[pairs].view(np.int32).astype(np.int64)
    if most_first:
        bits = np.int64(2**31 - 1) - bits
    layer, expert = np.divmod(pairs, num_experts)
    keys = np.sort((layer << 47) | (bits << 16) | expert)
    ordered: NDArray[np.int64] = (keys >> 47) * num_experts + (keys & 0xFFFF)
    return ordered
