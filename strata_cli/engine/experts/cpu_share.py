"""Which of a layer's experts the host's processor computes, and whether that pays. Pure decisions.

While a short chunk's experts come over the link, the processor can compute some of them from where
they lie. Source of the rules: Strata's prompt CPU share. The best share makes both take equally
long; a gate compares layers with and without, and is open while those with are faster.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

MOST_TOKENS = 3072  # of a chunk that is shared; longer ones keep a processor busy for too long
MOST_EXPERT_TOKENS = (
    16  # that make an expert the processor's: it pays by the token, a link does not
)
MOST_PAIRS = 1024  # of a layer

FIRST_SHARE = 0.25  # before anything is known
LEAST_SHARE, MOST_SHARE = 0.05, 0.9
NEWEST_WEIGHT = 0.25  # of a measurement in the running means
NUM_RATIOS = 3  # that open or close the gate
PROBE_LAYERS = 29  # to the next layer of the other kind; no divisor of usual numbers of layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """How long a layer's experts took.

    Attributes:
        streamed: experts that came over the link.
        shared: experts that the processor computed.
        all_us: from the routing until all outputs were there.
        link_us: until those were there that came over the link.
        cpu_us: of the processor alone.
    """

    streamed: int
    shared: int
    all_us: float
    link_us: float
    cpu_us: float


class ShareGate:
    """Sets the share of each layer in turn, and learns from what they took.

    Args:
        share: of the experts that are not resident, 0..1; None: as it pays.
    """

    def __init__(self, share: float | None) -> None:
        self._fixed = share
        self._link_us: float | None = None  # of an expert, running means
        self._cpu_us: float | None = None
        self._without_us: float | None = None  # of an expert of the last layer without
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._layers = 0

    @property
    def measures(self) -> bool:
        """Whether it wants times."""
        return self._fixed is None

    @property
    def is_open(self) -> bool:
        """Whether layers are shared, but for those that measure the other way."""
        if self._fixed is not None:
            return self._fixed > 0
        return len(self._ratios) == NUM_RATIOS and median(self._ratios) < 1

    @property
    def share(self) -> float:
        """Of a layer that is shared."""
        if self._fixed is not None:
            return self._fixed
        if self._link_us is None or self._cpu_us is None:
            return FIRST_SHARE
        share = self._link_us / (self._cpu_us + self._link_us)
        return min(max(share, LEAST_SHARE), MOST_SHARE)

    def next_share(self) -> float:
        """The share of the next layer; 0: the link brings all of it."""
        if self._fixed is not None:
            return self._fixed
        self._layers += 1
        if len(self._ratios) < NUM_RATIOS:
            is_shared = self._without_us is not None and self._layers % 2 == 0
        else:
            is_probe = self._layers % PROBE_LAYERS == 0
            is_shared = self.is_open is not is_probe
        return self.share if is_shared else 0.0

    def add(self, times: LayerTimes) -> None:
        """Learn from a layer that had any experts to bring or to share."""
        experts = times.streamed + times.shared
        if self._fixed is not None or not experts:
            return
        if times.streamed:
            self._link_us = _mean(self._link_us, times.link_us / times.streamed)
        an_expert_us = times.all_us / experts
        if not times.shared:
            self._without_us = an_expert_us
            return
        self._cpu_us = _mean(self._cpu_us, times.cpu_us / times.shared)
        if self._without_us:
            self._ratios.append(an_expert_us / self._without_us)


def choose_shared(
    counts: NDArray[np.integer], may_be: NDArray[np.bool_], num_streamed: int, share: float
) -> NDArray[np.int64]:
    """The experts of a layer that the processor computes: those of fewest tokens.

    Args:
        counts: tokens of each expert, [E].
        may_be: experts that it can compute and that would have to come over the link, [E].
        num_streamed: experts that come over the link where nothing is shared.
        share: of those.

    Returns:
        Their ids, ascending.
    """
    candidates = np.flatnonzero(may_be & (counts > 0) & (counts <= MOST_EXPERT_TOKENS))
    order = np.argsort(counts[candidates], kind="stable")
    chosen = candidates[order][: round(share * num_streamed)]
    chosen = chosen[np.cumsum(counts[chosen]) <= MOST_PAIRS]
    ids: NDArray[np.int64] = np.sort(chosen)
    return ids


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEWEST_WEIGHT * (newest - before)
