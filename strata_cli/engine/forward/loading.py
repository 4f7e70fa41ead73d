"""Brings a model's weights to a device: where to, whether they fit, the kernels, the bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from strata_cli.engine.device.arena import Arena, InPlace, Store
from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.filling import fill
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.experts.placing import ExpertHome, Stores
from strata_cli.engine.forward.outline import Needs, Outline, Sizes
from strata_cli.engine.forward.placing import Placement, place_weights
from strata_cli.engine.forward.weights import ModelWeights
from strata_cli.engine.model.expected import NGRAM_TABLE
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]
Notice: TypeAlias = Callable[[str], None]


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


def load_weights(
    model: ModelFile,
    device: Device,
    stream: Stream,
    sizes: Sizes,
    homes: Homes,
    progress: Progress | None = None,
    notice: Notice | None = None,
) -> ModelWeights:
    """Make every weight readable by the device's kernels, and the kernels ready.

    Args:
        model: an opened, checked model file; it must outlive the result.
        device: where the kernels run.
        stream: where they will be enqueued.
        sizes: what else needs memory there.
        homes: where the large parts are wanted.
        progress: called with (bytes done, bytes in all).
        notice: called with a sentence when kernels must be compiled first.

    Raises:
        OutOfMemory: weights, workspace and one sequence do not fit; says what needs how much.
        DeviceError: the file cannot be read any more, or a kernel does not compile.
    """
    outline, placement = _choose_placement(model, device, stream, sizes, homes)
    _require_room(model, device, sizes, outline.needs)
    device.prepare(outline.kernels(), lambda count: _announce(count, device, notice))
    with ExitStack() as undo:
        stores = _open_stores(device, outline.needs, undo)
        weights = place_weights(model, stores, placement, sizes.context_tokens)
        undo.callback(weights.close)
        arenas = [store for store in (stores.mapped, stores.device) if isinstance(store, Arena)]
        _fill_all(device, arenas, progress)
        if not arenas and progress is not None:
            nbytes = sum(info.nbytes for info in model.tensors.values())
            progress(nbytes, nbytes)
        undo.pop_all()
        return weights


def _choose_placement(
    model: ModelFile, device: Device, stream: Stream, sizes: Sizes, homes: Homes
) -> tuple[Outline, Placement]:
    is_mapped = homes.ngram_table is TableHome.MAPPED
    placement = Placement(homes.experts, is_table_mapped=is_mapped)
    outline = Outline(model, device, stream, sizes, placement)
    free_bytes = device.memory().free_bytes
    if (
        homes.ngram_table is TableHome.AUTO
        and device.has_own_memory
        and NGRAM_TABLE in model.tensors
        and outline.needs.device > free_bytes
    ):
        logger.info(
            "the n-gram table stays in host memory: %s do not fit beside %s of other weights",
            gib(model.tensor(NGRAM_TABLE).nbytes),
            gib(outline.needs.weights - model.tensor(NGRAM_TABLE).nbytes),
        )
        placement = replace(placement, is_table_mapped=True)
        outline = Outline(model, device, stream, sizes, placement)
    return outline, placement


def _require_room(model: ModelFile, device: Device, sizes: Sizes, needs: Needs) -> None:
    """Raises OutOfMemory before anything is allocated, while all of it can still be told."""
    free_bytes, total_bytes = device.memory()
    if not device.has_own_memory or needs.device <= free_bytes:
        return
    raise OutOfMemory(
        f"{model.spec.name or 'the model'} does not fit on {device.name}: "
        f"need {gib(needs.device)} (weights {gib(needs.weights)}, "
        f"a context of {sizes.context_tokens} tokens {gib(needs.state)}, "
        f"prompt chunks of {sizes.chunk_tokens} tokens {gib(needs.workspace)}), "
        f"free {gib(free_bytes)} of {gib(total_bytes)}",
        hint="lower --max-context or --prefill, raise --vram-bytes, close other GPU programs, "
        "or --device host",
    )


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
