"""Brings a model's weights to a device, as planned: the kernels, the experts, everything else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import Arena, InPlace, Store
from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.filling import fill
from strata_cli.engine.experts.placing import Stores
from strata_cli.engine.experts.resident import blob_experts
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.experts.store import DEFAULT_STAGER, ExpertStore, StoreOptions
from strata_cli.engine.forward.fetching import Fetcher
from strata_cli.engine.forward.outline import Needs
from strata_cli.engine.forward.placing import place_weights
from strata_cli.engine.forward.planning import Plan
from strata_cli.engine.forward.weights import ModelWeights
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
Notice: TypeAlias = Callable[[str], None]


class Loaded(NamedTuple):
    """A model on a device.

    Attributes:
        weights: all that a pass reads.
        store: of the experts, where they are cached; must stay open as long. Else None.
        fetcher: of those that steps miss; None: steps read them where they are.
    """

    weights: ModelWeights
    store: ExpertStore | None
    fetcher: Fetcher | None

    def close(self) -> None:
        """Gives the memory back. Safe to call twice."""
        if self.fetcher is not None:
            self.fetcher.close()
        if self.store is not None:
            self.store.close()
        self.weights.close()


def load_weights(
    model: ModelFile,
    device: Device,
    stream: Stream,
    plan: Plan,
    *,
    ranking: NDArray[np.int64] | None = None,
    stager: StagerSize = DEFAULT_STAGER,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> Loaded:
    """Make every weight readable by the device's kernels, and the kernels ready.

    Args:
        model: an opened, checked model file; it must outlive the result.
        device: where the kernels run.
        stream: that they run on.
        plan: what goes where.
        ranking: of (layer, expert) pairs, those first that an expert cache should hold; None: of
            an even profile.
        stager: of experts that stay in the file.
        progress: called with (bytes done, bytes in all).
        notice: called with a sentence when kernels must be compiled first.

    Raises:
        OutOfMemory: others took the memory since the plan was made, or what is to be mapped does
            not fit the host's.
        DeviceError: the file cannot be read any more, or a kernel does not compile.
    """
    device.prepare(plan.outline.kernels(), lambda count: _announce(count, device, notice))
    bar = _Bar(_bytes_to_read(model, device, plan), progress)
    with ExitStack() as undo:
        store = _open_experts(model, device, stream, plan, ranking, stager, bar)
        experts, fetcher = None, None
        if store is not None:
            undo.callback(store.close)
            experts = blob_experts(store.layouts, store.cache.device_addresses)
            fetcher = _open_fetcher(device, stream, plan, store, model.spec.num_experts_per_tok)
            if fetcher is not None:
                undo.callback(fetcher.close)
        stores = _open_stores(device, plan.outline.needs, undo)
        weights = place_weights(model, stores, plan.placement, plan.sizes.context_tokens, experts)
        undo.callback(weights.close)
        for place in (stores.mapped, stores.device):
            if isinstance(place, Arena):
                fill(device, place, bar.add)
        bar.finish()
        undo.pop_all()
        return Loaded(weights, store, fetcher)


class _Bar:
    """Progress over all that is read."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total = total_bytes
        self._progress = progress
        self._done = 0

    def add(self, nbytes: int) -> None:
        """So many more bytes are there."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def reach(self, done_bytes: int, _total_bytes: int) -> None:
        """So many bytes are there."""
        self.add(done_bytes - self._done)

    def finish(self) -> None:
        """All is there, also what was not read because it is used in place."""
        if self._done < self._total:
            self.add(self._total - self._done)


def _bytes_to_read(model: ModelFile, device: Device, plan: Plan) -> int:
    needs = plan.outline.needs
    in_arenas = needs.mapped + (needs.weights if device.has_own_memory else 0)
    in_store = 0 if plan.cache is None else plan.cache.pinned_bytes
    return in_arenas + in_store or sum(info.nbytes for info in model.tensors.values())


def _open_experts(
    model: ModelFile,
    device: Device,
    stream: Stream,
    plan: Plan,
    ranking: NDArray[np.int64] | None,
    stager: StagerSize,
    bar: _Bar,
) -> ExpertStore | None:
    if plan.cache is None:
        return None
    options = StoreOptions(
        num_slots=plan.cache.num_slots,
        pinned_bytes=plan.cache.pinned_bytes,
        least_slots=plan.cache.least_slots,
        stager=stager,
    )
    return ExpertStore.open(model, device, stream, options, ranking=ranking, progress=bar.reach)


def _open_fetcher(
    device: Device, stream: Stream, plan: Plan, store: ExpertStore, top_k: int
) -> Fetcher | None:
    if plan.cache is None or not plan.cache.fetching.num_slots:
        return None
    cache = store.cache
    addresses, sizes = cache.device_addresses, plan.cache.fetching._replace(top_k=top_k)
    return Fetcher(device, stream, store.layouts, addresses, cache.slot_range, sizes)


def _announce(num_sources: int, device: Device, notice: Notice | None) -> None:
    logger.info("compiling %d GPU kernels", num_sources)
    if notice is not None:
        notice(
            f"compiling {num_sources} kernels for {device.name}, once; "
            "later starts find them in the cache"
        )


def _open_stores(device: Device, needs: Needs, undo: ExitStack) -> Stores:
    """Memory for the weights, mapped memory first: where it is refused, nothing large was taken."""
    in_place = InPlace(device)
    mapped: Store = in_place
    if needs.mapped:
        try:
            mapped = Arena(undo.enter_context(device.allocate_pinned(needs.mapped)))
        except OutOfMemory as error:
            raise OutOfMemory(
                f"the weights that stay in host memory do not fit there: {error.message}",
                hint="raise --vram-bytes so that they fit the device, or use a smaller model",
            ) from error
    if not device.has_own_memory:
        return Stores(in_place, mapped)
    return Stores(Arena(undo.enter_context(device.allocate(needs.weights))), mapped)
