"""Float32 functions against float64, and that a row gets the bits that single floats get."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import exp32, log32, sigmoid32, silu32, softplus32
from strata_cli.engine.kernels.rows import (
    add_gated_row,
    divide_row,
    exp_row,
    sigmoid_row,
    silu_row,
    subtract_twice,
    swiglu_row,
)

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
F32 = np.float32
NAN, INF = float("nan"), float("inf")


@nogil_jit
def run_singles(x: Floats, out: Floats) -> None:
    for i in range(x.size):
        out[0, i] = exp32(x[i])
        out[1, i] = sigmoid32(x[i])
        out[2, i] = silu32(x[i])
        out[3, i] = softplus32(x[i])
        out[4, i] = log32(abs(x[i]))


def singles(x: Floats) -> Floats:
    out = np.empty((5, x.size), F32)
    run_singles(x, out)
    return out


@nogil_jit
def run_rows(x: Floats, y: Floats, start: int, n: int, out: Floats) -> None:
    exp_row(out, 0, x, start, F32(0.0), n)
    sigmoid_row(out, out.shape[1], x, start, n)
    silu_row(out, 2 * out.shape[1] + start, n)
    swiglu_row(out, 3 * out.shape[1], x, start, y, start, n)
    add_gated_row(out, 4 * out.shape[1], x, start, y, start, n)
    divide_row(out, 5 * out.shape[1] + start, F32(3.0), n)
    subtract_twice(out, 6 * out.shape[1], x, start, F32(0.1), F32(0.7), n)


WIDE = np.random.default_rng(0).uniform(-30, 30, 4000)
NARROW = np.random.default_rng(1).normal(0, 0.01, 1000)
X = np.concatenate([WIDE, NARROW, [0.0, -0.0, 87.9, -86.9]]).astype(F32)


EXACT: list[Callable[[Doubles], Doubles]] = [
    np.exp,
    lambda x: 1 / (1 + np.exp(-x)),
    lambda x: x / (1 + np.exp(-x)),
    lambda x: np.logaddexp(0, x),
    lambda x: np.log(np.abs(x)),
]


@pytest.mark.parametrize("which", range(5))
def test_values_are_within_a_few_units_of_the_last_place(which: int) -> None:
    x = X[X != 0]
    exact = EXACT[which](x.astype(np.float64))
    error = np.abs(singles(x)[which] - exact) / np.spacing(np.abs(exact).astype(F32))
    assert error.max() < 4


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("start", [0, 5])
def test_rows_have_the_bits_of_single_floats(n: int, start: int) -> None:
    x, y = X[:110], np.ascontiguousarray(X[200:310])
    out = np.tile(X[:120], (7, 1))
    run_rows(x, y, start, n, out)
    part = slice(start, start + n)
    exp, sigmoid, silu, _, _ = singles(x[part])
    np.testing.assert_array_equal(out[0, :n], exp)
    np.testing.assert_array_equal(out[1, :n], sigmoid)
    np.testing.assert_array_equal(out[2, part], silu)
    np.testing.assert_array_equal(out[3, :n], silu * y[part])
    gated = sigmoid.astype(np.float64) * y[part] + X[:n]
    np.testing.assert_allclose(out[4, :n], gated, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(out[5, part], X[part] / F32(3.0))
    np.testing.assert_array_equal(out[6, :n], (x[part] - F32(0.1)) - F32(0.7))
    np.testing.assert_array_equal(out[:2, n:], np.tile(X[n:120], (2, 1)))


@pytest.mark.parametrize(
    ("which", "x", "expected"),
    [
        (0, -INF, lambda v: 0 < v < 2e-38),
        (0, INF, lambda v: 1e38 < v < INF),
        (1, -INF, lambda v: 0 < v < 2e-38),
        (1, INF, lambda v: v == 1),
        (3, -100.0, lambda v: 0 < v < 2e-38),
        (3, 1e30, lambda v: v == F32(1e30)),
        *[(which, NAN, lambda v: v != v) for which in range(4)],
    ],
)
def test_ends_of_the_range(which: int, x: float, expected: Callable[[float], bool]) -> None:
    assert expected(float(singles(np.array([x], F32))[which, 0]))
