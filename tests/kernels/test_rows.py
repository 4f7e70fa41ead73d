"""Row operations against numpy, at sizes around their width, with guards behind every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.rows import (
    add_products,
    add_row,
    add_weighted_rows,
    clear_row,
    copy_rows,
    decay_and_add,
    multiply_row,
    scale_row,
)
from tests.kernels.lab import normal

Floats = NDArray[np.float32]
F32 = np.float32
PITCH = 120  # floats from one result to the next, so that guards lie between


@nogil_jit
def run_all(out: Floats, x: Floats, y: Floats, start: int, n: int, count: int) -> None:
    scale_row(out, 0 * PITCH + start, x, start, F32(0.3), n)
    multiply_row(out, 1 * PITCH + start, x, start, n)
    add_row(out, 2 * PITCH + start, x, start, n)
    add_products(out, 3 * PITCH + start, x, start, y, 1, n)
    decay_and_add(out, 4 * PITCH + start, F32(0.9), F32(-0.7), x, start, n)
    add_weighted_rows(out, 5 * PITCH + start, y, 2, x, start, 3, count, n)
    clear_row(out, 6 * PITCH + start, n)
    copy_rows(out, 7 * PITCH + start, n, x, start, n + 2, 1, n)


@given(
    n=st.integers(0, 100),
    start=st.integers(0, 17),
    count=st.integers(0, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_operations_match_numpy_and_touch_nothing_else(
    n: int, start: int, count: int, seed: int
) -> None:
    before, x, y = normal(seed, 8, PITCH), normal(seed + 1, 200), normal(seed + 2, 200)
    after = before.copy()
    run_all(after, x, y, start, n, count)
    part = slice(start, start + n)
    row, old = x[part], before[:, part].astype(np.float64)
    weighted = sum(
        y[2 + k] * x[start + 3 * k : start + 3 * k + n].astype(np.float64) for k in range(count)
    )
    expected = [
        row * F32(0.3),
        old[1] * row,
        old[2] + row,
        old[3] + row.astype(np.float64) * y[1 : 1 + n],
        -0.7 * row.astype(np.float64) + 0.9 * old[4],
        old[5] + weighted,
        np.zeros(n),
        row,
    ]
    np.testing.assert_allclose(after[:, part], np.array(expected), rtol=1e-5, atol=2e-6)
    after[:, part] = before[:, part]
    np.testing.assert_array_equal(after, before)


@nogil_jit
def run_shift(rows: Floats, by: int, count: int) -> None:
    copy_rows(rows, 0, rows.shape[1], rows, by * rows.shape[1], rows.shape[1], count, rows.shape[1])


@pytest.mark.parametrize("by", [0, 1, 3])
def test_rows_of_one_array_move_down_over_each_other(by: int) -> None:
    rows = normal(1, 9, 5)
    expected = rows[by : by + 6].copy()
    run_shift(rows, by, 6)
    np.testing.assert_array_equal(rows[:6], expected)
