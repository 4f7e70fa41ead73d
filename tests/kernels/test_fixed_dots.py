"""Dot products in fixed point: as exact as sums of float32, and the same whoever asks for rows."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.kernels.fixed_dots import UNIT_BYTES
from strata_cli.engine.kernels.fixed_types import (
    FIXED,
    NO_PRODUCT,
    can_multiply,
    fixed_product,
)
from strata_cli.engine.model.quants import QuantType, dequantize, row_bytes
from tests.kernels.lab import normal
from tests.kernels.packed import packed_rows

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
DIGITS = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)
DOTS = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)
GUARD = np.float32(12345.0)
TYPES = list(FIXED)

needs_vnni = pytest.mark.skipif(not can_multiply(), reason="no AVX-512 VNNI")


def dots(qtype: QuantType, packed: Bytes, x: Floats) -> Floats:
    """Rows that begin at any byte, with guards behind the digits and the last output."""
    product = fixed_product(qtype, x.size)
    pieces = x.size // product.weights
    nbytes = UNIT_BYTES + pieces * product.nbytes
    room = np.full(nbytes + 128, 77, np.uint8)
    start = -room.ctypes.data % 64
    DIGITS(product.digits)(x.ctypes.data, pieces, room.ctypes.data + start)
    assert (room[start + nbytes :] == 77).all()
    skewed, out = np.pad(packed.ravel(), (3, 0))[3:], np.full(len(packed) + 1, GUARD)
    rows = skewed.ctypes.data, packed.shape[1], len(packed)
    following = 0 if len(packed) % 2 else packed.ctypes.data  # changes nothing but when bytes come
    DOTS(product.dots)(*rows, room.ctypes.data + start, pieces, out.ctypes.data, following)
    assert out[-1] == GUARD
    return out[:-1]


@needs_vnni
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_dots_are_as_exact_as_float32_sums(qtype: QuantType) -> None:
    for rows, pieces in ((1, 1), (4, 3), (7, 10), (64, 5)):
        cols = pieces * FIXED[qtype].weights
        x, packed = normal(rows, 1, cols)[0], packed_rows(qtype, rows, cols, pieces)
        weights = dequantize(qtype, packed, cols)
        exact = weights.astype(np.float64) @ x.astype(np.float64)
        sizes = np.abs(weights.astype(np.float64)) @ np.abs(x.astype(np.float64))
        errors = np.abs(dots(qtype, packed, x) - exact)
        assert (errors <= 2.0**-22 * sizes).all()
        in_order = np.zeros(rows, np.float32)
        for column in range(cols):
            in_order += weights[:, column] * x[column]
        if rows == 64:
            assert errors.mean() < np.abs(in_order - exact).mean()


@needs_vnni
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_a_row_has_its_bits_whatever_its_neighbours(qtype: QuantType) -> None:
    cols = 2 * FIXED[qtype].weights
    x, packed = normal(1, 1, cols)[0], packed_rows(qtype, 11, cols, 1)
    whole = dots(qtype, packed, x)
    for first, last in ((0, 1), (3, 5), (4, 11)):
        np.testing.assert_array_equal(dots(qtype, packed[first:last], x), whole[first:last])


@needs_vnni
@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_each_place_of_a_row_meets_its_own_weight(qtype: QuantType) -> None:
    """A single activation leaves a weight, nearly: only the scale of x was rounded."""
    cols = 2 * FIXED[qtype].weights
    packed = packed_rows(qtype, 3, cols, 4)
    weights = dequantize(qtype, packed, cols)
    for place in range(0, cols, 7):
        x = np.zeros(cols, np.float32)
        x[place] = -2.5
        np.testing.assert_allclose(dots(qtype, packed, x), -2.5 * weights[:, place], rtol=1e-6)


@needs_vnni
def test_rows_without_a_magnitude_and_without_a_number() -> None:
    qtype, cols = QuantType.Q8_0, 128
    packed, x = packed_rows(qtype, 2, cols, 1), np.zeros(cols, np.float32)
    assert dots(qtype, packed, x).tolist() == [0.0, 0.0]
    for odd in (np.nan, np.inf):
        x[5] = odd
        assert np.isnan(dots(qtype, packed, x)).all()


def test_what_cannot_be_cut_into_pieces_is_left_to_others() -> None:
    assert fixed_product(QuantType.IQ4_NL, 32) == NO_PRODUCT
    assert fixed_product(QuantType.Q6_K, 256) == NO_PRODUCT
    assert row_bytes(QuantType.IQ4_NL, 128) == FIXED[QuantType.IQ4_NL].nbytes
