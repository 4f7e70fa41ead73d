"""What each memory of the machine will hold."""

from __future__ import annotations

from typing import NamedTuple

from strata_cli.engine.device.gpu_survey import GpuFacts
from strata_cli.launch.fits import Fit, ModelFacts
from strata_cli.launch.machine import Machine


class Part(NamedTuple):
    """Something that is held.

    Attributes:
        what: in words.
        nbytes: of it.
        num_experts: that it has; None: it holds none.
    """

    what: str
    nbytes: int
    num_experts: int | None = None


class Tier(NamedTuple):
    """A memory.

    Attributes:
        name: VRAM, RAM or disk.
        free_bytes: before.
        parts: what it will hold.
    """

    name: str
    free_bytes: int
    parts: tuple[Part, ...]

    @property
    def left_bytes(self) -> int:
        """What others can still have of it."""
        return self.free_bytes - sum(part.nbytes for part in self.parts)


def tiers_of(
    machine: Machine, model: ModelFacts, fit: Fit, gpu: GpuFacts | None
) -> tuple[Tier, ...]:
    """The tiers, fastest first."""
    if gpu is None:
        return (_ram_of_host(machine, model, fit), _disk_of_host(machine, model, fit))
    vram = Tier(
        "VRAM",
        gpu.free_bytes,
        (
            Part("weights beside the experts", fit.dense_bytes),
            Part(
                "experts, those used most" if fit.is_streamed else "all experts",
                fit.resident_bytes,
                fit.num_resident,
            ),
            Part(f"a context of {fit.context_tokens} tokens", fit.state_bytes),
            Part(f"prompt chunks of {fit.chunk_tokens} tokens", fit.workspace_bytes),
        ),
    )
    locked = []
    if fit.is_streamed:
        locked.append(Part("all experts, page-locked", fit.pinned_bytes, model.num_experts))
    if fit.mapped_bytes:
        locked.append(Part("n-gram table, page-locked", fit.mapped_bytes))
    ram = Tier("RAM", machine.memory.free_bytes, tuple(locked))
    return (vram, ram, Tier("disk", 0, (Part("the file, read at the start", 0),)))


def _ram_of_host(machine: Machine, model: ModelFacts, fit: Fit) -> Tier:
    free_bytes = machine.memory.free_bytes
    need = fit.workspace_bytes + fit.state_bytes
    room = max(free_bytes - need, 0)
    cached, num_cached = _cached(model, fit, room)
    what = "weights, in the file's pages"
    return Tier(
        "RAM",
        free_bytes,
        (
            Part(what, cached, num_cached),
            Part(f"a context of {fit.context_tokens} tokens", fit.state_bytes),
            Part(f"prompt chunks of {fit.chunk_tokens} tokens", fit.workspace_bytes),
        ),
    )


def _disk_of_host(machine: Machine, model: ModelFacts, fit: Fit) -> Tier:
    need = fit.workspace_bytes + fit.state_bytes
    cached, num_cached = _cached(model, fit, max(machine.memory.free_bytes - need, 0))
    hot_bytes = model.file_bytes - model.table_bytes
    parts = []
    if cached < hot_bytes:
        rest = model.num_experts - num_cached
        parts.append(Part("experts, read whenever they are used", hot_bytes - cached, rest))
    if model.table_bytes:
        parts.append(Part("n-gram table, a few rows for each token", model.table_bytes))
    return Tier("disk", 0, tuple(parts))


def _cached(model: ModelFacts, fit: Fit, room_bytes: int) -> tuple[int, int]:
    """Bytes and experts of the file that so much memory can hold."""
    hot_bytes = model.file_bytes - model.table_bytes
    if hot_bytes <= room_bytes:
        return hot_bytes, model.num_experts
    expert_bytes = max(fit.experts_bytes // max(model.num_experts, 1), 1)
    dense_bytes = hot_bytes - fit.experts_bytes
    count = max(room_bytes - dense_bytes, 0) // expert_bytes
    return min(room_bytes, hot_bytes), min(count, model.num_experts)
