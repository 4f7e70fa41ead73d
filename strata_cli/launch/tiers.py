"""What each memory of the machine will hold."""

from __future__ import annotations

from collections.abc import Iterator
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
                "cache and ring of experts" if fit.is_streamed else "all experts",
                fit.resident_bytes,
                fit.num_resident,
            ),
            Part(_contexts(fit), fit.state_bytes),
            Part(f"prompt chunks of {fit.chunk_tokens} tokens", fit.workspace_bytes),
        ),
    )
    ram = Tier("RAM", machine.memory.free_bytes, tuple(_locked(model, fit)))
    return (vram, ram, Tier("disk", 0, tuple(_on_disk(model, fit))))


def _locked(model: ModelFacts, fit: Fit) -> Iterator[Part]:
    if fit.pinned_bytes:
        count = fit.share_of(fit.pinned_bytes, model.num_experts)
        which = "all experts" if count == model.num_experts else "experts"
        yield Part(f"{which}, page-locked", fit.pinned_bytes, count)
    if fit.mapped_bytes:
        yield Part("n-gram table, page-locked", fit.mapped_bytes)


def _on_disk(model: ModelFacts, fit: Fit) -> Iterator[Part]:
    yield Part("the file, read at the start", model.file_bytes)
    rest_bytes = fit.experts_bytes - fit.pinned_bytes
    if fit.is_streamed and rest_bytes:
        count = model.num_experts - fit.share_of(fit.pinned_bytes, model.num_experts)
        yield Part("of it experts, read whenever they are used", rest_bytes, count)


def _contexts(fit: Fit) -> str:
    if fit.num_sequences == 1:
        return f"a context of {fit.context_tokens} tokens"
    return f"{fit.num_sequences} contexts of {fit.context_tokens} tokens"


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
            Part(_contexts(fit), fit.state_bytes),
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
    dense_bytes = hot_bytes - fit.experts_bytes
    count = fit.share_of(max(room_bytes - dense_bytes, 0), model.num_experts)
    return min(room_bytes, hot_bytes), min(count, model.num_experts)
