"""From settings to what shapes an engine: the same for every command and for the server."""

from __future__ import annotations

from strata_cli.config import StrataConfig
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.sizing import RING_BYTES, RingRules
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.experts.streaming import StreamOptions
from strata_cli.engine.options import EngineOptions
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.models import DEMO_MODEL_PATH


def engine_options(
    config: StrataConfig,
    *,
    will_chat: bool = False,
    num_sequences: int = 1,
    trace: Trace = NO_TRACE,
) -> EngineOptions:
    """What the settings say of an engine.

    Args:
        config: the settings; without a model they mean the embedded one.
        will_chat: prompts go through the chat template.
        num_sequences: that will be there at once.
        trace: told of what the engine does.
    """
    return EngineOptions(
        model=config.model or DEMO_MODEL_PATH,
        device=config.device,
        threads=config.threads,
        vram_bytes=config.vram_bytes,
        vram_reserve_bytes=config.vram_reserve_mib << 20,
        max_context=config.max_context,
        num_sequences=num_sequences,
        prefill=config.prefill,
        expert_cache=config.expert_cache,
        pinned_bytes=_pinned_bytes(config),
        stager=StagerSize(config.stager_ring, config.stager_threads),
        expert_profile=config.expert_profile,
        profile_save=config.expert_profile_save,
        profile_save_every_s=60 * config.expert_profile_save_every,
        ahead_slots=config.lookahead,
        tail_skip=config.route_tail_skip,
        link_share=config.pcie_frac,
        pool_threads=config.pool_workers,
        adapt=AdaptRules(config.adapt_every, config.adapt_swaps, config.adapt_decay),
        streaming=_streaming(config),
        will_chat=will_chat,
        trace=trace,
        prefill_dump_r=config.prefill_dump_r,
    )


def _pinned_bytes(config: StrataConfig) -> int | None:
    if config.mmap_experts:
        return 0
    return None if config.arena_pin_gib is None else int(config.arena_pin_gib * 2**30)


def _streaming(config: StrataConfig) -> StreamRules:
    return StreamRules(
        ring=RingRules(
            stream_min=config.prefill_stream_min,
            slots=config.prefill_ring,
            budget_bytes=RING_BYTES if config.ring_bytes else 0,
        ),
        stream=StreamOptions(
            skips_unrouted=config.prefill_routed_stream is not False,
            depth=config.prefill_routed_stream_depth,
            ahead=config.prefill_routed_stream_ahead,
            has_thread=config.prefill_issuer,
            watchdog_s=config.watchdog_s,
        ),
        is_likely=config.prefill_order != "id",
        foresees=config.prefill_order == "foreseen",
        kept_slots=config.prefill_keep,
        cpu_share=config.prefill_cpu_share,
        cpu_threads=config.threads,
    )
