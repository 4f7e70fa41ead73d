"""The prompt cache: what is kept, what is forgotten first, and which positions it asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.config import StrataConfig
from strata_cli.engine.forward.state import Snapshot
from strata_cli.engine.prompt_cache import (
    CacheRules,
    Checkpoint,
    PromptCache,
    Want,
    is_prefix,
)

LIVE = list(range(1000))
ROWS = len(LIVE)
RULES = CacheRules(prompt_cache=3, prompt_cache_every=100, prompt_cache_root=0)
LOGITS = np.zeros(10, dtype=np.float32)


def checkpoint(position: int, nbytes: int = 8, *, is_end: bool = False) -> Checkpoint:
    running = (np.zeros(nbytes, dtype=np.uint8),)
    return Checkpoint(Snapshot(tuple(LIVE[:position]), running), LOGITS if is_end else None)


def filled(rules: CacheRules, *positions: int) -> PromptCache:
    cache = PromptCache(rules)
    for position in positions:
        cache.add(checkpoint(position))
    return cache


def kept(cache: PromptCache) -> list[int]:
    return [entry.position for entry in cache.checkpoints]


def test_the_least_recently_used_makes_room() -> None:
    cache = filled(RULES, 10, 20, 30)
    found = cache.find(Want(LIVE[:15]), ROWS)
    assert found is not None
    cache.touch(found)
    cache.add(checkpoint(40))
    assert kept(cache) == [30, 10, 40]


def test_the_root_stays() -> None:
    cache = filled(replace(RULES, prompt_cache_root=15), 10, 20, 30, 40, 50)
    assert cache.root is not None
    assert cache.root.position == 20
    assert kept(cache) == [20, 40, 50]
    cache.add(checkpoint(20))
    assert cache.root.position == 20
    cache.keep_prefixes(LIVE[:19])
    assert kept(cache) == []
    cache.add(checkpoint(5))
    cache.add(checkpoint(45))
    cache.add(checkpoint(46))
    assert cache.root is cache.checkpoints[1]


def test_a_budget_in_bytes_holds_beside_the_number() -> None:
    cache = PromptCache(replace(RULES, prompt_cache_bytes=100, prompt_cache_root=10))
    for position, nbytes in ((10, 50), (20, 30), (30, 30)):
        cache.add(checkpoint(position, nbytes))
    assert (kept(cache), cache.nbytes) == ([10, 30], 80)
    cache.add(checkpoint(40, 51))  # does not fit beside the root
    assert kept(cache) == [10]
    cache.add(checkpoint(50, 10, is_end=True))  # its logits count
    assert cache.nbytes == 100
    alone = PromptCache(replace(RULES, prompt_cache_bytes=10, prompt_cache_root=10))
    alone.add(checkpoint(10, 11))
    assert (kept(alone), alone.root) == ([], None)


def test_what_is_no_prefix_of_the_live_tokens_is_forgotten() -> None:
    cache = filled(RULES, 10, 20, 30)
    cache.keep_prefixes([*LIVE[:25], -1, *LIVE[26:]])
    assert kept(cache) == [10, 20]


def test_who_has_compared_a_prompt_says_how_much_of_it_is_known() -> None:
    cache = filled(RULES, 10, 20, 30)
    for common, position in ((9, None), (10, 10), (29, 20), (999, 30)):
        found = cache.find(Want([-1] * 999), ROWS, common)
        assert (None if found is None else found.position) == position


def test_the_end_of_a_prompt_serves_it_only_with_logits() -> None:
    cache = filled(RULES, 10, 20)
    found = cache.find(Want(LIVE[:20]), ROWS)
    assert found is not None
    assert found.position == 10
    found = cache.find(Want(LIVE[:20], logits=False), ROWS)
    assert found is not None
    assert found.position == 20
    cache.add(checkpoint(20, is_end=True))
    assert cache.find(Want(LIVE[:20]), ROWS) is cache.checkpoints[-1]
    cache.add(checkpoint(20))  # does not take the place of one with logits
    assert cache.find(Want(LIVE[:20]), ROWS) is cache.checkpoints[-1]
    assert cache.find(Want([5]), ROWS) is None


@pytest.mark.parametrize(
    ("start", "stop", "cuts"),
    [
        (0, 99, [50]),
        (0, 100, [50]),
        (0, 301, [50, 100, 200, 300]),
        (50, 201, [100, 200]),
        (100, 200, []),
    ],
)
def test_reads_are_cut_on_the_grid_and_at_the_root(start: int, stop: int, cuts: list[int]) -> None:
    rules = replace(RULES, prompt_cache_root=50)
    assert PromptCache(rules).cuts(start, stop) == cuts
    assert [at for at in cuts if at != 50] == filled(rules, 50).cuts(start, stop)
    assert PromptCache(replace(rules, prompt_cache=0)).cuts(start, stop) == []


def test_reads_are_cut_where_a_prompt_parts_from_the_one_before() -> None:
    cache = PromptCache(replace(RULES, least_parked_tokens=20))
    assert cache.cuts(10, 90, 30) == [30]
    assert cache.cuts(10, 90, 29) == []  # so few are read again
    assert cache.cuts(10, 30, 30) == []  # the end has one anyway
    assert cache.cuts(0, 190, 100) == [100]


def test_where_passes_are_expensive_the_grid_waits_for_the_end_of_one() -> None:
    cache = PromptCache(replace(RULES, prompt_cache_root=50, least_parked_tokens=20))
    assert cache.cuts(0, 400, 0, 64) == [64, 128, 256, 320]
    assert cache.cuts(10, 400, 0, 64) == [74, 138, 202, 330]
    assert cache.cuts(0, 400, 210, 64) == [64, 128, 210, 338]
    assert cache.cuts(0, 190, 128, 64) == [64, 128]
    assert cache.cuts(0, 190, 0, 512) == []
    assert cache.cuts(0, 400, 0, 50) == [50, 100, 200, 300]


def test_settings_give_the_rules() -> None:
    assert CacheRules.of(StrataConfig()) == CacheRules()
    config = StrataConfig(
        prompt_cache=2,
        prompt_cache_mib=3,
        prompt_cache_every=5,
        prompt_cache_root=7,
        conversation_cache_mib=11,
    )
    assert CacheRules.of(config) == CacheRules(
        prompt_cache=2,
        prompt_cache_bytes=3 << 20,
        prompt_cache_every=5,
        prompt_cache_root=7,
        conversation_cache_mib=11,
    )


def test_neither_grid_nor_root_need_be() -> None:
    rules = CacheRules(prompt_cache_every=0, prompt_cache_root=0)
    assert PromptCache(rules).cuts(0, 100_000) == []


@given(
    num=st.integers(0, 4),
    budget=st.integers(0, 60),
    root=st.integers(0, 20),
    adds=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), max_size=12),
)
def test_the_limits_hold_and_the_newest_is_kept_if_it_can_be(
    num: int, budget: int, root: int, adds: list[tuple[int, int]]
) -> None:
    cache = PromptCache(
        CacheRules(prompt_cache=num, prompt_cache_bytes=budget, prompt_cache_root=root)
    )
    for position, nbytes in adds:
        cache.add(checkpoint(position, nbytes))
        assert len(cache.checkpoints) <= num
        assert not budget or cache.nbytes <= budget
        assert len(set(kept(cache))) == len(kept(cache))
        assert cache.root is None or cache.root in cache.checkpoints
        if cache.root is None and num and (not budget or nbytes <= budget):
            assert position in kept(cache)


def test_prefixes() -> None:
    assert is_prefix([], [1])
    assert is_prefix((1, 2), [1, 2])
    assert not is_prefix([1, 2], [1])
    assert not is_prefix([2], [1, 2])
