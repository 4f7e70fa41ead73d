"""Log-softmax and best tokens: against numpy, in a fixed order, and never NaN in a result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from strata_cli.engine.kernels.head import (
    argmax,
    log_softmax_reference,
    log_softmax_row,
    require_finite,
    top_k,
)
from strata_cli.errors import ShapeError, StrataError
from tests.kernels.lab import assert_close, normal

Floats = NDArray[np.float32]


@given(
    vocab_size=st.one_of(st.integers(1, 80), st.integers(4090, 4100), st.just(9001)),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=40)
def test_log_softmax_agrees_with_numpy(vocab_size: int, scale: float, seed: int) -> None:
    logits = normal(seed, vocab_size, scale=scale)
    assert_close(log_softmax_row(logits), log_softmax_reference(logits))


def test_a_full_vocabulary_sums_to_one() -> None:
    logits = normal(5, 248_320, scale=3.0)
    logprobs = log_softmax_row(logits)
    assert_close(logprobs, log_softmax_reference(logits))
    assert np.exp(logprobs.astype(np.float64)).sum() == pytest.approx(1.0, abs=2e-6)


@given(
    vocab_size=st.one_of(st.integers(1, 40), st.just(4099)),
    offset=st.integers(1, 15),
    seed=st.integers(0, 99),
)
@settings(max_examples=20)
def test_bits_do_not_depend_on_where_a_row_lies(vocab_size: int, offset: int, seed: int) -> None:
    logits = normal(seed, vocab_size, scale=5.0)
    moved = np.empty(vocab_size + offset, np.float32)[offset:]
    moved[:] = logits
    np.testing.assert_array_equal(log_softmax_row(moved), log_softmax_row(logits))


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
    for call in (argmax, require_finite, log_softmax_row, lambda row: top_k(row, 3)):
        with pytest.raises(StrataError, match=r"2 of 50 scores .* first at token 7"):
            call(values)


@pytest.mark.parametrize("k", [0, 6, -1])
def test_more_tokens_than_there_are_cannot_be_best(k: int) -> None:
    with pytest.raises(ShapeError, match=f"best {k} of 5"):
        top_k(np.zeros(5, np.float32), k)


@pytest.mark.parametrize("size", [511, 512, 5_000, 20_000])
@pytest.mark.parametrize("k", [1, 9, 100])
def test_the_best_of_runs_are_found_with_their_ties(size: int, k: int) -> None:
    random = np.random.default_rng(size)
    for values in (
        random.standard_normal(size).astype(np.float32),
        random.integers(0, 4, size).astype(np.float32),
        np.linspace(1, 0, size, dtype=np.float32),
    ):
        expected = np.argsort(-values, kind="stable")[:k]
        np.testing.assert_array_equal(top_k(values, k), expected)
