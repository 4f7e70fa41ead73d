"""States side by side: each in a sequence of its own, all in the same passes.

A pass costs much the same for few rows as for some more, so short states are read together, and
then the orders of options behind all of them. What is shared is a pass, never a row: every value is
that of a state read alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, Part
from strata_cli.engine.forward.state import Snapshot
from strata_cli.engine.model.prefixes import common_tokens
from strata_cli.engine.prefill.branches import plan_batches

LEAST_HEAD_TOKENS = 16
"""Fewer tokens in front of all states are not worth a pass of their own."""


class LaneGroup(NamedTuple):
    """What is read in one lane: a prefix of at least one token, and suffixes of it."""

    prefix: list[int]
    suffixes: list[list[int]]


class Lanes:
    """Sequences for states side by side. Owned by the engine's thread; every read is canonical.

    Args:
        engine: reads.
        count: states at a time, at least one.

    Attributes:
        read_tokens: so far.

    Raises:
        OutOfMemory: the sequences do not fit.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._sequences = [engine.sequence() for _ in range(count)]
        self._head: list[int] = []
        self._heads: list[Snapshot] = []
        self.read_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def score(self, groups: Sequence[LaneGroup]) -> list[list[NDArray[np.float32]]]:
        """The logits [V] behind the suffixes of each group.

        Args:
            groups: as many as there are lanes, at most; each fits the context.
        """
        with self._engine.canonical():
            self._begin([group.prefix for group in groups])
            lanes = self._sequences[: len(groups)]
            self._read([group.prefix[len(self._head) :] for group in groups])
            found = self._engine.score_together(
                (lane, group.suffixes) for lane, group in zip(lanes, groups, strict=True)
            )
        self.read_tokens += sum(len(one) for group in groups for one in group.suffixes)
        return found

    def close(self) -> None:
        """Gives the sequences' memory back. Safe to call twice."""
        for sequence in self._sequences:
            sequence.close()

    def _begin(self, prefixes: Sequence[list[int]]) -> None:
        """Put lanes behind what all prefixes begin with; once read, it stays."""
        head = self._head
        shared = min(common_tokens(head or prefixes[0], prefix) for prefix in prefixes)
        if head and shared == len(head):
            for lane, snapshot in zip(self._sequences, self._heads, strict=True):
                lane.restore(snapshot)
            return
        head = prefixes[0][:shared] if shared >= LEAST_HEAD_TOKENS else []
        self._head = []  # until all lanes have read the new one: an interrupt may come
        for lane in self._sequences:
            lane.reset()
        if head:
            self._read([head] * len(self._sequences))
        self._heads = [lane.snapshot() for lane in self._sequences]
        self._head = head

    def _read(self, parts: Sequence[list[int]]) -> None:
        """Read on in the first lanes, in as few passes as there can be."""
        lanes = [(lane, ids) for lane, ids in zip(self._sequences, parts, strict=False) if ids]
        most = self._engine.chunk_tokens
        for batch in plan_batches([len(ids) for _, ids in lanes], most):
            together = [lanes[index] for index in batch]
            if len(together) == 1:
                lane, ids = together[0]
                lane.prefill(ids, logits="none")
            else:
                self._engine.read_together(
                    Part(lane, ids, wants_logits=False) for lane, ids in together
                )
        self.read_tokens += sum(map(len, parts))
