"""Readings of one text: what must not depend on how its tokens are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.forward.planning import DEFAULT_HOMES, Homes
from strata_cli.engine.forward.state import StateHash
from tests.engine.strategies import EOS

CONTEXT = 1200


@dataclass(frozen=True)
class Reading:
    """Logits of every token, and the fingerprint at the end."""

    logits: NDArray[np.float32]
    state: StateHash


def open_engine(
    path: Path,
    *,
    device: str,
    prefill: int = 0,
    threads: int = 2,
    context: int = 0,
    homes: Homes = DEFAULT_HOMES,
) -> Engine:
    """An engine on the device named: devices differ in bits, so none is taken for granted."""
    return Engine.open(
        EngineOptions(
            model=path,
            device=device,
            prefill=prefill,
            threads=threads,
            max_context=context,
            homes=homes,
        )
    )


def text(length: int) -> list[int]:
    rng = np.random.default_rng(5)
    ids: list[int] = rng.integers(0, EOS, length).tolist()
    for at in (0, 30, 31, *rng.integers(40, length, length // 40)):
        ids[at] = EOS
    return ids


TEXT = text(260)


def read_in_parts(engine: Engine, parts: Sequence[list[int]]) -> Reading:
    with engine.sequence() as sequence:
        rows = [sequence.prefill(part, logits="all") for part in parts]
        return Reading(np.concatenate(rows), sequence.state_hash())


def cut(ids: list[int], sizes: Sequence[int]) -> list[list[int]]:
    """The ids in parts of these sizes, over and over."""
    parts: list[list[int]] = []
    start = 0
    while start < len(ids):
        size = sizes[len(parts) % len(sizes)]
        parts.append(ids[start : start + size])
        start += size
    return parts


def assert_same(actual: Reading, expected: Reading) -> None:
    assert np.array_equal(bits(actual.logits), bits(expected.logits))
    assert actual.state == expected.state


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32)


@dataclass
class Truth:
    """Readings of prefixes by a sequence that read nothing else."""

    engine: Engine
    known: dict[tuple[int, ...], Reading] = field(default_factory=dict)

    def __call__(self, ids: list[int]) -> Reading:
        key = tuple(ids)
        if key not in self.known:
            with self.engine.sequence() as sequence:
                logits = sequence.prefill(ids) if ids else np.empty(0, dtype=np.float32)
                self.known[key] = Reading(logits, sequence.state_hash())
        return self.known[key]
