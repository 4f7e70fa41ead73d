"""Settings that would do nothing are refused as flags, and told of elsewhere."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest

from strata_cli.commands.main import run, strata
from strata_cli.config import StrataConfig
from strata_cli.engine import effects
from strata_cli.engine.effects import check_effects, without_effect
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.caching import CachePlan, CacheShape
from strata_cli.engine.forward.outline import Sizes
from strata_cli.engine.forward.places import Places
from strata_cli.engine.from_settings import engine_options
from strata_cli.errors import ConfigError

EXPERT_BYTES, NUM_EXPERTS = 100, 48
MISSES, STAGER = set(effects.OF_MISSES), set(effects.OF_FILE)


def places(num_slots: int | None, *, pinned: int = NUM_EXPERTS, is_gpu: bool = True) -> Places:
    """Of a model with 48 experts of which a token has 4."""
    shape = CacheShape(EXPERT_BYTES, NUM_EXPERTS, EXPERT_BYTES * NUM_EXPERTS)
    cache = None
    if num_slots is not None:
        cache = CachePlan(shape, num_slots, 0, 0, pinned * EXPERT_BYTES)
    name = "cuda:0" if is_gpu else "host"
    return Places(name, is_gpu, Sizes(2048, 512), NUM_EXPERTS, 4, cache=cache)


ROUTED = {"prefill_routed_stream_depth", "prefill_routed_stream_ahead"}
CHANGED: dict[str, Any] = {
    "vram_bytes": 1 << 30,
    "vram_reserve_mib": 100,
    "arena_pin_gib": 2.0,
    "mmap_experts": True,
    "expert_profile": "x",
    "expert_profile_save_every": 3.0,
    "adapt_every": 2,
    "adapt_swaps": 3,
    "adapt_decay": 0.5,
    "lookahead": 3,
    "route_tail_skip": 2,
    "pcie_frac": 0.5,
    "pool_workers": 3,
    "prefill_stream_min": 9,
    "prefill_ring": 20,
    "ring_bytes": False,
    "prefill_issuer": False,
    "prefill_routed_stream": True,
    "prefill_routed_stream_depth": 4,
    "prefill_routed_stream_ahead": 3,
    "prefill_order": "id",
    "prefill_keep": 2,
    "prefill_cpu_share": 0.5,
    "watchdog_s": 9.0,
    "stager_ring": 4,
    "stager_threads": 2,
}
"""Another value than the default for every setting that may be without effect."""


@pytest.mark.parametrize(
    ("where", "more", "idle"),
    [
        (places(None), {}, CHANGED.keys() - {"vram_bytes"}),
        (places(None, is_gpu=False), {}, CHANGED.keys()),
        (places(NUM_EXPERTS), {}, MISSES | STAGER | {"expert_profile"}),
        (places(NUM_EXPERTS), {"expert_profile_save": "y"}, MISSES | STAGER),
        (places(20), {"mmap_experts": False}, STAGER),
        (places(20), {"adapt_every": 0}, {"adapt_swaps", "adapt_decay"} | STAGER),
        (places(20), {"pcie_frac": 1.0}, {"pool_workers"} | STAGER),
        (places(20), {"route_tail_skip": 4}, {"route_tail_skip"} | STAGER),
        (places(20), {"prefill_routed_stream": False}, ROUTED | STAGER),
        (places(20, pinned=9), {}, {"lookahead", "route_tail_skip", "pcie_frac", "pool_workers"}),
    ],
)
def test_what_changes_nothing_is_known(where: Places, more: dict[str, Any], idle: set[str]) -> None:
    config = StrataConfig(**(CHANGED | more))
    known = without_effect(config, where)
    others = {"vram_reserve_mib", "expert_profile_save_every", "arena_pin_gib"}
    assert known.keys() - others == idle - others
    assert ("arena_pin_gib" in known) == (config.mmap_experts or where.cache is None)
    assert "vram_reserve_mib" in known  # a number of bytes says it all
    assert without_effect(StrataConfig(), where) == {}


def test_every_setting_named_here_is_one() -> None:
    names = {*effects.OF_OWN_MEMORY, *effects.OF_CACHE, *effects.OF_MISSES, *effects.OF_FILE}
    assert names | {"expert_profile", "expert_profile_save_every"} == CHANGED.keys()
    assert {spec.name for spec in fields(StrataConfig)} >= names


def test_no_setting_about_experts_is_forgotten() -> None:
    about = ("adapt_", "arena_", "pcie_", "pool_", "prefill_", "route_", "stager_", "vram_")
    names = [spec.name for spec in fields(StrataConfig) if spec.name.startswith(about)]
    assert {*names} - {"prefill_dump_r"} <= CHANGED.keys()


def test_checkpoints_that_are_not_kept_have_no_size() -> None:
    config = StrataConfig(prompt_cache=0, prompt_cache_mib=5, prompt_cache_root=9)
    assert without_effect(config, places(20)).keys() == {"prompt_cache_mib", "prompt_cache_root"}


def test_a_flag_without_effect_is_refused_and_a_variable_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = StrataConfig(adapt_every=2, adapt_decay=0.5, vram_bytes=1 << 30)
    with pytest.raises(ConfigError, match=r"^--adapt-every would have no effect: all experts lie"):
        check_effects(config, places(None), {"adapt_every"})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_effects(config, places(None), {"vram_bytes"})
    assert [record.message for record in caplog.records] == [
        "no effect of adapt_every and adapt_decay: all experts lie in the memory that computes, "
        "without a cache"
    ]


@pytest.mark.parametrize(
    "words", ["--mmap-experts", "--vram-bytes 1GiB", "--expert-cache 9 --pool-workers 2"]
)
def test_a_command_refuses_a_flag_before_anything_is_read(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(strata, ["read", "hello", "--device", "host", *words.split()]) == 2
    output, told = capsys.readouterr()
    assert output == ""
    assert "would have no effect: " in told


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, "2048 tokens, chunks of 512; all 128 experts in its memory"),
        ({"expert_cache": 20}, "20 of 128 experts in the cache, all of them in page-locked memory"),
        ({"expert_cache": 20, "mmap_experts": True}, "in the cache, the file has all of them"),
    ],
)
def test_what_lies_where_is_told_before_it_is_loaded(settings: dict[str, Any], text: str) -> None:
    told: list[Places] = []

    class Enough(Exception):  # noqa: N818
        pass

    def planned(where: Places) -> None:
        told.append(where)
        raise Enough

    config = StrataConfig(device="host", **settings)
    with pytest.raises(Enough):
        Engine.open(engine_options(config), planned=planned)
    (where,) = told
    assert text in where.describe()
    check_effects(config, where, settings.keys())
