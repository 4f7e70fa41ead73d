"""Log-softmax and best tokens: against numpy, in a fixed order, and never NaN in a result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from strata_cli.engine.kernels.head import LOG_SOFTMAX, argmax, log_softmax, require_finite, top_k
from strata_cli.errors import ShapeError, StrataError
from tests.kernels.lab import Lab, assert_close, normal

Floats = NDArray[np.float32]


def run_log_softmax(lab: Lab, logits: Floats) -> Floats:
    out = lab.empty(logits.shape)
    log_softmax(lab.stream, lab.put(logits), out)
    return lab.get(out)


@given(
    num_rows=st.integers(1, 4),
    vocab_size=st.one_of(st.integers(1, 80), st.integers(4090, 4100), st.just(9001)),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_log_softmax_agrees_with_numpy(
    lab: Lab, num_rows: int, vocab_size: int, scale: float, seed: int
) -> None:
    logits = normal(seed, num_rows, vocab_size, scale=scale)
    assert_close(run_log_softmax(lab, logits), LOG_SOFTMAX.reference(logits))


def test_a_full_vocabulary_sums_to_one(lab: Lab) -> None:
    logits = normal(5, 1, 248_320, scale=3.0)
    logprobs = run_log_softmax(lab, logits)
    assert_close(logprobs, LOG_SOFTMAX.reference(logits))
    assert np.exp(logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=2e-6)


def test_log_softmax_may_overwrite_its_input(lab: Lab) -> None:
    logits = normal(1, 3, 5000)
    tensor = lab.put(logits)
    log_softmax(lab.stream, tensor, tensor)
    np.testing.assert_array_equal(lab.get(tensor), run_log_softmax(lab, logits))


@given(
    num_rows=st.integers(1, 5),
    vocab_size=st.one_of(st.integers(1, 40), st.just(4099)),
    points=st.lists(st.floats(0, 1), max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_bits_do_not_depend_on_cuts_neighbours_or_alignment(
    host_lab: Lab, num_rows: int, vocab_size: int, points: list[float], seed: int
) -> None:
    logits = normal(seed, num_rows, vocab_size, scale=5.0)
    whole = run_log_softmax(host_lab, logits)
    for lab in (host_lab.cut(points), host_lab.skewed(4), host_lab.skewed(12)):
        np.testing.assert_array_equal(run_log_softmax(lab, logits), whole)
    for row in range(num_rows):
        alone = run_log_softmax(host_lab, logits[row : row + 1])
        np.testing.assert_array_equal(alone[0], whole[row])


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 248_320), (3, 4097), (2, 31), (1, 1)])
def test_a_gpu_gives_the_hosts_bits(
    host_lab: Lab, gpu_lab: Lab, num_rows: int, vocab_size: int
) -> None:
    logits = normal(7, num_rows, vocab_size, scale=5.0)
    np.testing.assert_array_equal(
        run_log_softmax(gpu_lab, logits), run_log_softmax(host_lab, logits)
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_logit_breaks_its_whole_row_and_no_other(lab: Lab, bad: float) -> None:
    logits = normal(2, 3, 33)
    logits[1, 32] = bad
    logprobs = run_log_softmax(lab, logits)
    assert np.isnan(logprobs[1]).all()
    assert np.isfinite(logprobs[[0, 2]]).all()


@given(
    values=arrays(np.float32, st.integers(1, 60), elements=st.integers(-3, 3).map(np.float32)),
    k=st.integers(1, 60),
)
def test_best_tokens_are_those_of_a_stable_sort(values: Floats, k: int) -> None:
    k = min(k, values.size)
    expected = sorted(range(values.size), key=lambda token: (-values[token], token))[:k]
    assert top_k(values, k).tolist() == expected
    assert argmax(values) == expected[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_an_error_with_their_place(bad: float) -> None:
    values = np.zeros(50, np.float32)
    values[[7, 9]] = bad
    for call in (lambda: top_k(values, 3), lambda: argmax(values), lambda: require_finite(values)):
        with pytest.raises(StrataError, match=r"2 of 50 scores .* first at token 7"):
            call()


@pytest.mark.parametrize("k", [0, 6, -1])
def test_more_tokens_than_there_are_cannot_be_best(k: int) -> None:
    with pytest.raises(ShapeError, match=f"best {k} of 5"):
        top_k(np.zeros(5, np.float32), k)


def test_wrong_shapes_are_refused_by_name(lab: Lab) -> None:
    with pytest.raises(ShapeError, match=r"out: expected float32 \[2, 8\]"):
        log_softmax(lab.stream, lab.empty((2, 8)), lab.empty((2, 9)))
    with pytest.raises(ShapeError, match="expected 2 extents"):
        log_softmax(lab.stream, lab.empty((8,)), lab.empty((8,)))
