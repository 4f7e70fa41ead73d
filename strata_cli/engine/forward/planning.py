"""Chooses how much of a device a model takes, and what of it stays in host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.caching import CachePlan, CacheWishes, cache_shape, plan_cache
from strata_cli.engine.forward.fetching import AHEAD_SLOTS, TURNS, fetch_slots
from strata_cli.engine.forward.outline import Outline, Sizes
from strata_cli.engine.forward.placing import Placement
from strata_cli.engine.model.expected import NGRAM_TABLE
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

CHUNKS: tuple[int, ...] = (4096, 2048, 1024, 512)  # prompt chunks that are tried, best first
CHUNKS_OF_STREAMED: tuple[int, ...] = (8192, *CHUNKS)  # every chunk streams all experts again
CHUNK_WITHOUT_OWN_MEMORY = 512
WORKSPACE_SHARE = 8  # at most one such part of the free memory is for a chunk's workspace
STREAMED_SHARE = 4  # the same where fewer, longer chunks save whole passes over the link
AHEAD_SHARE = 16  # at most one such part of the room for experts is for what may come ahead


class TableHome(Enum):
    """Where the n-gram table lies. No result depends on it."""

    AUTO = "auto"  # with the other weights if it fits beside them, else mapped
    DEVICE = "device"
    MAPPED = "mapped"  # page-locked host memory, which kernels read over the link


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the large parts of a model are wanted.

    Attributes:
        experts: the routed experts.
        ngram_table: the table of the n-gram embedding.
    """

    experts: ExpertHome = ExpertHome.AUTO
    ngram_table: TableHome = TableHome.AUTO


DEFAULT_HOMES = Homes()
DEFAULT_CACHE = CacheWishes()


class Wishes(NamedTuple):
    """What a model is to be loaded for.

    Attributes:
        context_tokens: most tokens of a sequence.
        chunk_tokens: most tokens of a pass; 0 is automatic.
        homes: where the large parts are wanted.
        cache: of experts, where they are cached.
        num_sequences: that will be there at once.
    """

    context_tokens: int
    chunk_tokens: int = 0
    homes: Homes = DEFAULT_HOMES
    cache: CacheWishes = DEFAULT_CACHE
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's place on a device.

    Attributes:
        sizes: of context and chunk.
        placement: what goes to which memory.
        outline: the model on paper, in these sizes and places.
        cache: slots for experts; None where they all stay put.
    """

    sizes: Sizes
    placement: Placement
    outline: Outline
    cache: CachePlan | None = None

    @property
    def device_bytes(self) -> int:
        """All that the device must have."""
        return self.outline.needs.device + (self.cache.nbytes if self.cache else 0)

    @property
    def host_bytes(self) -> int:
        """All that the host must have where it computes itself: weights are used in the file."""
        cache = self.cache.nbytes + self.cache.pinned_bytes if self.cache else 0
        return self.outline.needs.device - self.outline.needs.weights + cache


def plan_model(model: ModelFile, device: Device, stream: Stream, wishes: Wishes) -> Plan:
    """The largest chunk that fits, with as much as possible in the device's own memory.

    Args:
        model: an opened, checked model file.
        device: where it will run.
        stream: of that device.
        wishes: what for.

    Raises:
        OutOfMemory: weights, workspace and one sequence do not fit; says what needs how much.
    """
    for plan in _plans(model, device, stream, wishes):
        if _fits(plan, device, is_chunk_chosen=wishes.chunk_tokens > 0):
            _log_mapped_table(model, plan, wishes.homes)
            return plan
    raise _does_not_fit(model, device, plan)  # the last, which needs least


def _plans(model: ModelFile, device: Device, stream: Stream, wishes: Wishes) -> Iterator[Plan]:
    """From the most to the least demanding; at least one."""
    for experts in _expert_homes(wishes.homes, device):
        is_cached = experts is ExpertHome.CACHED
        for chunk in _chunks(device, wishes, is_cached=is_cached):
            chunk_tokens = min(chunk, wishes.context_tokens)
            sizes = Sizes(wishes.context_tokens, chunk_tokens, wishes.num_sequences)
            for is_mapped in _table_homes(model, device, wishes.homes, is_cached=is_cached):
                placement = Placement(experts, is_mapped)
                outline = Outline(model, device, stream, sizes, placement)
                cache = _plan_cache(model, device, outline, wishes) if is_cached else None
                yield Plan(sizes, placement, outline, cache)


def _expert_homes(homes: Homes, device: Device) -> tuple[ExpertHome, ...]:
    if homes.experts is not ExpertHome.AUTO:
        return (homes.experts,)
    if not device.has_own_memory:
        return (ExpertHome.DEVICE,)
    return (ExpertHome.DEVICE, ExpertHome.CACHED)


def _chunks(device: Device, wishes: Wishes, *, is_cached: bool) -> tuple[int, ...]:
    if wishes.chunk_tokens:
        return (wishes.chunk_tokens,)
    if not device.has_own_memory:
        return (CHUNK_WITHOUT_OWN_MEMORY,)
    return CHUNKS_OF_STREAMED if is_cached else CHUNKS


def _table_homes(
    model: ModelFile, device: Device, homes: Homes, *, is_cached: bool
) -> tuple[bool, ...]:
    """Whether the n-gram table is mapped. Its memory is better spent on experts."""
    if homes.ngram_table is not TableHome.AUTO or NGRAM_TABLE not in model.tensors:
        return (homes.ngram_table is TableHome.MAPPED,)
    return (True,) if is_cached and device.has_own_memory else (False, True)


def _plan_cache(model: ModelFile, device: Device, outline: Outline, wishes: Wishes) -> CachePlan:
    """Slots beside everything else and room for one more sequence."""
    needs, shape = outline.needs, cache_shape(model)
    room_bytes = device.memory().free_bytes - needs.device - needs.state
    if not device.has_own_memory:
        room_bytes = shape.num_pairs * shape.slot_bytes // 2  # a cache is but a copy there
    cache = wishes.cache
    if cache.fetch_slots is None:
        num_fetched = fetch_slots(model.spec.num_experts_per_tok) if device.has_own_memory else 0
        cache = replace(cache, fetch_slots=num_fetched)
    if cache.ahead_slots is None:
        is_little = AHEAD_SHARE * TURNS * AHEAD_SLOTS * shape.slot_bytes <= room_bytes
        num_ahead = AHEAD_SLOTS if device.has_own_memory and is_little else 0
        cache = replace(cache, ahead_slots=num_ahead)
    return plan_cache(shape, cache, room_bytes, outline.sizes.chunk_tokens)


def _fits(plan: Plan, device: Device, *, is_chunk_chosen: bool) -> bool:
    free_bytes, needs = device.memory().free_bytes, plan.outline.needs
    if not device.has_own_memory:
        # Memory that nothing is written to yet is still free to whoever asks: only the sum tells.
        return plan.host_bytes <= free_bytes
    share = WORKSPACE_SHARE if plan.cache is None else STREAMED_SHARE
    is_modest = (
        is_chunk_chosen
        or plan.sizes.chunk_tokens <= CHUNKS[-1]
        or needs.workspace <= free_bytes // share
    )
    return is_modest and plan.device_bytes <= free_bytes


def _log_mapped_table(model: ModelFile, plan: Plan, homes: Homes) -> None:
    is_chosen = homes.ngram_table is TableHome.AUTO and plan.cache is None
    if plan.placement.is_table_mapped and is_chosen:
        table_bytes = model.tensor(NGRAM_TABLE).nbytes
        logger.info(
            "the n-gram table stays in host memory: its %s do not fit beside %s of other weights",
            gib(table_bytes),
            gib(plan.outline.needs.weights),
        )


def _does_not_fit(model: ModelFile, device: Device, plan: Plan) -> OutOfMemory:
    free_bytes, total_bytes = device.memory()
    needs, sizes, cache = plan.outline.needs, plan.sizes, plan.cache
    many = "--parallel, " if sizes.num_sequences > 1 else ""
    hint = f"lower {many}--max-context or --prefill"
    if device.has_own_memory:
        need = f"need {gib(plan.device_bytes)} (weights {gib(needs.weights)}, "
        cached = f"expert cache and ring {gib(cache.nbytes)}, " if cache else ""
        hint += ", raise --vram-bytes, close other GPU programs, or --device host"
    else:
        need = f"need {gib(plan.host_bytes)} besides the file ("
        cached = f"experts {gib(cache.nbytes + cache.pinned_bytes)}, " if cache else ""
        hint += ", or close other programs"
    return OutOfMemory(
        f"{model.spec.name or 'the model'} does not fit on {device.name}: {need}{cached}"
        f"{_contexts(sizes)} {gib(sizes.num_sequences * needs.state)}, "
        f"prompt chunks of {sizes.chunk_tokens} tokens {gib(needs.workspace)}), "
        f"free {gib(free_bytes)} of {gib(total_bytes)}",
        hint=hint,
    )


def _contexts(sizes: Sizes) -> str:
    if sizes.num_sequences == 1:
        return f"a context of {sizes.context_tokens} tokens"
    return f"{sizes.num_sequences} contexts of {sizes.context_tokens} tokens"
