"""How close the engine must be to an independent implementation, and what greedy means."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, Sequence

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


def divergence(expected: NDArray[Any], actual: NDArray[Any]) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of each row's distribution from the expected one, in nats."""
    p, q = (_log_softmax(logits.astype(np.float64)) for logits in (expected, actual))
    nats: NDArray[np.float64] = np.sum(np.exp(p) * (p - q), axis=1)
    return nats


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
