"""A chunk on a clock: how long it takes and what it copies, at given speeds of link and compute.

The walk is the engine's. Link and compute stream are timelines: since both work in order, the end
of a copy or of a group is known when it is queued. The host itself costs nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.experts.depth import DepthRule
from strata_cli.engine.experts.entries import list_entries, rank_experts
from strata_cli.engine.experts.gate import Gate
from strata_cli.engine.experts.walk import ANY_NUMBER, Walk, WalkRules

GROUP = 16


@dataclass
class SimClock:
    now_us: float = 0.0


class SimLink:
    """Copies one after the other; landed when the clock is past their end."""

    def __init__(self, clock: SimClock, copy_us: float, ring_slots: int) -> None:
        self._clock = clock
        self._copy_us = copy_us
        self._free_us = 0.0
        self.released_us = [0.0] * ring_slots
        self.landing_us: dict[int, float] = {}
        self.busy_us = 0.0
        self._ahead: deque[float] = deque()

    def copy(self, batch: Sequence[int]) -> None:
        for k in batch:
            released = self.released_us[k % len(self.released_us)]
            start = max(self._clock.now_us, self._free_us, released)
            self._free_us = self.landing_us[k] = start + self._copy_us
            self.busy_us += self._copy_us
            self._ahead.append(self._free_us)

    def has_landed(self, k: int) -> bool:
        return self.landing_us[k] <= self._clock.now_us

    def is_staged(self, k: int) -> bool:
        raise NotImplementedError(f"entry {k}: nothing is staged here")

    def next_landing_us(self) -> float | None:
        while self._ahead and self._ahead[0] <= self._clock.now_us:
            self._ahead.popleft()
        return self._ahead[0] if self._ahead else None


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Of the machine, and of the model on it.

    Attributes:
        copy_us: one blob over the link.
        dense_us: a layer's work before its routing is known.
        expert_us: an expert's products.
    """

    copy_us: float
    dense_us: float
    expert_us: float


class Timing(NamedTuple):
    """What a chunk took.

    Attributes:
        copied: entries.
        needed: routed ones that are not resident.
        avoided: share of the entries that need not be copied and were not.
        total_us: of the whole chunk.
        link_us: what the needed copies alone take.
        busy: share of the time in which the link worked.
    """

    copied: int
    needed: int
    avoided: float
    total_us: float
    link_us: float
    busy: float


class ClockedChunk:
    """One chunk of a model whose experts are not all resident: all arrays [L, E], by expert id.

    With a depth, copies wait by the rules' `ahead` until a layer is published, all of them.
    """

    def __init__(
        self,
        resident: NDArray[np.bool_],
        routed: NDArray[np.bool_],
        order: NDArray[np.int64] | None,
        rules: WalkRules,
        speeds: Speeds,
    ) -> None:
        self._speeds = speeds
        self._clock = SimClock()
        self._link = SimLink(self._clock, speeds.copy_us, rules.ring_slots)
        self._ranking = rank_experts(resident, order)
        self._routed = np.take_along_axis(routed, self._ranking.expert_at, axis=1)
        self._entries = list_entries(self._ranking)
        self._gate = Gate(*resident.shape) if rules.depth is not None else None
        nobody = [0] * len(resident)
        self._walk = Walk(self._entries, self._link, rules, self._gate, nobody)
        self._compute_us = 0.0
        self._needed = int((routed & ~resident).sum())

    def run(self) -> Timing:
        self._walk.turn()
        for layer in range(self._ranking.num_layers):
            self._compute_us += self._speeds.dense_us
            self._sleep_until(self._compute_us)
            if self._gate is not None:
                self._gate.publish(layer, self._routed[layer])
            self._walk.turn()
            self._read(layer)
        total_us = max([self._compute_us, *self._link.landing_us.values()])
        spare = len(self._entries) - self._needed
        avoided = self._walk.skipped / spare if spare else 1.0
        link_us = self._needed * self._speeds.copy_us
        busy = self._link.busy_us / total_us
        return Timing(self._walk.copied, self._needed, avoided, total_us, link_us, busy)

    def _read(self, layer: int) -> None:
        num_resident = self._ranking.num_resident[layer]
        self._compute_us += self._speeds.expert_us * int(self._routed[layer, :num_resident].sum())
        ranks, walk = self._entries.ranks, self._walk
        entries = self._entries.of_layer(layer)
        routed = [k for k in entries if self._routed[layer, ranks[k]]]
        slots = len(self._link.released_us)
        for start in range(0, len(routed), min(GROUP, max(slots // 2, 1))):
            group = routed[start : start + min(GROUP, max(slots // 2, 1))]
            walk.consume(group[0] - walk.consumed)
            walk.turn()
            self._sleep_until_issued(group[-1])
            begin = max(self._compute_us, self._link.landing_us[group[-1]])
            self._compute_us = begin + self._speeds.expert_us * len(group)
            for k in group:
                self._link.released_us[k % slots] = self._compute_us
            walk.consume(group[-1] + 1 - walk.consumed)
            walk.turn()
        walk.consume(entries.stop - walk.consumed)
        walk.turn()

    def _sleep_until(self, time_us: float) -> None:
        """The issuer looks at the link whenever a copy lands."""
        while (landing := self._link.next_landing_us()) is not None and landing <= time_us:
            self._clock.now_us = landing
            self._walk.turn()
        self._clock.now_us = max(self._clock.now_us, time_us)

    def _sleep_until_issued(self, k: int) -> None:
        while self._walk.issued <= k:
            landing = self._link.next_landing_us()
            assert landing is not None, self._walk.report()
            self._sleep_until(landing)


def rules_of(
    depth: DepthRule | None, ring_slots: int = 384, together: int = 16, ahead: int = ANY_NUMBER
) -> WalkRules:
    return WalkRules(ring_slots, depth, together, ahead)


class SimRouter:
    """Skewed traffic: experts have a popularity of their own, and one more within each prompt.

    Args:
        num_layers, num_experts, top_k: of the model.
        skew: standard deviation of an expert's log-popularity in general; 0: all alike.
        topic: the same of what a prompt adds to it; a profile does not know it.
        seed: of the model's popularity.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        *,
        skew: float,
        topic: float,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.popularity = rng.normal(0.0, skew, (num_layers, num_experts))
        self._topic = topic
        self._top_k = top_k

    @property
    def profile(self) -> NDArray[np.float32]:
        shares: NDArray[np.float32] = np.exp(self.popularity).astype(np.float32)
        return shares

    def prompt(self, num_tokens: int, seed: int) -> NDArray[np.int64]:
        """Tokens of each expert in a prompt, int64 [L, E]."""
        rng = np.random.default_rng(seed)
        logits = self.popularity + rng.normal(0.0, self._topic, self.popularity.shape)
        counts = np.zeros(logits.shape, np.int64)
        for layer, row in enumerate(logits):
            scores = row + rng.gumbel(size=(num_tokens, row.size))
            chosen = np.argpartition(-scores, self._top_k - 1, axis=1)[:, : self._top_k]
            counts[layer] = np.bincount(chosen.reshape(-1), minlength=row.size)
        return counts
