"""Brings a model's weights to a device, as planned: the kernels first, then the bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeAlias

from strata_cli.engine.device.arena import Arena, InPlace, Store
from strata_cli.engine.device.base import Device
from strata_cli.engine.device.filling import fill
from strata_cli.engine.experts.placing import Stores
from strata_cli.engine.forward.outline import Needs
from strata_cli.engine.forward.placing import place_weights
from strata_cli.engine.forward.planning import Plan
from strata_cli.engine.forward.weights import ModelWeights
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
Notice: TypeAlias = Callable[[str], None]


def load_weights(
    model: ModelFile,
    device: Device,
    plan: Plan,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> ModelWeights:
    """Make every weight readable by the device's kernels, and the kernels ready.

    Args:
        model: an opened, checked model file; it must outlive the result.
        device: where the kernels run.
        plan: what goes where.
        progress: called with (bytes done, bytes in all).
        notice: called with a sentence when kernels must be compiled first.

    Raises:
        OutOfMemory: others took the memory since the plan was made, or what is to be mapped does
            not fit the host's.
        DeviceError: the file cannot be read any more, or a kernel does not compile.
    """
    outline = plan.outline
    device.prepare(outline.kernels(), lambda count: _announce(count, device, notice))
    with ExitStack() as undo:
        stores = _open_stores(device, outline.needs, undo)
        weights = place_weights(model, stores, plan.placement, plan.sizes.context_tokens)
        undo.callback(weights.close)
        arenas = [store for store in (stores.mapped, stores.device) if isinstance(store, Arena)]
        _fill_all(device, arenas, progress)
        if not arenas and progress is not None:
            nbytes = sum(info.nbytes for info in model.tensors.values())
            progress(nbytes, nbytes)
        undo.pop_all()
        return weights


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


def _fill_all(device: Device, arenas: list[Arena], progress: Progress | None) -> None:
    total_bytes = sum(arena.used_bytes for arena in arenas)
    done_bytes = 0

    def count(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    for arena in arenas:
        fill(device, arena, count)
