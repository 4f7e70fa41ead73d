"""How close the engine must be to an independent implementation, and what greedy means."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Sequence

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
