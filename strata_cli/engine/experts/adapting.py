"""Which experts change places between slots and host memory, by what the last steps routed to.

Pure decisions. Source of the rules: Strata's adaptive tier. A window is one pass of the decode
path; each distinct expert of a layer that it routes to counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST_COUNT = 2.0  # decayed windows of a pair that is worth a slot
LEAST_GAIN = 1.5  # that its count must be ahead of the one that makes room
USUAL_SWAPS = 96
USUAL_GBPS = 25.0  # of a link that copies so many beside a few windows
LEAST_SWAPS = 8


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
) -> Swaps:
    """One round's swaps: in each layer the most used outside against the least used inside.

    The most used pair outside takes the slot of the least used one inside, the next the next one's,
    as long as each has LEAST_COUNT and gains LEAST_GAIN. Equal counts go by id.

    Args:
        counts: decayed windows of each pair, [L, E].
        slot_of: slot of each, negative outside, [L, E].
        may_come: pairs outside that may be brought, [L, E].
        most: swaps of all layers together; those that gain most.

    Returns:
        The swaps, those that gain most first; equal gains by layer, then by the candidate's place.
    """
    num_experts = counts.shape[1]
    is_inside = slot_of >= 0
    is_candidate = may_come & ~is_inside & (counts >= LEAST_COUNT)
    layers = np.flatnonzero(is_candidate.any(axis=1) & is_inside.any(axis=1))
    if most <= 0 or not layers.size:
        return Swaps(np.empty(0, np.int64), np.empty(0, np.int64))
    own = counts[layers]
    incoming = np.where(is_candidate[layers], own, -np.inf)
    outgoing = np.where(is_inside[layers], own, np.inf)
    best = np.argsort(-incoming, axis=1, kind="stable")
    least = np.argsort(outgoing, axis=1, kind="stable")
    rows = np.arange(layers.size)[:, None]
    gains = incoming[rows, best] - outgoing[rows, least]
    at = np.flatnonzero(gains.reshape(-1) >= LEAST_GAIN)
    chosen = at[np.argsort(-gains.reshape(-1)[at], kind="stable")][:most]
    row, column = np.divmod(chosen, num_experts)
    layer = layers[row]
    pairs = layer * num_experts + best[row, column]
    return Swaps(pairs, slot_of[layer, least[row, column]].astype(np.int64))
