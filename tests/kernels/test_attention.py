"""Gated attention against plain numpy, dense and by blocks, and independence of the cuts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.kernels.attention import ATTEND, attend
from strata_cli.engine.kernels.attention_plan import AttendPlan
from strata_cli.engine.kernels.cache_rows import (
    STORE_KV,
    STORE_ROWS,
    cache_type,
    store_kv,
    store_rows,
)
from strata_cli.engine.kernels.cache_segments import can_attend_segments
from strata_cli.errors import ShapeError
from tests.kernels.lab import Lab, assert_close, normal

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class Case(NamedTuple):
    """The arguments of attend, in order."""

    q: Floats
    gate_src: Floats
    keys: Floats
    values: Floats
    positions: Ints
    selected: Ints
    num_selected: Ints
    ratio: int

    def tokens(self, part: slice) -> Case:
        """The same cache, other tokens."""
        return self._replace(
            **{
                name: getattr(self, name)[part]
                for name in ("q", "gate_src", "positions", "selected", "num_selected")
            }
        )


SUMS = 1 << 20  # floats of scratch, enough for any case here


def run(lab: Lab, case: Case, sums: int = SUMS) -> Floats:
    *arrays, ratio = case
    out = lab.empty((len(case.q), case.q.shape[1] * case.q.shape[2]))
    arrays[2:4] = [cache.astype(cache_type(lab.stream)) for cache in arrays[2:4]]
    q, gate_src, keys, values, positions, selected, num_selected = map(lab.put, arrays)
    attend(
        lab.stream,
        q,
        gate_src,
        keys,
        values,
        positions,
        selected,
        num_selected,
        ratio,
        lab.empty((sums,)),
        out,
    )
    return lab.get(out)


def make(
    num_tokens: int,
    num_kv: int,
    group: int,
    dim: int,
    past: int,
    ratio: int,
    budget: int,
    seed: int,
) -> Case:
    """Tokens past .. past + num_tokens, each with budget random complete blocks where ratio > 0."""
    rng = np.random.default_rng(seed)
    context, heads = past + num_tokens + 3, num_kv * group
    positions = np.arange(past, past + num_tokens, dtype=np.int32)
    selected = np.full((num_tokens, budget), -1, np.int32)
    num_selected = np.zeros(num_tokens, np.int32)
    for token, position in enumerate(positions if ratio else ()):
        complete = (position + 1) // ratio
        blocks = np.sort(rng.permutation(complete)[:budget])
        selected[token, : len(blocks)] = blocks
        num_selected[token] = len(blocks)
    keys, values = normal(seed, context, num_kv * dim), normal(seed + 1, context, num_kv * dim)
    keys[past + num_tokens :] = values[past + num_tokens :] = np.nan  # never written, never read
    return Case(
        normal(seed + 2, num_tokens, heads, dim, scale=2.0),
        normal(seed + 3, num_tokens, heads, 2 * dim),
        keys,
        values,
        positions,
        selected,
        num_selected,
        ratio,
    )


SHAPES = {
    "num_tokens": st.integers(1, 7),
    "num_kv": st.integers(1, 3),
    "group": st.integers(1, 9),
    "dim": st.sampled_from([1, 7, 16, 24, 32, 64, 81]),
    "past": st.integers(0, 90),
    "ratio": st.integers(0, 6),
    "budget": st.integers(1, 20),
    "seed": st.integers(0, 999),
}


@given(**SHAPES)
@settings(max_examples=50)
def test_attention_matches_numpy(
    lab: Lab,
    num_tokens: int,
    num_kv: int,
    group: int,
    dim: int,
    past: int,
    ratio: int,
    budget: int,
    seed: int,
) -> None:
    case = make(num_tokens, num_kv, group, dim, past, ratio, budget, seed)
    out = run(lab, case)
    assert_close(out, ATTEND.reference(*case), lab.product_type)
    np.testing.assert_array_equal(run(lab, case, sums=0), out)


@given(**SHAPES, points=st.lists(st.floats(0, 1), max_size=3))
@settings(max_examples=25)
def test_bits_do_not_depend_on_cuts_neighbours_or_alignment(
    host_lab: Lab,
    num_tokens: int,
    num_kv: int,
    group: int,
    dim: int,
    past: int,
    ratio: int,
    budget: int,
    seed: int,
    points: list[float],
) -> None:
    case = make(num_tokens, num_kv, group, dim, past, ratio, budget, seed)
    whole = run(host_lab, case)
    for lab in (host_lab.cut(points), host_lab.skewed(4)):
        np.testing.assert_array_equal(run(lab, case), whole)
    last = slice(num_tokens - 1, None)
    np.testing.assert_array_equal(run(host_lab, case.tokens(last)), whole[last])


@pytest.mark.parametrize("past", [0, 1, 14, 15, 37])
def test_all_blocks_selected_gives_the_bits_of_dense_attention(lab: Lab, past: int) -> None:
    case = make(5, 2, 2, 32, past, 5, 12, seed=past)
    np.testing.assert_array_equal(run(lab, case), run(lab, case._replace(ratio=0)))


def test_positions_outside_the_selected_blocks_are_not_seen(lab: Lab) -> None:
    case = make(1, 1, 2, 16, 43, 4, 3, seed=5)
    before = run(lab, case)
    seen = set(case.selected[0].tolist())
    hidden = [p for p in range(44) if p // 4 not in seen]
    case.keys[hidden] = case.values[hidden] = np.nan
    np.testing.assert_array_equal(run(lab, case), before)


def test_many_tokens_are_shared_by_threads_with_the_same_result(lab: Lab) -> None:
    case = make(300, 2, 4, 64, 0, 16, 4, seed=1)
    whole = run(lab, case)
    np.testing.assert_array_equal(run(lab, case.tokens(slice(250, 251))), whole[250:251])
    assert_close(whole, ATTEND.reference(*case), lab.product_type)


@pytest.mark.parametrize(
    ("num_tokens", "group", "past", "ratio", "budget"),
    [(20, 3, 1030, 0, 1), (20, 3, 2100, 4, 64), (17, 2, 1500, 5, 40), (17, 1, 1100, 96, 6)],
)
def test_long_contexts_are_cut_into_units_and_parts_with_the_same_result(
    lab: Lab, num_tokens: int, group: int, past: int, ratio: int, budget: int
) -> None:
    case = make(num_tokens, 1, group, 32, past, ratio, budget, seed=3)
    whole = run(lab, case, sums=0)
    assert_close(whole, ATTEND.reference(*case), lab.product_type)
    np.testing.assert_array_equal(run(lab, case), whole)
    few = case.tokens(slice(2, 9))
    np.testing.assert_array_equal(run(lab, few, sums=30_000), whole[2:9])
    np.testing.assert_array_equal(run(lab, case.tokens(slice(5, 6))), whole[5:6])


def test_large_scores_do_not_overflow(lab: Lab) -> None:
    case = make(2, 1, 1, 16, 9, 0, 1, seed=2)
    case.q[:] *= 1e4
    assert_close(run(lab, case), ATTEND.reference(*case), lab.product_type)


def test_rows_land_at_their_positions_and_nowhere_else(lab: Lab) -> None:
    src, cache = normal(1, 4, 10), normal(2, 9, 10)
    positions = np.array([3, 8, 0, 5], np.int32)
    tensor = lab.put(cache)
    store_rows(lab.stream, lab.put(src), lab.put(positions), tensor)
    np.testing.assert_array_equal(lab.get(tensor), STORE_ROWS.reference(src, positions, cache))


@pytest.mark.parametrize("dim", [3, 24])
def test_keys_and_values_land_at_their_positions(lab: Lab, dim: int) -> None:
    k, v = normal(1, 4, 2, dim), normal(2, 4, 2 * dim)
    positions = np.array([3, 8, 0, 5], np.int32)
    caches = [normal(seed, 9, 2 * dim).astype(cache_type(lab.stream)) for seed in (3, 4)]
    tensors = [lab.put(cache) for cache in caches]
    store_kv(lab.stream, lab.put(k), lab.put(v), lab.put(positions), *tensors)
    for tensor, expected in zip(tensors, STORE_KV.reference(k, v, positions, *caches), strict=True):
        np.testing.assert_array_equal(lab.get(tensor), expected)


@pytest.mark.gpu
def test_values_that_are_no_numbers_reach_only_who_sees_them(gpu_lab: Lab) -> None:
    """Blocks of threads multiply values that a token does not see by zero."""
    case = make(2, 1, 1, 8, 3, 0, 1, seed=4)
    tensors = [gpu_lab.put(case.keys[:4].astype(np.float16)) for _ in range(2)]
    v = case.values[:4].copy()
    v[3, 5] = np.nan
    positions = gpu_lab.put(np.arange(4, dtype=np.int32))
    store_kv(gpu_lab.stream, gpu_lab.put(case.keys[:4, None]), gpu_lab.put(v), positions, *tensors)
    keys, values = (gpu_lab.get(tensor) for tensor in tensors)
    assert np.isfinite(values).all()
    np.testing.assert_array_equal(np.isnan(keys).all(axis=1), [False, False, False, True])


def test_wrong_shapes_are_refused_by_name(lab: Lab) -> None:
    q, gate_src, cache = lab.empty((2, 6, 8)), lab.empty((2, 6, 16)), lab.empty((9, 32))
    positions, selected = lab.empty((2,), np.int32), lab.empty((2, 1), np.int32)
    sums, out = lab.empty((9,)), lab.empty((2, 48))
    with pytest.raises(ShapeError, match=r"attend q: expected float32 \[2, 4, 8\]"):
        attend(lab.stream, q, gate_src, cache, cache, positions, selected, positions, 0, sums, out)
    with pytest.raises(ShapeError, match=r"store_rows cache: expected float32 \[9, 31\]"):
        store_rows(lab.stream, lab.empty((2, 31)), positions, cache)


@pytest.mark.parametrize(
    ("count", "rows", "reach", "are_together"),
    [
        (20, 20, 4_000, True),  # 63 parts take less than 20 segments' launches
        (4, 20, 4_000, False),
        (4, 20, 600, True),
        (2, 107, 8_300, False),  # the GPU would idle
        (2, 400, 8_300, True),  # it would not
    ],
)
def test_segments_attend_together_where_that_is_done_sooner(
    count: int, rows: int, reach: int, are_together: bool
) -> None:
    plan = AttendPlan(count * rows, 24, 2, 256, 12_288, 512, 4, 227 << 10, 1 << 22)
    assert can_attend_segments(plan, (rows,) * count, reach) == are_together
