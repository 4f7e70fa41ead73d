"""The n-gram embedding's kernels against plain Python and numpy, and independence of the cuts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels.ngram import (
    GATHER_ROWS,
    NGRAM_CONV,
    NGRAM_GATE,
    NGRAM_ROWS,
    gather_rows,
    ngram_conv,
    ngram_gate,
    ngram_rows,
)
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal
from tests.kernels.segments import CUTS, pieces

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
EPS = 1e-6
EOS = 3
Hash = tuple[Longs, Longs, Longs]


def hash_case(max_n: int, per_n: int, seed: int) -> Hash:
    rng = np.random.default_rng(seed)
    heads = (max_n - 1) * per_n
    sizes = rng.integers(1, 2**31, heads)
    return rng.integers(0, 2**62, max_n), np.cumsum(sizes) - sizes, sizes


def run_rows(
    lab: Lab, ids: Ints, history: Ints, constants: Hash, cuts: Sequence[float] = ()
) -> tuple[Longs, Ints]:
    past, outs = lab.put(history), []
    multipliers, offsets, sizes = map(lab.put, constants)
    for piece in pieces(len(ids), cuts):
        out = lab.empty((len(ids[piece]), constants[1].size), np.int64)
        tokens = lab.put(ids[piece])
        ngram_rows(lab.stream, tokens, past, multipliers, offsets, sizes, EOS, out)
        outs.append(lab.get(out))
    return np.concatenate(outs), lab.get(past)


@given(
    ids=st.lists(st.integers(0, 9) | st.integers(0, 250_000), min_size=1, max_size=40),
    max_n=st.integers(2, 8),
    per_n=st.integers(1, 3),
    seed=st.integers(0, 999),
    cuts=CUTS,
)
@settings(max_examples=60)
def test_rows_match_exact_integers_however_the_tokens_are_cut(
    lab: Lab, ids: list[int], max_n: int, per_n: int, seed: int, cuts: list[float]
) -> None:
    tokens, history = np.array(ids, np.int32), np.full(max_n - 1, EOS, np.int32)
    constants = hash_case(max_n, per_n, seed)
    expected, expected_history = NGRAM_ROWS.reference(tokens, history, *constants, EOS)
    for how in ((), cuts):
        rows, after = run_rows(lab, tokens, history, constants, how)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(after, expected_history)


def test_products_wrap_at_64_bits(lab: Lab) -> None:
    constants = (
        np.array([2**63 - 25, -7], np.int64),
        np.array([10], np.int64),
        np.array([2**40 + 15], np.int64),
    )
    rows, _ = run_rows(lab, np.array([5, 250_000], np.int32), np.array([EOS], np.int32), constants)
    first = (5 * (2**63 - 25) % 2**64) ^ (EOS * (2**64 - 7) % 2**64)
    second = (250_000 * (2**63 - 25) % 2**64) ^ (5 * (2**64 - 7) % 2**64)
    assert rows[:, 0].tolist() == [10 + n % (2**40 + 15) for n in (first, second)]


def test_eos_cuts_for_later_tokens_only(lab: Lab) -> None:
    constants = (
        np.array([1, 1000, 1_000_000], np.int64),
        np.zeros(2, np.int64),
        np.full(2, 2**40, np.int64),
    )
    ids = np.array([7, 8, EOS, 9, 11], np.int32)
    rows, _ = run_rows(lab, ids, np.array([EOS, EOS], np.int32), constants)

    def row(*context: int) -> list[int]:
        bigram = context[0] ^ context[1] * 1000
        return [bigram, bigram ^ context[2] * 1_000_000]

    assert rows.tolist() == [
        row(7, EOS, EOS),
        row(8, 7, EOS),
        row(EOS, 8, 7),
        row(9, EOS, EOS),
        row(11, 9, EOS),
    ]


@pytest.mark.parametrize("qtype", [QuantType.F32, QuantType.F16, QuantType.Q4_0, QuantType.IQ4_NL])
def test_gathered_rows_are_the_decoded_ones(lab: Lab, qtype: QuantType) -> None:
    width = 3 * max(BLOCK[qtype].weights, 5) if BLOCK[qtype].weights == 1 else 96
    rng = np.random.default_rng(int(qtype))
    table = rng.integers(0, 60, (50, row_bytes(qtype, width)), dtype=np.uint8)
    rows = rng.integers(0, 50, (5, 4))
    weight, out = Weight(lab.put(table), qtype, 50, width), lab.empty((5, 4 * width))
    gather_rows(lab.stream, lab.put(rows), weight, out)
    expected = GATHER_ROWS.reference(rows, table, qtype, width)
    np.testing.assert_array_equal(lab.get(out), expected)


SHAPES = {
    "num_tokens": st.integers(1, 70),
    "num_streams": st.integers(2, 5),
    "size": st.integers(1, 70),
    "seed": st.integers(0, 999),
}


def run_gate(lab: Lab, key: Floats, value: Floats, x: Floats, w: Floats) -> Floats:
    out = lab.empty(key.shape)
    w_key, w_query = map(lab.put, w)
    keys, values, streams = map(lab.put, (key, value, x))
    ngram_gate(lab.stream, keys, values, streams, w_key, w_query, EPS, out)
    return lab.get(out)


@given(**SHAPES)
@settings(max_examples=25)
def test_gate_matches_numpy_and_depends_on_its_token_alone(
    lab: Lab, num_tokens: int, num_streams: int, size: int, seed: int
) -> None:
    x, value = normal(seed, num_tokens, num_streams, size), normal(seed + 1, num_tokens, size)
    key, w = (
        normal(seed + 2, num_tokens, num_streams * size),
        normal(seed + 3, 2, num_streams * size),
    )
    out = run_gate(lab, key, value, x, w)
    assert_close(out, NGRAM_GATE.reference(key, value, x, *w, EPS))
    alone = run_gate(lab, key[-1:], value[-1:], x[-1:], w)
    np.testing.assert_array_equal(alone, out[-1:])


def test_gate_of_orthogonal_key_and_query_is_one_half(lab: Lab) -> None:
    key, x = np.zeros((1, 4), np.float32), np.ones((1, 2, 2), np.float32)
    out = run_gate(lab, key, np.full((1, 2), 3.0, np.float32), x, np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(out, np.full((1, 4), 1.5))


ConvCase = tuple[Floats, Floats, Floats, Floats, int, Floats]


def conv_case(
    num_tokens: int, num_streams: int, size: int, num_taps: int, dilation: int, seed: int
) -> ConvCase:
    channels = num_streams * size
    return (
        normal(seed, num_tokens, channels),
        normal(seed + 1, channels),
        normal(seed + 2, (num_taps - 1) * dilation, channels),
        normal(seed + 3, channels, num_taps),
        dilation,
        normal(seed + 4, num_tokens, num_streams, size),
    )


def run_conv(lab: Lab, case: ConvCase, cuts: Sequence[float] = ()) -> tuple[Floats, Floats]:
    gated, w_conv, history, weight, dilation, x = case
    past, norm, taps, outs = lab.put(history), lab.put(w_conv), lab.put(weight), []
    for piece in pieces(len(x), cuts):
        streams: Tensor = lab.put(x[piece])
        ngram_conv(lab.stream, lab.put(gated[piece]), norm, past, taps, dilation, EPS, streams)
        outs.append(lab.get(streams))
    return np.concatenate(outs), lab.get(past)


@given(**SHAPES, num_taps=st.integers(1, 8), dilation=st.integers(1, 8), cuts=CUTS)
@settings(max_examples=40)
def test_convolution_matches_numpy_however_the_tokens_are_cut(
    lab: Lab,
    num_tokens: int,
    num_streams: int,
    size: int,
    seed: int,
    num_taps: int,
    dilation: int,
    cuts: list[float],
) -> None:
    case = conv_case(num_tokens, num_streams, size, num_taps, dilation, seed)
    x, history = run_conv(lab, case)
    expected, expected_history = NGRAM_CONV.reference(*case[:5], EPS, case[5])
    assert_close(x, expected)
    assert_close(history, expected_history)
    cut_x, cut_history = run_conv(lab, case, cuts)
    np.testing.assert_array_equal(cut_x, x)
    np.testing.assert_array_equal(cut_history, history)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 2560), (45, 130), (200, 300)])
def test_a_gpu_agrees_with_the_host_and_with_itself(
    host_lab: Lab, gpu_lab: Lab, num_tokens: int, size: int
) -> None:
    case = conv_case(num_tokens, 4, size, 4, 3, seed=1)
    value, w = normal(9, num_tokens, size), normal(10, 2, 4 * size)
    host, gpu = (
        [*run_conv(lab, case), run_gate(lab, case[0], value, case[5], w)]
        for lab in (host_lab, gpu_lab)
    )
    for actual, expected in zip(gpu, host, strict=True):
        assert_close(actual, expected)
    last = slice(num_tokens - 1, None)
    alone = run_gate(gpu_lab, case[0][last], value[last], case[5][last], w)
    np.testing.assert_array_equal(alone, gpu[-1][last])
    cut = run_conv(gpu_lab, case, [0.1, 0.9])
    for actual, expected in zip(cut, gpu, strict=False):
        np.testing.assert_array_equal(actual, expected)


def test_pieces_of_a_launch_and_alignment_change_no_bit(host_lab: Lab) -> None:
    case = conv_case(40, 4, 33, 4, 3, seed=1)
    key, value, w = case[0], normal(9, 40, 33), normal(10, 2, 4 * 33)
    whole, history = run_conv(host_lab, case)
    gate = run_gate(host_lab, key, value, case[5], w)
    for lab in (host_lab.cut([0.3, 0.8]), host_lab.skewed(4)):
        np.testing.assert_array_equal(run_conv(lab, case)[0], whole)
        np.testing.assert_array_equal(run_conv(lab, case)[1], history)
        np.testing.assert_array_equal(run_gate(lab, key, value, case[5], w), gate)


def test_wrong_shapes_are_refused_by_name(lab: Lab) -> None:
    ids, history = lab.empty((4,), np.int32), lab.empty((2,), np.int32)
    longs, out = lab.empty((3,), np.int64), lab.empty((4, 3), np.int64)
    with pytest.raises(ShapeError, match=r"ngram_rows offsets: expected int64 \[2\]"):
        ngram_rows(lab.stream, ids, history, longs, longs, longs, EOS, out)
    table = Weight(lab.empty((10, 32)), QuantType.F32, 10, 32)
    with pytest.raises(ShapeError, match=r"gather_rows out: expected float32 \[4, 96\]"):
        gather_rows(lab.stream, out, table, lab.empty((4, 95)))
    gated, norm, x = lab.empty((2, 16)), lab.empty((16,)), lab.empty((2, 2, 8))
    with pytest.raises(ShapeError, match=r"ngram_conv history: expected float32 \[9, 16\]"):
        ngram_conv(lab.stream, gated, norm, gated, lab.empty((16, 4)), 3, EPS, x)
