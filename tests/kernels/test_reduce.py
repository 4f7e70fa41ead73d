"""The fixed order of sums, against the same order written out one element at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.reduce import (
    dot16,
    max16,
    rms_scale,
    sum16,
    sum_squares16,
)

Floats = NDArray[np.float32]


@nogil_jit
def reduce_all(a: Any, ai: int, b: Any, bi: int, n: int, results: Any) -> None:
    results[0] = sum16(a, ai, n)
    results[1] = sum_squares16(a, ai, n)
    results[2] = dot16(a, ai, b, bi, n)
    results[3] = max16(a, ai, n)
    results[4] = rms_scale(a, ai, n, 1e-6)


def fixed_order_dot(a: Floats, b: Floats) -> np.float32:
    """16 lanes by fused multiply-add, then the pairwise tree (float64 holds each product)."""
    lanes = np.zeros(16)
    for k in range(a.size):
        lanes[k % 16] = np.float32(lanes[k % 16] + np.float64(a[k]) * np.float64(b[k]))
    tree = lanes.astype(np.float32)
    while tree.size > 1:
        half = tree.size // 2
        tree = tree[:half] + tree[half:]
    return np.float32(tree[0])


def reduced(a: Floats, ai: int, b: Floats, bi: int, n: int) -> Floats:
    results = np.empty(5, np.float32)
    reduce_all(a, ai, b, bi, n, results)
    return results


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 300), ai=st.integers(0, 20), bi=st.integers(0, 20), seed=st.integers(0, 99))
def test_sums_follow_the_fixed_order_to_the_last_bit(n: int, ai: int, bi: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((2, 160)).astype(np.float32)
    b = rng.standard_normal((4, 80)).astype(np.float32)
    x, y = a.ravel()[ai : ai + n], b.ravel()[bi : bi + n]
    results = reduced(a, ai, b, bi, n)
    assert results[0] == fixed_order_dot(x, np.ones(n, np.float32))
    assert results[1] == fixed_order_dot(x, x)
    assert results[2] == fixed_order_dot(x, y)
    assert results[3] == max(x, default=-np.inf)


def test_rms_scale_is_the_inverse_root_mean_square() -> None:
    a = np.full((3, 7), 2.0, np.float32)
    assert reduced(a, 7, a, 0, 7)[4] == pytest.approx(0.5, rel=1e-6)


def test_elements_past_the_end_are_not_read() -> None:
    a = np.full((1, 40), np.nan, np.float32)
    a[0, 3:22] = 1.0
    assert reduced(a, 3, a, 3, 19)[:4].tolist() == [19.0, 19.0, 19.0, 1.0]
