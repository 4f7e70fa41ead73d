"""Settings that change nothing in an engine as it is planned: whoever asks for one is told so."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import fields

from strata_cli.config import StrataConfig, flag_of
from strata_cli.engine.forward.places import Places
from strata_cli.errors import ConfigError

logger = logging.getLogger(__name__)

OF_OWN_MEMORY = ("vram_bytes", "vram_reserve_mib")
OF_CACHE = ("arena_pin_gib", "mmap_experts")
OF_MISSES = (
    "adapt_every",
    "adapt_swaps",
    "adapt_decay",
    "lookahead",
    "route_tail_skip",
    "pcie_frac",
    "pool_workers",
    "prefill_stream_min",
    "prefill_ring",
    "ring_bytes",
    "prefill_issuer",
    "prefill_routed_stream",
    "prefill_routed_stream_depth",
    "prefill_routed_stream_ahead",
    "prefill_order",
    "prefill_keep",
    "prefill_cpu_share",
    "watchdog_s",
)
OF_FILE = ("stager_ring", "stager_threads")


def without_effect(config: StrataConfig, places: Places) -> dict[str, str]:
    """Settings with another value than their default that change nothing, each with the reason."""
    reasons: dict[str, str] = {}
    for names, reason in _idle(config, places):
        for name in names:
            reasons.setdefault(name, reason)
    return {
        spec.name: reasons[spec.name]
        for spec in fields(StrataConfig)
        if spec.name in reasons and getattr(config, spec.name) != spec.default
    }


def check_effects(config: StrataConfig, places: Places, flags: Collection[str]) -> None:
    """Refuse flags that would do nothing; warn of variables and lines of a file that do.

    Args:
        config: the settings.
        places: what the engine is planned to be.
        flags: settings that were given as flags.

    Raises:
        ConfigError: one of those has no effect.
    """
    idle = without_effect(config, places)
    for reason in dict.fromkeys(idle.values()):
        every = [name for name in idle if idle[name] == reason]
        given = [name for name in every if name in flags]
        if given:
            raise ConfigError(
                f"{_listed(map(flag_of, given))} would have no effect: {reason}",
                hint="leave it out, or change what the reason names",
            )
        logger.warning("no effect of %s: %s", _listed(every), reason)


def _idle(config: StrataConfig, places: Places) -> list[tuple[tuple[str, ...], str]]:
    """Settings that change nothing whatever their value, and why; the first reason counts."""
    cache, device = places.cache, places.device_name
    here = "all experts lie in the memory that computes, without a cache"
    of_profile = () if config.expert_profile_save else ("expert_profile",)
    rules = [
        (not places.has_own_memory, OF_OWN_MEMORY, f"{device} has no memory of its own"),
        (config.vram_bytes > 0, ("vram_reserve_mib",), "vram_bytes says how much may be used"),
        (cache is None, OF_CACHE, here),
        (config.mmap_experts, ("arena_pin_gib",), "mmap_experts copies no expert"),
        (cache is None, (*OF_MISSES, *OF_FILE, *of_profile), here),
        (
            places.is_all_resident,
            (*OF_MISSES, *OF_FILE, *of_profile),
            "the cache holds all experts",
        ),
        (places.is_all_pinned, OF_FILE, "all experts are in page-locked memory"),
        (
            not places.is_all_pinned,
            ("lookahead", "route_tail_skip", "pcie_frac", "pool_workers"),
            "it needs all experts in page-locked memory",
        ),
        (
            config.route_tail_skip >= places.num_experts_per_tok,
            ("route_tail_skip",),
            f"a token has {places.num_experts_per_tok} experts, of ranks from 0",
        ),
        (config.pcie_frac == 1, ("pool_workers",), "pcie_frac is 1: the pool has nothing to do"),
        (
            config.prompt_cache == 0,
            ("prompt_cache_mib", "prompt_cache_every", "prompt_cache_root"),
            "prompt_cache is 0: there are no checkpoints",
        ),
        (config.adapt_every == 0, ("adapt_swaps", "adapt_decay"), "adapt_every is 0"),
        (
            config.prefill_routed_stream is False,
            ("prefill_routed_stream_depth", "prefill_routed_stream_ahead"),
            "prefill_routed_stream is off",
        ),
        (
            config.expert_profile_save is None,
            ("expert_profile_save_every",),
            "expert_profile_save names no file",
        ),
    ]
    return [(names, reason) for is_idle, names, reason in rules if is_idle]


def _listed(names: Collection[str] | map[str]) -> str:
    return " and ".join(names)
