"""FNV-1a against its published test vectors and a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.kernels.hash import FNV_OFFSET, fnv1a64
from strata_cli.errors import ShapeError


def plain(data: bytes, digest: int = FNV_OFFSET) -> int:
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) % 2**64
    return digest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),
        (b"foobar", 0x85944171F73967E8),
    ],
)
def test_published_vectors(text: bytes, expected: int) -> None:
    assert fnv1a64(np.frombuffer(text, np.uint8)) == expected


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_pieces_hash_as_the_whole(data: bytes, cut: int) -> None:
    first, second = (np.frombuffer(part, np.uint8) for part in (data[:cut], data[cut:]))
    assert fnv1a64(second, fnv1a64(first)) == plain(data)


def test_arrays_of_any_type_and_shape_hash_by_their_bytes() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert fnv1a64(values) == plain(values.tobytes())
    assert fnv1a64(values[:0]) == FNV_OFFSET


def test_arrays_with_gaps_are_refused() -> None:
    with pytest.raises(ShapeError, match="not contiguous"):
        fnv1a64(np.zeros((4, 4), np.uint8)[:, 1])
