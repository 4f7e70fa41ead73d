"""Gated delta net kernels against plain numpy, and that no cut of the work changes a bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.delta_rule import DELTA_RULE, delta_rule
from strata_cli.engine.kernels.gdn import (
    CAUSAL_CONV_SILU,
    GATED_NORM,
    causal_conv_silu,
    gated_norm,
)
from strata_cli.engine.kernels.matmul import round_rows
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal
from tests.kernels.segments import CUTS, pieces

Floats = NDArray[np.float32]
EPS = 1e-6


def run_conv(
    lab: Lab, u: Floats, history: Floats, weight: Floats, cuts: Sequence[float] = ()
) -> tuple[Floats, Floats]:
    past, taps, outs = lab.put(history), lab.put(weight), []
    for piece in pieces(len(u), cuts):
        out = lab.empty(u[piece].shape)
        causal_conv_silu(lab.stream, lab.put(u[piece]), past, taps, out)
        outs.append(lab.get(out))
    return np.concatenate(outs), lab.get(past)


def conv_case(
    num_tokens: int, channels: int, num_taps: int, seed: int = 0
) -> tuple[Floats, Floats, Floats]:
    return (
        normal(seed, num_tokens, channels),
        normal(seed + 1, num_taps - 1, channels),
        normal(seed + 2, channels, num_taps),
    )


CONV_SHAPES = {
    "num_tokens": st.integers(1, 75),
    "channels": st.integers(1, 150),
    "num_taps": st.integers(1, 8),
    "seed": st.integers(0, 999),
}


@given(**CONV_SHAPES)
@settings(max_examples=20)
def test_convolution_matches_numpy(
    lab: Lab, num_tokens: int, channels: int, num_taps: int, seed: int
) -> None:
    case = conv_case(num_tokens, channels, num_taps, seed)
    out, history = run_conv(lab, *case)
    expected, expected_history = CAUSAL_CONV_SILU.reference(*case)
    assert_close(out, expected)
    np.testing.assert_array_equal(history, expected_history)


@given(**CONV_SHAPES, cuts=CUTS)
@settings(max_examples=20)
def test_convolution_of_a_cut_segment_has_the_same_bits(
    lab: Lab, num_tokens: int, channels: int, num_taps: int, seed: int, cuts: list[float]
) -> None:
    case = conv_case(num_tokens, channels, num_taps, seed)
    out, history = run_conv(lab, *case)
    cut_out, cut_history = run_conv(lab, *case, cuts)
    np.testing.assert_array_equal(cut_out, out)
    np.testing.assert_array_equal(cut_history, history)


def test_convolution_starts_from_zeros() -> None:
    u, _, weight = conv_case(5, 3, 4)
    out, _ = CAUSAL_CONV_SILU.reference(u, np.zeros((3, 3), np.float32), weight)
    first = u[0] * weight[:, -1]
    assert_close(out[0], first / (1 + np.exp(-first)))


Case = tuple[Floats, Floats, Floats, Floats, Floats, Floats, int]


def delta_case(num_tokens: int, num_keys: int, per_key: int, dim: int, seed: int = 0) -> Case:
    num_values = num_keys * per_key
    return (
        normal(seed, num_tokens, (2 * num_keys + num_values) * dim),
        normal(seed + 1, num_tokens, num_values),
        normal(seed + 2, num_tokens, num_values),
        -np.exp(normal(seed + 3, num_values)),
        normal(seed + 4, num_values),
        normal(seed + 5, num_values, dim, dim, scale=0.1),
        num_keys,
    )


def run_delta(lab: Lab, case: Case, cuts: Sequence[float] = ()) -> tuple[Floats, Floats]:
    c, alpha, beta, a, dt, state, num_keys = case
    matrix, rate, bias, outs = lab.put(state), lab.put(a), lab.put(dt), []
    for piece in pieces(len(c), cuts):
        rows, decay, write = (lab.put(part[piece]) for part in (c, alpha, beta))
        out = lab.empty((len(c[piece]), len(a) * state.shape[1]))
        delta_rule(lab.stream, rows, decay, write, rate, bias, matrix, out, num_keys, EPS)
        outs.append(lab.get(out))
    return np.concatenate(outs), lab.get(matrix)


DELTA_SHAPES = {
    "num_tokens": st.integers(1, 20),
    "num_keys": st.integers(1, 3),
    "per_key": st.integers(1, 3),
    "dim": st.sampled_from([1, 5, 16, 24, 32, 64, 77, 128]),
    "seed": st.integers(0, 999),
}


@given(**DELTA_SHAPES)
@settings(max_examples=20)
def test_delta_rule_matches_numpy(
    lab: Lab, num_tokens: int, num_keys: int, per_key: int, dim: int, seed: int
) -> None:
    case = delta_case(num_tokens, num_keys, per_key, dim, seed)
    out, state = run_delta(lab, case)
    expected, expected_state = DELTA_RULE.reference(*case, EPS)
    assert_close(out, expected)
    assert_close(state, expected_state)


@given(**DELTA_SHAPES, cuts=CUTS)
@settings(max_examples=20)
def test_delta_rule_over_a_cut_segment_has_the_same_bits(
    lab: Lab,
    num_tokens: int,
    num_keys: int,
    per_key: int,
    dim: int,
    seed: int,
    cuts: list[float],
) -> None:
    case = delta_case(num_tokens, num_keys, per_key, dim, seed)
    out, state = run_delta(lab, case)
    cut_out, cut_state = run_delta(lab, case, cuts)
    np.testing.assert_array_equal(cut_out, out)
    np.testing.assert_array_equal(cut_state, state)


def test_a_value_head_uses_the_key_head_of_its_remainder(lab: Lab) -> None:
    case = delta_case(6, 2, 2, 32)
    before, _ = run_delta(lab, case)
    case[0][:, 2 * 32 : 3 * 32] += 1.0  # the first key head's keys
    after, _ = run_delta(lab, case)
    changed = (before != after).reshape(6, 4, 32).any(axis=(0, 2))
    np.testing.assert_array_equal(changed, [True, False, True, False])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_the_full_width_delta_rule_matches_numpy_however_it_is_cut(
    gpu_lab: Lab, num_tokens: int
) -> None:
    case = delta_case(num_tokens, 16, 3, 128)
    out, state = run_delta(gpu_lab, case)
    expected, expected_state = DELTA_RULE.reference(*case, EPS)
    assert_close(out, expected)
    assert_close(state, expected_state)
    for cuts in ([0.02, 0.5], [0.25, 0.26, 0.98]):
        cut_out, cut_state = run_delta(gpu_lab, case, cuts)
        np.testing.assert_array_equal(cut_out, out)
        np.testing.assert_array_equal(cut_state, state)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "channels", "num_taps"), [(1, 10_240, 4), (97, 131, 7)])
def test_a_gpu_convolves_as_the_host_does(
    host_lab: Lab, gpu_lab: Lab, num_tokens: int, channels: int, num_taps: int
) -> None:
    case = conv_case(num_tokens, channels, num_taps)
    (out, history), (expected, expected_history) = (
        run_conv(lab, *case) for lab in (gpu_lab, host_lab)
    )
    assert_close(out, expected)
    np.testing.assert_array_equal(history, expected_history)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "dim"), [(3, 128), (97, 128), (5, 77), (2, 200)])
def test_a_gpu_norms_each_token_alone(gpu_lab: Lab, num_tokens: int, dim: int) -> None:
    o, z, weight = normal(1, num_tokens, 6 * dim), normal(2, num_tokens, 6 * dim), normal(3, dim)
    whole = run_norm(gpu_lab, o, z, weight)
    assert_close(whole, GATED_NORM.reference(o, z, weight, EPS))
    np.testing.assert_array_equal(run_norm(gpu_lab, o[1:2], z[1:2], weight), whole[1:2])


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [128, 77])
def test_a_gpus_norm_also_writes_what_products_read(gpu_lab: Lab, dim: int) -> None:
    o, z, weight = normal(1, 9, 6 * dim), normal(2, 9, 6 * dim), normal(3, dim, scale=1e5)
    out, rounded = gpu_lab.empty(o.shape), gpu_lab.empty(o.shape, np.float16)
    heads, gates, norm = (gpu_lab.put(values) for values in (o, z, weight))
    gated_norm(gpu_lab.stream, heads, gates, norm, EPS, out, rounded)
    expected = gpu_lab.empty(o.shape, np.float16)
    round_rows(gpu_lab.stream, out, expected)
    np.testing.assert_array_equal(gpu_lab.get(rounded), gpu_lab.get(expected))


def run_norm(lab: Lab, o: Floats, z: Floats, weight: Floats) -> Floats:
    out = lab.empty(o.shape)
    gated_norm(lab.stream, lab.put(o), lab.put(z), lab.put(weight), EPS, out)
    return lab.get(out)


@given(
    num_tokens=st.integers(1, 9),
    num_heads=st.integers(1, 5),
    dim=st.integers(1, 70),
    seed=st.integers(0, 999),
)
@settings(max_examples=20)
def test_gated_norm_matches_numpy(
    lab: Lab, num_tokens: int, num_heads: int, dim: int, seed: int
) -> None:
    o, z = normal(seed, num_tokens, num_heads * dim), normal(seed + 1, num_tokens, num_heads * dim)
    weight = normal(seed + 2, dim)
    assert_close(run_norm(lab, o, z, weight), GATED_NORM.reference(o, z, weight, EPS))


@pytest.mark.parametrize("points", [[0.1], [0.5, 0.6], [0.3, 0.31, 0.9]])
def test_pieces_of_a_launch_give_the_same_bits(host_lab: Lab, points: list[float]) -> None:
    conv, delta = conv_case(40, 150, 4), delta_case(7, 2, 3, 48)
    for whole, cut in (
        (run_conv(host_lab, *conv), run_conv(host_lab.cut(points), *conv)),
        (run_delta(host_lab, delta), run_delta(host_lab.cut(points), delta)),
    ):
        np.testing.assert_array_equal(cut[0], whole[0])
        np.testing.assert_array_equal(cut[1], whole[1])


def test_alignment_changes_no_bit(host_lab: Lab) -> None:
    conv, delta = conv_case(9, 70, 3), delta_case(5, 1, 2, 40)
    skewed = host_lab.skewed(4)
    np.testing.assert_array_equal(run_conv(skewed, *conv)[0], run_conv(host_lab, *conv)[0])
    np.testing.assert_array_equal(run_delta(skewed, delta)[0], run_delta(host_lab, delta)[0])


def test_shapes_that_do_not_fit_are_named(lab: Lab) -> None:
    u, history, weight = (lab.put(part) for part in conv_case(4, 6, 4))
    with pytest.raises(ShapeError, match=r"causal_conv_silu history: expected float32 \[3, 6\]"):
        causal_conv_silu(lab.stream, u, history.rows(0, 2), weight, u)
    c, alpha, beta, a, dt, state = (lab.put(part) for part in delta_case(2, 1, 2, 8)[:6])
    with pytest.raises(ShapeError, match=r"delta_rule c: expected float32 \[2, 48\]"):
        delta_rule(lab.stream, c, alpha, beta, a, dt, state, c, 2, EPS)
