"""Tiles of the matrix product: one order of sums whatever the tile's shape or the registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.simd import (
    Registers,
    choose_registers,
    make_multiply_rows,
    multiply_rows,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Product = Callable[[Floats, Floats, Ints, Floats], None]


def product_with(multiply: Callable[..., None]) -> Product:
    def product(w: Floats, x: Floats, row_of: Ints, out: Floats) -> None:
        count, rows = out.shape
        k = w.shape[1]
        multiply(
            address_of(w),
            k * 4,
            rows,
            address_of(x),
            k,
            address_of(row_of),
            count,
            address_of(out),
            rows * 4,
        )

    return cast(Product, numba.njit(product))


PRODUCTS: dict[str, Product] = {
    "this CPU": product_with(multiply_rows),
    "avx512": product_with(make_multiply_rows(Registers(16, 4))),
    "avx2": product_with(make_multiply_rows(Registers(8, 2))),
    "sse": product_with(make_multiply_rows(Registers(4, 2))),
}


def fixed_order_dots(w: Floats, x: Floats) -> Floats:
    """Every dot product by 16 fused lanes and the pairwise tree (float64 holds each product)."""
    lanes = np.zeros((len(x), len(w), 16), np.float32)
    products = x[:, None, :].astype(np.float64) * w[None].astype(np.float64)
    for k in range(w.shape[1]):
        lanes[..., k % 16] = (lanes[..., k % 16] + products[..., k]).astype(np.float32)
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return np.ascontiguousarray(lanes[..., 0])


@pytest.mark.parametrize("registers", PRODUCTS)
@settings(max_examples=20)
@given(
    k=st.integers(1, 70), rows=st.integers(1, 9), count=st.integers(1, 9), seed=st.integers(0, 99)
)
def test_every_tile_sums_in_the_fixed_order(
    registers: str, k: int, rows: int, count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, k)).astype(np.float32)
    x = rng.standard_normal((5, k)).astype(np.float32)
    row_of = rng.integers(0, 5, count).astype(np.int32)
    out = np.full((count, rows), np.nan, np.float32)
    PRODUCTS[registers](w, x, row_of, out)
    np.testing.assert_array_equal(out, fixed_order_dots(w, x[row_of]))


def test_values_past_the_end_of_a_row_are_not_read() -> None:
    memory = np.full(200, np.nan, np.float32)
    memory[:95] = 1.0
    w, x = memory[:76].reshape(4, 19), memory[76:95].reshape(1, 19)
    out = np.empty((1, 4), np.float32)
    PRODUCTS["this CPU"](w, x, np.zeros(1, np.int32), out)
    assert out.tolist() == [[19.0] * 4]


def test_wider_registers_take_more_of_the_work_at_once() -> None:
    assert choose_registers("+avx,+avx2,+avx512f") == Registers(16, 4)
    assert choose_registers("+avx,+avx2,-avx512f").lanes == 8
    assert choose_registers("+neon").lanes == 4
