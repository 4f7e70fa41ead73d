"""One sequence's tokens in consecutive calls: kernels with a history must not notice the cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st

CUTS = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=3)


def pieces(num_tokens: int, cuts: Sequence[float]) -> list[slice]:
    """The tokens of each call, cut at these shares of them."""
    edges = sorted({0, num_tokens, *(int(cut * num_tokens) for cut in cuts)})
    return [slice(first, last) for first, last in pairwise(edges)]
