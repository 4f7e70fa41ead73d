"""Dot products that decode in registers: the bits of decoded rows that are multiplied in tiles."""

from __future__ import annotations

import ctypes
from typing import Any

import numba
import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.kernels import dequant_blocks, dequant_books
from strata_cli.engine.kernels.dequant import dequantizer
from strata_cli.engine.kernels.jit import intrinsic, nogil_jit
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.row_dots import DOTS_SIGNATURE, emit_dots, has_dots
from strata_cli.engine.kernels.simd import multiply_rows
from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize
from tests.kernels.lab import normal
from tests.kernels.packed import packed_rows

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
DOTS = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 7)
TYPES = [qtype for qtype in QuantType if has_dots(BLOCK[qtype])]
# Otherwise decoded on others than this processor.
BY_PROCESSOR = ["IQ3_XXS", "IQ4_NL", "IQ4_XS", "MXFP4", "Q4_K", "Q6_K"]
GUARD = np.float32(12345.0)


@nogil_jit
def _tiles(weights: Floats, x: Floats, row_of: NDArray[np.int32], out: Floats) -> None:
    rows, cols = weights.shape
    addresses = address_of(x), cols, address_of(row_of), 1, address_of(out), rows * 4
    multiply_rows(address_of(weights), cols * 4, rows, *addresses)


def tiles(weights: Floats, x: Floats) -> Floats:
    out = np.empty((1, len(weights)), np.float32)
    _tiles(weights, x, np.zeros(1, np.int32), out)
    first: Floats = out[0]
    return first


def dots(function: int, table: int, qtype: QuantType, packed: Bytes, x: Floats) -> Floats:
    """Rows that begin at any byte, with a guard behind the last output."""
    skewed = np.pad(packed.ravel(), (3, 0))[3:]
    out = np.full(len(packed) + 1, GUARD)
    shape = packed.shape[1], len(packed), x.ctypes.data, x.size // BLOCK[qtype].weights
    DOTS(function)(skewed.ctypes.data, *shape, table, out.ctypes.data)
    assert out[-1] == GUARD
    return out[:-1]


@pytest.mark.parametrize("qtype", TYPES, ids=lambda qtype: qtype.name)
def test_a_dot_has_the_bits_of_the_decoded_product(qtype: QuantType) -> None:
    decoder = dequantizer(qtype)
    for rows, blocks in ((1, 1), (4, 3), (7, 10)):
        cols = blocks * BLOCK[qtype].weights
        x, packed = normal(rows, 1, cols), packed_rows(qtype, rows, cols, blocks)
        expected = tiles(dequantize(qtype, packed, cols), x)
        actual = dots(decoder.dots, decoder.table, qtype, packed, x)
        np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", BY_PROCESSOR)
def test_a_plain_processor_gets_the_same_bits(name: str) -> None:
    qtype = QuantType[name]
    owner = dequant_books if hasattr(dequant_books, name.lower()) else dequant_blocks
    decode: Any = getattr(owner, name.lower())

    @intrinsic
    def plain(
        _typing: Any, _row: Any, _stride: Any, _rows: Any, _x: Any, _n: Any, _book: Any, _out: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            emit_dots(builder, args, decode, BLOCK[qtype], "")
            return context.get_dummy_value()

        return DOTS_SIGNATURE, generate

    def loop(row: int, stride: int, rows: int, x: int, blocks: int, book: int, out: int) -> None:
        plain(row, stride, rows, x, blocks, book, out)

    compiled: Any = numba.cfunc(DOTS_SIGNATURE, error_model="numpy")(loop)
    decoder = dequantizer(qtype)
    cols = 3 * BLOCK[qtype].weights
    x, packed = normal(1, 1, cols), packed_rows(qtype, 5, cols, 2)
    expected = dots(decoder.dots, decoder.table, qtype, packed, x)
    actual = dots(compiled.address, decoder.table, qtype, packed, x)
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
