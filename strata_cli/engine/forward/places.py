"""Where a planned model will be: what commands and servers tell of an engine, and check."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from strata_cli.engine.device.base import Device
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.caching import CachePlan
from strata_cli.engine.forward.outline import Sizes
from strata_cli.engine.forward.planning import Plan
from strata_cli.engine.model.tensors import ModelFile


class Places(NamedTuple):
    """Where a planned model will be.

    Attributes:
        device_name: what computes.
        has_own_memory: it does so in memory of its own.
        sizes: of context and chunk.
        num_experts: of all layers together.
        num_experts_per_tok: that a token is routed to.
        is_mapped: experts are read from host memory, without a cache.
        cache: of experts; None: they all stay put.
    """

    device_name: str
    has_own_memory: bool
    sizes: Sizes
    num_experts: int
    num_experts_per_tok: int
    is_mapped: bool = False
    cache: CachePlan | None = None

    @classmethod
    def of(cls, model: ModelFile, device: Device, plan: Plan) -> Places:
        """Of a plan for a model on a device."""
        spec = model.spec
        return cls(
            device_name=device.name,
            has_own_memory=device.has_own_memory,
            sizes=plan.sizes,
            num_experts=spec.num_layers * spec.num_experts,
            num_experts_per_tok=spec.num_experts_per_tok,
            is_mapped=plan.placement.experts is ExpertHome.MAPPED,
            cache=plan.cache,
        )

    @property
    def is_all_resident(self) -> bool:
        """Whether a cache has room for all experts."""
        return self.cache is not None and self.cache.num_slots >= self.cache.shape.num_pairs

    @property
    def is_all_pinned(self) -> bool:
        """Whether all experts of a cache are in page-locked memory, too."""
        return self.cache is not None and self.cache.pinned_bytes >= self.cache.shape.arena_bytes

    def describe(self) -> str:
        """In words."""
        return f"on {self.device_name}: {self.sizes.describe()}; {self._experts()}"

    def _experts(self) -> str:
        cache = self.cache
        if cache is None:
            where = "host memory" if self.is_mapped else "its memory"
            return f"all {self.num_experts} experts in {where}"
        text = f"{cache.num_slots} of {self.num_experts} experts in the cache"
        if self.is_all_pinned:
            return f"{text}, all of them in page-locked memory"
        if cache.pinned_bytes:
            share = cache.pinned_bytes / cache.shape.arena_bytes
            return f"{text}, {share:.0%} of all in page-locked memory, the file has the rest"
        return f"{text}, the file has all of them"


Planned: TypeAlias = Callable[[Places], None]
"""Told of a plan; what it raises ends the loading."""
