"""The rope table against libm, and the norm-and-turn kernel against plain numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.rope import HEAD_NORM_ROPE, head_norm_rope, rope_table
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
EPS = 1e-6


@given(
    position=st.integers(0, 5000), pair=st.integers(0, 15), theta=st.sampled_from([1e4, 1e6, 1e7])
)
@settings(max_examples=30)
def test_the_table_holds_cosine_and_sine_to_the_last_digit(
    position: int, pair: int, theta: float
) -> None:
    angle = position * theta ** (-2 * pair / 32)
    row = rope_table(position + 1, 32, theta)[position, pair]
    np.testing.assert_allclose(row, [math.cos(angle), math.sin(angle)], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("context", [1, 2, 255, 256, 257, 700])
def test_a_row_of_the_table_does_not_depend_on_its_length(context: int) -> None:
    table = rope_table(context, 10, 1e4)
    assert table.shape == (context, 5, 2)
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table, rope_table(1500, 10, 1e4)[:context])


def run(lab: Lab, src: Floats, weight: Floats, table: Floats, positions: Ints) -> Floats:
    out = lab.empty((*src.shape[:2], weight.size))
    heads, norm, turns, places = map(lab.put, (src, weight, table, positions))
    head_norm_rope(lab.stream, heads, norm, turns, places, EPS, out)
    return lab.get(out)


SHAPES = {
    "num_tokens": st.integers(1, 9),
    "num_heads": st.integers(1, 5),
    "half": st.integers(0, 17),
    "rest": st.integers(0, 40),
    "gap": st.integers(0, 33),
    "seed": st.integers(0, 999),
}


@given(**SHAPES)
@settings(max_examples=25)
def test_norm_and_turn_match_numpy(
    lab: Lab, num_tokens: int, num_heads: int, half: int, rest: int, gap: int, seed: int
) -> None:
    dim = max(1, 2 * half + rest)
    src = normal(seed, num_tokens, num_heads, dim + gap)
    weight = normal(seed + 1, dim)
    table = rope_table(300, 2 * half, 1e4)
    positions = np.random.default_rng(seed).integers(0, 300, num_tokens).astype(np.int32)
    expected = HEAD_NORM_ROPE.reference(src, weight, table, positions, EPS)
    assert_close(run(lab, src, weight, table, positions), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "dim", "gap", "rotary"), [(24, 256, 256, 64), (4, 128, 0, 64), (3, 37, 5, 10)]
)
def test_a_gpu_gives_the_hosts_bits(
    host_lab: Lab, gpu_lab: Lab, num_heads: int, dim: int, gap: int, rotary: int
) -> None:
    src, weight = normal(1, 11, num_heads, dim + gap), normal(2, dim)
    table = rope_table(4000, rotary, 1e7)
    positions = np.arange(3980, 3991, dtype=np.int32)
    host, gpu = (run(lab, src, weight, table, positions) for lab in (host_lab, gpu_lab))
    np.testing.assert_array_equal(gpu, host)


def test_bits_do_not_depend_on_cuts_neighbours_or_alignment(host_lab: Lab) -> None:
    src, weight, table = normal(1, 7, 3, 100), normal(2, 50), rope_table(40, 22, 1e4)
    positions = np.arange(20, 27, dtype=np.int32)
    whole = run(host_lab, src, weight, table, positions)
    for lab in (host_lab.cut([0.1, 0.5]), host_lab.skewed(4)):
        np.testing.assert_array_equal(run(lab, src, weight, table, positions), whole)
    alone = run(host_lab, src[3:4], weight, table, positions[3:4])
    np.testing.assert_array_equal(alone, whole[3:4])


def test_wrong_shapes_are_refused_by_name(lab: Lab) -> None:
    src, weight, table = lab.empty((2, 3, 16)), lab.empty((8,)), lab.empty((5, 4, 2))
    positions, out = lab.empty((2,), np.int32), lab.empty((2, 3, 8))
    with pytest.raises(ShapeError, match=r"positions: expected int32 \[2\]"):
        head_norm_rope(lab.stream, src, weight, table, lab.empty((2,)), EPS, out)
    with pytest.raises(ShapeError, match=r"rope: expected float32 \[5, 4, 2\]"):
        head_norm_rope(lab.stream, src, weight, lab.empty((5, 6, 2)), positions, EPS, out)
    with pytest.raises(ShapeError, match=r"src: expected float32 \[2, 3, 17\]"):
        head_norm_rope(lab.stream, src, lab.empty((17,)), table, positions, EPS, out)
