"""How close the engine must be to an independent implementation, and what greedy means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, Sequence
from tests.reference.qwen4exp import ModelPass

TOLERANCE = 2e-4
"""Largest error of a logit; their standard deviation is between 1 and 5 in the models here."""


def assert_close(
    actual: NDArray[Any], expected: NDArray[Any], tolerance: float = TOLERANCE
) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def continue_greedily(sequence: Sequence, logits: NDArray[np.float32], count: int) -> list[int]:
    """The most probable token, ``count`` times; of equal ones the lowest id."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(np.argmax(logits)))
        logits = sequence.step(tokens[-1])
    return tokens


def read_all(engine: Engine, ids: list[int]) -> NDArray[np.float32]:
    """Logits of every token of a prompt, [T, V]."""
    with engine.sequence() as sequence:
        return sequence.prefill(ids, logits="all")


@dataclass(frozen=True)
class Agreement:
    """How the logits of two passes over the same tokens differ; one entry for each token.

    Attributes:
        errors: largest difference of a logit.
        nats: Kullback-Leibler divergence from the expected distribution.
        same_best: whether the most likely token is the same.
        lead: of the expected most likely token over the next.
    """

    errors: NDArray[np.float64]
    nats: NDArray[np.float64]
    same_best: NDArray[np.bool_]
    lead: NDArray[np.float64]

    def is_within(self, error: float, nats: float) -> NDArray[np.bool_]:
        """Tokens within both bounds whose best token is the same, where the lead decides it."""
        decided = self.same_best | (self.lead <= 2 * error)
        return (self.errors < error) & (self.nats < nats) & decided


def agreement(expected: NDArray[Any], actual: NDArray[Any]) -> Agreement:
    """Of logits [T, V]."""
    runner_up, best = np.sort(expected.astype(np.float64), axis=1)[:, -2:].T
    return Agreement(
        errors=np.abs(actual.astype(np.float64) - expected).max(axis=1),
        nats=divergence(expected, actual),
        same_best=actual.argmax(axis=1) == expected.argmax(axis=1),
        lead=best - runner_up,
    )


def differing_tokens(one: ModelPass, other: ModelPass) -> list[int]:
    """Tokens for which any layer chose other experts or other blocks, ascending."""
    differs = np.zeros(len(one.logits), dtype=bool)
    for mine, theirs in zip(one.router_ids, other.router_ids, strict=True):
        differs |= (np.sort(mine, axis=1) != np.sort(theirs, axis=1)).any(axis=1)
    for layer, allowed in one.allowed.items():
        differs |= (allowed != other.allowed[layer]).any(axis=1)
    return [int(token) for token in np.flatnonzero(differs)]


def divergence(expected: NDArray[Any], actual: NDArray[Any]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of each row's distribution from the expected one, in nats."""
    p, q = (_log_softmax(logits.astype(np.float64)) for logits in (expected, actual))
    nats: NDArray[np.float64] = np.sum(np.exp(p) * (p - q), axis=1)
    return nats


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
