"""What shapes an engine: the options that it is opened with, and what they wish of a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from strata_cli.engine.device import RESERVE_BYTES
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.cache import LEAST_SLOTS
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.experts.store import DEFAULT_STAGER
from strata_cli.engine.forward.caching import CacheWishes
from strata_cli.engine.forward.planning import DEFAULT_HOMES, Homes, Wishes
from strata_cli.engine.model.spec import ModelSpec
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.errors import ConfigError, InputError

DEFAULT_STREAMING = StreamRules()
DEFAULT_ADAPT = AdaptRules()
SAVE_EVERY_S = 600.0
AUTO_CONTEXT_TOKENS = 32_768

_HINT = "leave it out for the default"
_COUNTS = (
    "threads", "max_context", "num_sequences", "prefill", "vram_bytes", "vram_reserve_bytes",
    "expert_cache", "least_slots", "fetch_slots", "ahead_slots", "pinned_bytes",
    "profile_save_every_s", "tail_skip", "pool_threads",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What shapes an engine.

    Attributes:
        model: GGUF file, or any of its shards.
        device: "auto", "host" or "cuda:N".
        threads: host threads that compute, 0 = every core this process may use.
        max_context: tokens a sequence may hold, 0 = the model's own, at most 32,768.
        num_sequences: that will be there at once: memory is kept for so many.
        prefill: prompt chunk in tokens, 0 = 512, on a GPU up to 4,096 where memory allows.
        vram_bytes: hard cap on device memory of a GPU, 0 = what is free, less the reserve.
        vram_reserve_bytes: what is then left to others.
        homes: where experts and the n-gram table are wanted.
        expert_cache: experts that are held in slots of device memory, where not all are; None: as
            many as fit. A number makes a cache also where all would fit, and on the host.
        least_slots: of those that no prompt may borrow.
        fetch_slots: of device memory for experts that a step misses: copied there whole, before
            its products read them; 0: those read over the link; None: some, on a GPU.
        ahead_slots: for experts that the next layer of a step will probably miss, which come while
            the link has nothing else to do, at most 16; 0: nothing comes ahead of its routing;
            None: some, where a step fetches any.
        pinned_bytes: most bytes of experts that are copied into page-locked host memory where not
            all are on the device; the others are read from the file whenever they are needed, and
            stay in the system's page cache as far as it has room. None: all are copied.
        stager: of those others.
        expert_profile: file that says which experts are used most, measured and made if it is not
            there; None: on a GPU one that is kept for each model, on the host nothing is known.
        profile_save: file for the profile with what this run adds to it; None: it is not kept.
        profile_save_every_s: seconds between two saves, 0: only when the engine is closed.
        adapt: when cached experts change places between device and host memory, as steps need.
        tail_skip: rank, from 0, from which on steps leave out experts that are not in the cache,
            unless they are canonical; 0: they leave out none.
        link_share: share, 0..1, of the others that the device reads over its link; threads of the
            host compute the rest, unless steps are canonical. None: so that both end together.
        pool_threads: that do so; 0: automatic.
        streaming: how prompts come by the other experts.
        will_chat: start the chat template's process now, so that the first chat need not wait.
        compile_ahead: on a first start on the host, compile all kernels before the first read.
        trace: told of what the engine does.
        prefill_dump_r: file for the residuals of every 64th prompt position; None: nowhere.
    """

    model: Path
    device: str = "auto"
    threads: int = 0
    max_context: int = 0
    num_sequences: int = 1
    prefill: int = 0
    vram_bytes: int = 0
    vram_reserve_bytes: int = RESERVE_BYTES
    homes: Homes = DEFAULT_HOMES
    expert_cache: int | None = None
    least_slots: int = LEAST_SLOTS
    fetch_slots: int | None = None
    ahead_slots: int | None = None
    pinned_bytes: int | None = None
    stager: StagerSize = DEFAULT_STAGER
    expert_profile: Path | None = None
    profile_save: Path | None = None
    profile_save_every_s: float = SAVE_EVERY_S
    adapt: AdaptRules = DEFAULT_ADAPT
    tail_skip: int = 0
    link_share: float | None = 1.0
    pool_threads: int = 0
    streaming: StreamRules = DEFAULT_STREAMING
    will_chat: bool = False
    compile_ahead: bool = True
    trace: Trace = NO_TRACE
    prefill_dump_r: Path | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that nothing can be made of.

        Raises:
            ConfigError: one is negative, or a share is outside 0..1.
        """
        counts = {name: getattr(self, name) for name in _COUNTS}
        counts |= {"adapt.every": self.adapt.every, "adapt.swaps": self.adapt.swaps}
        for name, count in counts.items():
            if count is not None and count < 0:
                raise ConfigError(f"{name} must not be negative, got {count}", hint=_HINT)
        for name, share in (("link_share", self.link_share), ("adapt.decay", self.adapt.decay)):
            if share is not None and not 0 <= share <= 1:  # what is no number is not
                raise ConfigError(f"{name} must be from 0 to 1, got {share}", hint=_HINT)


def wishes_of(options: EngineOptions, context_tokens: int) -> Wishes:
    """What a model is loaded for, with a context of so many tokens."""
    homes = options.homes
    if options.expert_cache is not None and homes.experts is ExpertHome.AUTO:
        homes = replace(homes, experts=ExpertHome.CACHED)
    cache = CacheWishes(
        num_slots=options.expert_cache,
        least_slots=options.least_slots,
        kept_slots=options.streaming.kept_slots,
        pinned_bytes=options.pinned_bytes,
        ring=options.streaming.ring,
        fetch_slots=options.fetch_slots,
        ahead_slots=options.ahead_slots,
    )
    return Wishes(context_tokens, options.prefill, homes, cache, options.num_sequences)


def context_of(spec: ModelSpec, wanted: int) -> int:
    """Tokens of a context: as wanted, 0 = automatic.

    Raises:
        InputError: that is more than the model has.
    """
    if wanted > spec.context_tokens:
        raise InputError(
            f"--max-context {wanted} is more than the model's {spec.context_tokens} tokens",
            hint=f"at most --max-context {spec.context_tokens}",
        )
    return wanted or min(spec.context_tokens, AUTO_CONTEXT_TOKENS)
