"""Who computes which pair of a window, against plain Python; every cut and every device alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.splitting import (
    MOST_PAIRS,
    SHARES,
    Coming,
    SlotRange,
    clear_rows,
    clear_rows_reference,
    count_dropped,
    split_pairs,
    split_pairs_reference,
)
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, normal

Ints = NDArray[np.int32]
I32 = np.int32
SLOTS = SlotRange(1 << 40, (1 << 40) + 1000)


def addresses(is_hit: list[bool] | NDArray[np.bool_]) -> NDArray[np.int64]:
    return np.where(is_hit, SLOTS.first + 5, SLOTS.end)


def run(
    lab: Lab,
    ids: Ints,
    blobs: NDArray[np.int64],
    share: int,
    least_dropped: int,
    coming: list[int] | None = None,
) -> list[list[int]]:
    """Those that come have begun to: of three parts the first one. One more is listed."""
    places = lab.empty(ids.shape, I32)
    link_share = lab.put(np.array([share], I32))
    who = None
    if coming is not None:
        claimed = [max(3 * len(coming) - 2, 0)]
        numbers = (claimed, [len(coming) + 1], [*coming, ids[-1, -1], 7])
        some, count, experts = (lab.put(np.array(each, I32)) for each in numbers)
        who = Coming(some, count, experts, 3)
    operands = lab.put(ids), lab.put(blobs), link_share, SLOTS, least_dropped, places, who
    split_pairs(lab.stream, *operands)
    found: list[list[int]] = lab.get(places).tolist()
    return found


HITS = [True, False, False, True, False, False]


@pytest.mark.parametrize(
    ("share", "least_dropped", "places"),
    [
        (SHARES, 4, [[0, 1, 2, 4]]),
        (SHARES, 2, [[0, 1, 7, 7]]),
        (SHARES, 0, [[0, 7, 7, 7]]),
        (0, 4, [[0, 6, 6, 6]]),
        (0, 3, [[0, 6, 6, 7]]),
        (SHARES // 3, 4, [[0, 1, 6, 6]]),
        (2 * SHARES // 3, 4, [[0, 1, 2, 6]]),
    ],
)
def test_one_token(lab: Lab, share: int, least_dropped: int, places: list[list[int]]) -> None:
    ids = np.array([[0, 1, 2, 4]], I32)
    assert run(lab, ids, addresses(HITS), share, least_dropped) == places


def test_what_comes_already_is_not_shared_out(lab: Lab) -> None:
    ids = np.array([[0, 1, 2, 4]], I32)
    assert run(lab, ids, addresses(HITS), 0, 4, []) == [[0, 6, 6, 6]]
    assert run(lab, ids, addresses(HITS), 0, 4, [2]) == [[0, 6, 2, 6]]
    assert run(lab, ids, addresses(HITS), SHARES // 2, 4, [1]) == [[0, 1, 2, 6]]
    assert run(lab, ids, addresses(HITS), 0, 2, [1, 4]) == [[0, 1, 7, 7]]


def test_a_miss_that_one_token_ranks_early_is_kept_for_all(lab: Lab) -> None:
    ids = np.array([[0, 1, 2], [4, 5, 1], [3, 0, 2]], I32)
    assert run(lab, ids, addresses(HITS), SHARES, 2) == [[0, 1, 7], [4, 5, 1], [3, 0, 7]]


def test_an_expert_of_several_tokens_counts_once(lab: Lab) -> None:
    """Misses in the order of their first pairs: 1, 2, 4."""
    ids = np.array([[1, 2], [2, 1], [4, 1]], I32)
    assert run(lab, ids, addresses(HITS), 0, 2) == [[6, 6], [6, 6], [6, 6]]
    assert run(lab, ids, addresses(HITS), SHARES // 3, 2) == [[1, 6], [6, 1], [6, 1]]
    assert run(lab, ids, addresses(HITS), 2 * SHARES // 3, 2) == [[1, 2], [2, 1], [6, 1]]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_window(lab: Lab, data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, min(num_experts, 10)))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    tokens = data.draw(st.integers(1, 32))
    ids = np.stack([rng.permutation(num_experts)[:top_k] for _ in range(tokens)]).astype(I32)
    blobs = addresses(rng.random(num_experts) < data.draw(st.sampled_from([0.0, 0.4, 1.0])))
    share, least = data.draw(st.integers(0, SHARES)), data.draw(st.integers(0, top_k))
    coming = rng.permutation(num_experts)[: data.draw(st.integers(0, 8))].tolist()
    expected = split_pairs_reference(ids, blobs, share, SLOTS, least, coming)
    assert run(lab, ids, blobs, share, least, coming) == expected.tolist()


def test_what_layers_leave_out_is_counted_once_for_each_expert() -> None:
    ids = np.array([[[1, 2], [2, 1]], [[4, 5], [0, 4]]], I32)
    blobs = np.stack([addresses(HITS), addresses(HITS)])
    assert [count_dropped(ids, blobs, SLOTS, least) for least in (2, 1, 0)] == [0, 1, 4]


@pytest.mark.parametrize("size", [4, 7, 600])
@pytest.mark.parametrize("bounds", [(0, 5), (2, 4), (3, 3), (5, 5)])
def test_rows_are_cleared(lab: Lab, size: int, bounds: tuple[int, int]) -> None:
    rows, limits = normal(0, 5, size), np.array(bounds, I32)
    cleared = lab.put(rows)
    clear_rows(lab.stream, lab.put(limits), cleared)
    assert np.array_equal(lab.get(cleared), clear_rows_reference(limits, rows))


def test_windows_that_are_too_large_are_refused(lab: Lab) -> None:
    ids = lab.empty((MOST_PAIRS // 8 + 1, 8), I32)
    share, blobs = lab.empty((1,), I32), lab.empty((9,), np.int64)
    with pytest.raises(ShapeError, match="1032 pairs, at most 1024"):
        split_pairs(lab.stream, ids, blobs, share, SLOTS, 8, ids)
