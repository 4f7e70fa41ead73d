"""Ranks, lists of copies, and where kernels find what was copied."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from strata_cli.engine.experts.entries import (
    FROM_ARENA,
    Entry,
    EntryList,
    RingShape,
    address_table,
    list_entries,
    rank_experts,
)
from strata_cli.errors import ShapeError
from tests.experts.cases import cases
from tests.experts.simulator import Case

RESIDENT = np.array([[False, True, False, True], [False, False, False, False]])
ORDER = np.array([[3, 2, 1, 0], [1, 3, 0, 2]])


def test_residents_come_first_then_the_others_in_the_given_order() -> None:
    ranking = rank_experts(RESIDENT, ORDER)
    assert ranking.expert_at.tolist() == [[1, 3, 2, 0], [1, 3, 0, 2]]
    assert ranking.rank_of.tolist() == [[3, 0, 2, 1], [2, 0, 3, 1]]
    assert ranking.num_resident == (2, 0)


def test_without_an_order_the_others_come_by_id() -> None:
    assert rank_experts(RESIDENT).expert_at.tolist() == [[1, 3, 0, 2], [0, 1, 2, 3]]


def test_a_layer_can_be_ranked_anew_by_scores_residents_stay_first() -> None:
    ranking = rank_experts(RESIDENT, ORDER)
    ranking.reorder(0, np.array([1.0, 9.0, 2.0, 9.0], np.float32))
    ranking.reorder(1, np.array([0.5, 2.0, 0.5, 2.0], np.float32))
    assert ranking.expert_at.tolist() == [[1, 3, 2, 0], [1, 3, 0, 2]]
    ranking.reorder(1, np.array([3.0, 0.0, 4.0, 0.0], np.float32))
    assert ranking.expert_at.tolist() == [[1, 3, 2, 0], [2, 0, 1, 3]]
    assert ranking.rank_of.tolist() == [[3, 0, 2, 1], [1, 2, 0, 3]]


@pytest.mark.parametrize("order", [ORDER[:1], ORDER * 0, ORDER + 1])
def test_an_order_that_is_no_permutation_is_refused(order: np.typing.NDArray[np.int64]) -> None:
    with pytest.raises(ShapeError, match="permute 4 experts in each of 2 layers"):
        rank_experts(RESIDENT, order)


@given(cases())
def test_ranks_and_entries_hold_every_expert_once(case: Case) -> None:
    ranking = rank_experts(case.resident, case.order)
    num_layers, num_experts = case.resident.shape
    back = np.take_along_axis(ranking.rank_of, ranking.expert_at, axis=1)
    assert (back == np.arange(num_experts)).all()
    entries = list_entries(ranking, case.staged)
    listed = [
        (entry.layer, entry.expert) for entry in map(entries.__getitem__, range(len(entries)))
    ]
    assert sorted(listed) == [tuple(pair) for pair in np.argwhere(~case.resident).tolist()]
    assert [layer for layer, _ in listed] == sorted(layer for layer, _ in listed)
    jobs = [job for job in entries.jobs if job != FROM_ARENA]
    assert jobs == list(range(int(case.staged.sum())))
    assert entries.num_jobs == len(jobs)
    for layer in range(num_layers):
        ranks = [entries.ranks[k] for k in entries.of_layer(layer)]
        assert ranks == list(range(ranking.num_resident[layer], num_experts))


def test_a_list_can_grow_by_routed_experts_layer_after_layer() -> None:
    ranking = rank_experts(RESIDENT, ORDER)
    entries = EntryList(2)
    staged = np.array([True, False, False, False])
    assert entries.add_layer(ranking, np.array([3]), staged) == range(1)
    states = [entries.is_complete]
    assert entries.add_layer(ranking, np.array([0, 2]), staged) == range(1, 3)
    states.append(entries.is_complete)
    assert states == [False, True]
    assert list(map(entries.__getitem__, range(3))) == [
        Entry(0, 0, 3, 0),
        Entry(1, 1, 0, FROM_ARENA),
        Entry(1, 0, 2, 1),
    ]


def test_no_layers_are_a_complete_list() -> None:
    assert EntryList(0).is_complete


def test_the_address_table_follows_the_ranks() -> None:
    ranking = rank_experts(RESIDENT, ORDER)
    resident = np.where(RESIDENT, 1000 + np.arange(8).reshape(2, 4), -1)
    table = address_table(ranking, list_entries(ranking), resident, RingShape(500, 10, 4))
    assert table.tolist() == [[1001, 1003, 500, 510], [520, 530, 500, 510]]
    assert table.dtype == np.int64
