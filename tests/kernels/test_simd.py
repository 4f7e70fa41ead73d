"""Tiles of the matrix product: one order of sums whatever the tile's shape or the registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import inline_jit
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.simd import (
    Registers,
    choose_registers,
    make_tile,
    tile_1x1,
    tile_4x1,
    tile_4x4,
)

Floats = NDArray[np.float32]
Product = Callable[[Floats, Floats, NDArray[np.int32], Floats], None]


def product_with(tile: Any, rows: int, tokens: int) -> Product:
    """out[p, r] by tiles of one kind; extents must be multiples of the tile's."""

    @inline_jit
    def product(w: Floats, x: Floats, row_of: NDArray[np.int32], out: Floats) -> None:
        k, pitch = w.shape[1], out.shape[1] * 4
        for p in range(0, out.shape[0], tokens):
            for r in range(0, out.shape[1], rows):
                tile(
                    address_of(w) + r * k * 4,
                    k * 4,
                    address_of(x),
                    k * 4,
                    address_of(row_of) + p * 4,
                    k,
                    address_of(out) + p * pitch + r * 4,
                    pitch,
                )

    return product


PRODUCTS: dict[str, Product] = {
    "4x4": product_with(tile_4x4, 4, 4),
    "4x1": product_with(tile_4x1, 4, 1),
    "1x1": product_with(tile_1x1, 1, 1),
    "4x4 avx512": product_with(make_tile(4, 4, Registers(16, 4)), 4, 4),
    "4x4 avx2": product_with(make_tile(4, 4, Registers(8, 2)), 4, 4),
    "4x4 sse": product_with(make_tile(4, 4, Registers(4, 2)), 4, 4),
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


@pytest.mark.parametrize("kind", PRODUCTS)
@settings(max_examples=12)
@given(k=st.integers(1, 70), seed=st.integers(0, 99))
def test_every_tile_sums_in_the_fixed_order(kind: str, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((8, k)).astype(np.float32)
    x = rng.standard_normal((5, k)).astype(np.float32)
    row_of = rng.integers(0, 5, 4).astype(np.int32)
    out = np.full((4, 8), np.nan, np.float32)
    PRODUCTS[kind](w, x, row_of, out)
    np.testing.assert_array_equal(out, fixed_order_dots(w, x[row_of]))


def test_values_past_the_end_of_a_row_are_not_read() -> None:
    w = np.full((4, 48), np.nan, np.float32)
    x = np.full((1, 48), np.nan, np.float32)
    w.ravel()[:76] = x.ravel()[:19] = 1.0
    out = np.empty((1, 4), np.float32)
    PRODUCTS["4x1"](w.ravel()[:76].reshape(4, 19), x[:, :19].copy(), np.zeros(1, np.int32), out)
    assert out.tolist() == [[19.0] * 4]


def test_wider_registers_take_more_of_the_work_at_once() -> None:
    assert choose_registers("+avx,+avx2,+avx512f") == Registers(16, 4)
    assert choose_registers("+avx,+avx2,-avx512f").lanes == 8
    assert choose_registers("+neon").lanes == 4
