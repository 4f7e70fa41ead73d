"""In which order a layer's experts are copied: what will probably be routed goes first.

Only the order of copies changes, and with it how many of them turn out to be unneeded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.experts.entries import ascending
from strata_cli.errors import ShapeError

FORESEEN_TOKENS = 2  # that the next layer's router foretells: 95 % or more of those are routed
LIKELY_TOKENS = 16.0  # expected: of the experts of another text's prompt 87 % or more are routed
BOLD_TOKENS = 8.0  # the same of a question, by the prompt of its document: 70 % are routed


def by_score(scores: NDArray[np.float32], *, finest: int = 0) -> NDArray[np.int64]:
    """Experts by falling score; equal ones by id.

    Args:
        scores: how much an expert is expected to be used, at least 0, [L, E].
        finest: 0 keeps the order exact. Otherwise a layer's experts fall into this many classes
            of equal size, with ids ascending within one: neighbours that stay neighbours are
            copied as one.

    Returns:
        per layer, all expert ids in the order in which to copy them, [L, E].

    Raises:
        ShapeError: scores is not [L, E], or finest is negative.
    """
    if scores.ndim != 2 or finest < 0:
        raise ShapeError(f"cannot order {scores.shape} scores in {finest} classes")
    order = ascending(_falling(scores))
    num_experts = scores.shape[1]
    num_classes = min(finest, num_experts)
    for number in range(num_classes):
        first, last = (-(-n * num_experts // num_classes) for n in (number, number + 1))
        order[:, first:last].sort(axis=1)
    return order


def _falling(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Numbers that fall as scores of at least 0 rise: their bits do as they do."""
    bits = np.ascontiguousarray(scores + np.float32(0), np.float32).view(np.int32)
    falling: NDArray[np.int64] = np.int64(0x7FFFFFFF) - bits
    return falling


def expected_use(
    last_counts: NDArray[np.integer] | None, profile: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Scores for a chunk: what the chunk before it used and what is used in general, alike.

    Args:
        last_counts: tokens that each expert had in the last chunk, [L, E]; None: there was none.
        profile: use of each expert in general, at least 0, [L, E].

    Returns:
        shares of a layer's use, [L, E].
    """
    score = _shares(profile.astype(np.float64))
    if last_counts is not None:
        score = score + _shares(last_counts.astype(np.float64))
    return score.astype(np.float32)


def count_likely(
    scores: NDArray[np.float32],
    is_streamed: NDArray[np.bool_],
    num_pairs: int,
    least_tokens: float = LIKELY_TOKENS,
) -> list[int]:
    """Of each layer's streamed experts, how many will almost certainly be routed.

    Args:
        scores: see expected_use(), [L, E].
        is_streamed: experts that are not resident, [L, E].
        num_pairs: of the chunk, tokens times experts of each.
        least_tokens: that must be expected of them.
    """
    expected = num_pairs * _shares(scores.astype(np.float64))
    counts: list[int] = ((expected >= least_tokens) & is_streamed).sum(axis=1).tolist()
    return counts


def oracle(counts: NDArray[np.integer]) -> NDArray[np.int64]:
    """The order of whoever knows the routing: routed experts first. For benchmarks.

    Args:
        counts: tokens that each expert will have, [L, E].
    """
    return by_score((counts > 0).astype(np.float32))


def _shares(use: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = use / np.maximum(use.sum(axis=1, keepdims=True), 1e-30)
    return shares
