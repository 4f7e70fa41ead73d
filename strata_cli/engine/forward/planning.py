"""Chooses how much of a device a model takes, and what of it stays in host memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.outline import Outline, Sizes
from strata_cli.engine.forward.placing import Placement
from strata_cli.engine.model.expected import NGRAM_TABLE
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

CHUNKS: tuple[int, ...] = (4096, 2048, 1024, 512)  # prompt chunks that are tried, best first
CHUNK_WITHOUT_OWN_MEMORY = 512
WORKSPACE_SHARE = 8  # at most one such part of the free memory is for a chunk's workspace


class TableHome(Enum):
    """Where the n-gram table lies. No result depends on it."""

    AUTO = "auto"  # with the other weights if it fits beside them, else mapped
    DEVICE = "device"
    MAPPED = "mapped"  # page-locked host memory, which kernels read over the link


@dataclass(frozen=True, slots=True)
class Homes:
    """Where the large parts of a model are wanted."""

    experts: ExpertHome = ExpertHome.DEVICE
    ngram_table: TableHome = TableHome.AUTO


DEFAULT_HOMES = Homes()


class Wishes(NamedTuple):
    """What a model is to be loaded for.

    Attributes:
        context_tokens: most tokens of a sequence.
        chunk_tokens: most tokens of a pass; 0 is automatic.
        homes: where the large parts are wanted.
    """

    context_tokens: int
    chunk_tokens: int = 0
    homes: Homes = DEFAULT_HOMES


@dataclass(frozen=True, slots=True)
class Plan:
    """A model's place on a device.

    Attributes:
        sizes: of context and chunk.
        placement: what goes to which memory.
        outline: the model on paper, in these sizes and places.
    """

    sizes: Sizes
    placement: Placement
    outline: Outline


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
    chunks = CHUNKS if device.has_own_memory else (CHUNK_WITHOUT_OWN_MEMORY,)
    if wishes.chunk_tokens:
        chunks = (wishes.chunk_tokens,)
    table = wishes.homes.ngram_table
    may_choose = table is TableHome.AUTO and NGRAM_TABLE in model.tensors
    for chunk in chunks:
        sizes = Sizes(wishes.context_tokens, min(chunk, wishes.context_tokens))
        for is_mapped in (False, True) if may_choose else (table is TableHome.MAPPED,):
            placement = Placement(wishes.homes.experts, is_mapped)
            yield Plan(sizes, placement, Outline(model, device, stream, sizes, placement))


def _fits(plan: Plan, device: Device, *, is_chunk_chosen: bool) -> bool:
    if not device.has_own_memory:
        return True
    free_bytes, needs = device.memory().free_bytes, plan.outline.needs
    is_modest = (
        is_chunk_chosen
        or plan.sizes.chunk_tokens <= CHUNKS[-1]
        or needs.workspace <= free_bytes // WORKSPACE_SHARE
    )
    return is_modest and needs.device <= free_bytes


def _log_mapped_table(model: ModelFile, plan: Plan, homes: Homes) -> None:
    if plan.placement.is_table_mapped and homes.ngram_table is TableHome.AUTO:
        table_bytes = model.tensor(NGRAM_TABLE).nbytes
        logger.info(
            "the n-gram table stays in host memory: its %s do not fit beside %s of other weights",
            gib(table_bytes),
            gib(plan.outline.needs.weights),
        )


def _does_not_fit(model: ModelFile, device: Device, plan: Plan) -> OutOfMemory:
    free_bytes, total_bytes = device.memory()
    needs, sizes = plan.outline.needs, plan.sizes
    return OutOfMemory(
        f"{model.spec.name or 'the model'} does not fit on {device.name}: "
        f"need {gib(needs.device)} (weights {gib(needs.weights)}, "
        f"a context of {sizes.context_tokens} tokens {gib(needs.state)}, "
        f"prompt chunks of {sizes.chunk_tokens} tokens {gib(needs.workspace)}), "
        f"free {gib(free_bytes)} of {gib(total_bytes)}",
        hint="lower --max-context or --prefill, raise --vram-bytes, close other GPU programs, "
        "or --device host",
    )
