"""What a model takes of a device, by the engine's own rules, in the numbers that a plan shows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from strata_cli.engine.device.paper import DescribedGpu
from strata_cli.engine.engine import EngineOptions
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.fitting import fit_on_paper
from strata_cli.engine.forward.caching import cache_shape
from strata_cli.engine.forward.planning import Plan
from strata_cli.engine.model.expected import NGRAM_TABLE
from strata_cli.engine.model.shards import model_stem
from strata_cli.engine.model.tensors import ModelFile

LONGEST_NAME = 80


class FitWishes(NamedTuple):
    """What is wanted of a fit; 0 or None: automatic.

    Attributes:
        context_tokens: most tokens of a sequence.
        chunk_tokens: of a prompt.
        expert_cache: experts in device memory where not all are.
        pinned_bytes: most of experts in page-locked memory; None: all.
        num_sequences: that are there at once.
        threads: of the host.
    """

    context_tokens: int = 0
    chunk_tokens: int = 0
    expert_cache: int | None = None
    pinned_bytes: int | None = None
    num_sequences: int = 1
    threads: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model's place on a device, in bytes.

    Attributes:
        context_tokens, chunk_tokens, num_sequences: that memory is for.
        is_streamed: not all experts stay on the device.
        dense_bytes: weights on the device beside the routed experts.
        experts_bytes: of all routed experts.
        resident_bytes: of the device, for experts: all of them, or the slots of a cache.
        num_resident: experts there, of all layers together.
        mapped_bytes: of page-locked host memory, for weights beside the experts.
        pinned_bytes: of page-locked host memory, for experts.
        workspace_bytes: of the device, for a pass.
        state_bytes: of the device, for all sequences.
    """

    context_tokens: int
    chunk_tokens: int
    num_sequences: int
    is_streamed: bool
    dense_bytes: int
    experts_bytes: int
    resident_bytes: int
    num_resident: int
    mapped_bytes: int
    pinned_bytes: int
    workspace_bytes: int
    state_bytes: int

    @property
    def locked_bytes(self) -> int:
        """Of page-locked host memory in all."""
        return self.mapped_bytes + self.pinned_bytes

    def share_of(self, nbytes: int, num_experts: int) -> int:
        """How many of a number of experts so many bytes of experts are."""
        return nbytes * num_experts // max(self.experts_bytes, 1)


class ModelFacts(Protocol):
    """A model as a plan needs to know it."""

    @property
    def path(self) -> Path | None:
        """The file, or a shard; None: the embedded model."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """What it is read from, first shard first."""
        ...

    @property
    def name(self) -> str:
        """What it calls itself."""
        ...

    @property
    def file_bytes(self) -> int:
        """Of all weights in its files."""
        ...

    @property
    def table_bytes(self) -> int:
        """Of those, in the n-gram table, of which a token reads a few rows."""
        ...

    @property
    def context_tokens(self) -> int:
        """Most that it was made for."""
        ...

    @property
    def num_experts(self) -> int:
        """Routed experts, of all layers together."""
        ...

    def fit(self, wishes: FitWishes, gpu: DescribedGpu | None) -> Fit:
        """What it would take of a GPU that has so much memory to give, or of the host.

        Raises:
            OutOfMemory: it does not fit.
            InputError: it has no such context.
        """
        ...


class FileFacts:
    """ModelFacts of an opened, checked model file, which must outlive it."""

    def __init__(self, model: ModelFile, path: Path | None) -> None:
        self._model = model
        self.path = path
        self.files = model.file.paths
        self.name = _printable(model.spec.name or (model_stem(path) if path else ""))
        self.file_bytes = sum(info.nbytes for info in model.tensors.values())
        self.table_bytes = model.tensors[NGRAM_TABLE].nbytes if NGRAM_TABLE in model.tensors else 0
        self.context_tokens = model.spec.context_tokens
        self.num_experts = model.spec.num_layers * model.spec.num_experts

    def fit(self, wishes: FitWishes, gpu: DescribedGpu | None) -> Fit:
        """See ModelFacts."""
        options = EngineOptions(
            model=self._model.file.paths[0],
            threads=wishes.threads,
            max_context=wishes.context_tokens,
            prefill=wishes.chunk_tokens,
            expert_cache=wishes.expert_cache,
            pinned_bytes=wishes.pinned_bytes,
            num_sequences=wishes.num_sequences,
        )
        plan = fit_on_paper(self._model, options, gpu)
        return Fit(**_bytes_of_experts(self._model, plan), **_bytes_of_others(plan))


def _printable(name: str) -> str:
    """The file may call itself anything; this is shown on terminals and written into a unit."""
    text = "".join(each if each.isprintable() and each != "\\" else "?" for each in name)
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


def _bytes_of_others(plan: Plan) -> dict[str, Any]:
    needs = plan.outline.needs
    return {
        "context_tokens": plan.sizes.context_tokens,
        "chunk_tokens": plan.sizes.chunk_tokens,
        "num_sequences": plan.sizes.num_sequences,
        "is_streamed": plan.cache is not None,
        "mapped_bytes": needs.mapped,
        "workspace_bytes": needs.workspace,
        "state_bytes": needs.state * plan.sizes.num_sequences,
    }


def _bytes_of_experts(model: ModelFile, plan: Plan) -> dict[str, Any]:
    shape, weights_bytes = cache_shape(model), plan.outline.needs.weights
    if plan.cache is None:
        assert plan.placement.experts is ExpertHome.DEVICE
        return {
            "dense_bytes": max(weights_bytes - shape.arena_bytes, 0),
            "experts_bytes": shape.arena_bytes,
            "resident_bytes": shape.arena_bytes,
            "num_resident": shape.num_pairs,
            "pinned_bytes": 0,
        }
    return {
        "dense_bytes": weights_bytes,
        "experts_bytes": shape.arena_bytes,
        "resident_bytes": plan.cache.nbytes,
        "num_resident": plan.cache.num_slots,
        "pinned_bytes": plan.cache.pinned_bytes,
    }
