"""Paired timing: a switch off and on in mirrored blocks, ratios of neighbours, and an interval.

Neighbouring arms share what drifts (heat, other load), and the mirrored order cancels a drift that
is linear; so each ratio is taken within a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BLOCKS = ((False, True, True, False), (True, False, False, True))
"""Whether the switch is on, arm by arm."""

ARMS = BLOCKS[0] + BLOCKS[1]
PAIRS = tuple(
    (first, first + 1) if ARMS[first] else (first + 1, first) for first in range(0, len(ARMS), 2)
)
"""Indices (on, off) of neighbouring arms."""

RESAMPLES = 20_000
SEED = 0
LEVEL = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measure, with the switch off and on.

    Attributes:
        name: what was measured, with its unit.
        is_rate: more is better.
        off, on: means of the arms of a side.
        ratios: of each pair, above 1 where on is better: off / on of times, on / off of rates.
        median: of the ratios.
        low, high: bounds of the interval that holds the median in LEVEL of all resamples.
        change: (on - off) / off, from the means.
    """

    name: str
    is_rate: bool
    off: float
    on: float
    ratios: tuple[float, ...]
    median: float
    low: float
    high: float
    change: float


def compare(name: str, values: Sequence[float], *, is_rate: bool) -> Comparison:
    """Compare the two sides of a measure.

    Args:
        name: what was measured.
        values: of each arm, in the order of ARMS; positive.
        is_rate: more is better.
    """
    pairs = [(values[on], values[off]) for on, off in PAIRS]
    ratios = tuple(on / off if is_rate else off / on for on, off in pairs)
    on_mean, off_mean = (float(np.mean(side)) for side in zip(*pairs, strict=True))
    low, high = median_interval(ratios)
    return Comparison(
        name=name,
        is_rate=is_rate,
        off=off_mean,
        on=on_mean,
        ratios=ratios,
        median=float(np.median(ratios)),
        low=low,
        high=high,
        change=(on_mean - off_mean) / off_mean,
    )


def median_interval(
    ratios: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float, float]:
    """Percentile bootstrap interval of the median.

    Args:
        ratios: what was seen.
        resamples: how often as many are drawn from them, with replacement.
        seed: of the draws; the same gives the same interval.

    Source: Efron, percentile method: quantiles of the resamples' medians.
    """
    seen = np.asarray(ratios)
    draws = np.random.default_rng(seed).integers(0, seen.size, (resamples, seen.size))
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.median(seen[draws], axis=1), [tail, 1 - tail])
    return float(low), float(high)
