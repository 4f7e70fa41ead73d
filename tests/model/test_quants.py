from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.model.quants import BLOCK, QuantType, dequantize, grid, row_bytes
from strata_cli.errors import ShapeError
from tests.model.oracle import ORACLE
from tests.model.random_weights import random_rows

with np.load(ORACLE / "dequant.npz") as _stored:
    DEQUANT = {key: _stored[key] for key in _stored.files}
TYPES = sorted(key.removesuffix(".type_id") for key in DEQUANT if key.endswith(".type_id"))


def half(value: float) -> list[int]:
    return list(struct.pack("<e", value))


def block_of(head: list[int], codes: list[int]) -> NDArray[np.uint8]:
    return np.array([head + codes], dtype=np.uint8)


def test_the_reference_covers_twenty_five_types() -> None:
    assert len(TYPES) == 25


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_ggml_bit_for_bit(name: str) -> None:
    qtype = QuantType[name]
    assert DEQUANT[f"{name}.type_id"] == qtype
    for kind in ("", "random_"):
        if f"{name}.{kind}bytes" in DEQUANT:
            expected = DEQUANT[f"{name}.{kind}values"]
            values = dequantize(qtype, DEQUANT[f"{name}.{kind}bytes"], expected.shape[1])
            assert values.dtype == np.float32
            assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_f32_rows_are_taken_as_they_are() -> None:
    values = np.array([[1.5, -0.0, 3e-42]], dtype=np.float32)
    assert dequantize(QuantType.F32, values.view(np.uint8), 3).tobytes() == values.tobytes()


def test_q1_0_bits_are_signs_lowest_bit_first() -> None:
    block = block_of(half(0.75), [0b00000101, *[0] * 14, 0b10000000])
    expected = np.full(128, -0.75, dtype=np.float32)
    expected[[0, 2, 127]] = 0.75
    assert np.array_equal(dequantize(QuantType.Q1_0, block, 128)[0], expected)


def test_q2_0_codes_mean_minus_one_to_two_lowest_bits_first() -> None:
    block = block_of(half(0.5), [0b11_10_01_00, *[0b01_01_01_01] * 14, 0b00_01_01_01])
    expected = np.zeros(64, dtype=np.float32)
    expected[[0, 2, 3, 63]] = [-0.5, 0.5, 1.0, -0.5]
    assert np.array_equal(dequantize(QuantType.Q2_0, block, 64)[0], expected)


def test_nvfp4_has_a_scale_per_sixteen_weights_low_nibbles_first() -> None:
    # Scales: 0x38 is 1, 0x40 is 2, 0x01 the smallest subnormal (2**-9), 0 is 0.
    codes = [0x21, *[0] * 6, 0x0F, 0x07, *[0] * 7, 0x70, *[0] * 7, *[0xFF] * 8]
    values = dequantize(QuantType.NVFP4, block_of([0x38, 0x40, 0x01, 0x00], codes), 64)[0]
    expected = np.zeros(64, dtype=np.float32)
    expected[[0, 8, 7]] = [0.5, 1.0, -6.0]
    expected[16] = 12.0
    expected[40] = 6 * 2.0**-9
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("qtype", list(QuantType))
def test_rows_are_independent_of_each_other(qtype: QuantType) -> None:
    rows = random_rows(np.random.default_rng(3), qtype, 3, 512, std=0.5)
    together = dequantize(qtype, rows, 512)
    assert rows.shape == (3, row_bytes(qtype, 512))
    assert np.isfinite(together).all()
    for index in range(3):
        alone = dequantize(qtype, rows[index : index + 1], 512)
        assert np.array_equal(together[index : index + 1], alone)


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES

    known = {int(qtype): tuple(size) for qtype, size in GGML_QUANT_SIZES.items()}
    ours = {int(qtype): tuple(layout) for qtype, layout in BLOCK.items()}
    assert set(BLOCK) == set(QuantType)
    assert {key: known.get(key, size) for key, size in ours.items()} == ours
    assert set(ours) - set(known) <= {int(QuantType.Q2_0)}


@pytest.mark.parametrize("cols", [0, -32, 33, 31])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(cols: int) -> None:
    with pytest.raises(ShapeError, match="Q8_0"):
        row_bytes(QuantType.Q8_0, cols)


def test_bytes_of_the_wrong_width_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[rows, 34\]"):
        dequantize(QuantType.Q8_0, np.zeros((2, 33), dtype=np.uint8), 32)


def test_code_books_have_their_format_s_size() -> None:
    shapes = {
        qtype.name: grid(qtype).shape
        for qtype in QuantType
        if qtype.name.startswith("IQ") or qtype in (QuantType.MXFP4, QuantType.NVFP4)
    }
    assert shapes == {
        "IQ1_S": (2048, 8),
        "IQ1_M": (2048, 8),
        "IQ2_XXS": (256, 8),
        "IQ2_XS": (512, 8),
        "IQ2_S": (1024, 8),
        "IQ3_XXS": (256, 4),
        "IQ3_S": (512, 4),
        "IQ4_NL": (16, 1),
        "IQ4_XS": (16, 1),
        "MXFP4": (16, 1),
        "NVFP4": (16, 1),
    }
    assert not grid(QuantType.IQ3_S).flags.writeable


def test_a_type_without_a_code_book_says_so() -> None:
    with pytest.raises(ShapeError, match="Q4_0 has no code book"):
        grid(QuantType.Q4_0)
