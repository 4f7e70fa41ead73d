"""The pinned arena: every expert's blob in page-locked memory, those of a layer side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Device, Tensor
from strata_cli.engine.device.filling import Rows, fill_rows
from strata_cli.engine.device.host_memory import host_memory, memlock_limit
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.experts.blobs import BlobLayout, arena_bytes, blob_parts
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]

_HINT = (
    "raise the limit (ulimit -l unlimited, or LimitMEMLOCK=infinity in the systemd unit), "
    "close other programs, or leave experts in the file: --arena-pin-gib or --mmap-experts"
)


class BlobArena:
    """Blobs in page-locked memory, which kernels read in place too. A context manager.

    Attributes:
        num_layers, num_experts: of the model.
        layers: per layer, the blobs of its first experts, uint8 [pinned experts, blob_bytes].
        is_pinned: which experts are here, [L, E].
        addresses: where kernels find them, int64 [L, E]; 0: not here.
    """

    def __init__(self, layers: Sequence[Tensor], num_experts: int) -> None:
        self.layers = tuple(layers)
        self.num_layers, self.num_experts = len(layers), num_experts
        counts = np.array([layer.shape[0] for layer in layers])
        ids = np.arange(num_experts)
        self.is_pinned: NDArray[np.bool_] = ids < counts[:, None]
        rows = [layer.address + ids * layer.shape[1] for layer in layers]
        self.addresses: NDArray[np.int64] = np.where(self.is_pinned, rows, 0)

    @property
    def nbytes(self) -> int:
        """Of the blobs here."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def pinned_share(self) -> float:
        """Of all experts, the share that is here."""
        return float(self.is_pinned.mean())

    def blob(self, layer: int, expert: int) -> Tensor:
        """An expert that is here, uint8 [blob_bytes]."""
        return self.layers[layer].rows(expert, expert + 1).reshape(self.layers[layer].shape[1])

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        for layer in self.layers:
            layer.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_arena(
    model: ModelFile,
    layouts: Sequence[BlobLayout],
    device: Device,
    pinned_bytes: int | None = None,
    progress: Progress | None = None,
) -> BlobArena:
    """Lock memory for the blobs and read them into it. Blocks until they are there.

    Args:
        model: an opened, checked model file.
        layouts: of its blobs.
        device: whose copies and kernels read them.
        pinned_bytes: most bytes of blobs, shared evenly by the layers; None: all of them.
        progress: called with (bytes done, bytes in all).

    Raises:
        OutOfMemory: the machine has not enough, or may not lock it; nothing stays allocated.
        DeviceError: the file cannot be read any more.
    """
    num_experts = model.spec.num_experts
    counts = pinned_counts(layouts, num_experts, pinned_bytes)
    with ExitStack() as undo:
        arena = BlobArena(_allocate(device, layouts, counts, undo), num_experts)
        _fill(model, arena, progress)
        undo.pop_all()
        return arena


def pinned_counts(
    layouts: Sequence[BlobLayout], num_experts: int, pinned_bytes: int | None
) -> list[int]:
    """How many experts of each layer fit into so many bytes, as evenly as whole blobs allow."""
    whole = arena_bytes(layouts, num_experts)
    if pinned_bytes is None or pinned_bytes >= whole:
        return [num_experts] * len(layouts)
    return [max(pinned_bytes, 0) * num_experts // whole] * len(layouts)


def _allocate(
    device: Device, layouts: Sequence[BlobLayout], counts: Sequence[int], undo: ExitStack
) -> list[Tensor]:
    """One buffer for each layer: the driver locks smaller pieces where it refuses a large one."""
    need = sum(layout.nbytes * count for layout, count in zip(layouts, counts, strict=True))
    if need > host_memory().free_bytes:
        raise _does_not_fit(need, 0, "")
    layers: list[Tensor] = []
    for layout, count in zip(layouts, counts, strict=True):
        nbytes = layout.nbytes * count
        try:
            buffer = undo.enter_context(device.allocate_pinned(nbytes + TAIL_BYTES))
        except OutOfMemory as error:
            locked = sum(layer.nbytes for layer in layers)
            raise _does_not_fit(need, locked, f" ({error.message})") from error
        layers.append(Tensor.over(buffer, (count, layout.nbytes), np.uint8))
    return layers


def _does_not_fit(need: int, locked: int, reason: str) -> OutOfMemory:
    free_bytes, total_bytes = host_memory()
    return OutOfMemory(
        f"the experts do not fit page-locked host memory: need {gib(need)}, locked {gib(locked)}, "
        f"available {gib(free_bytes)} of {gib(total_bytes)}, "
        f"RLIMIT_MEMLOCK {memlock_limit()}{reason}",
        hint=_HINT,
    )


def _fill(model: ModelFile, arena: BlobArena, progress: Progress | None) -> None:
    parts = list(_rows(model, arena))
    total_bytes = sum(part.source.nbytes for part in parts)
    done_bytes, start = 0, time.perf_counter()

    def count(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    fill_rows(parts, count)
    if not total_bytes:
        logger.info("no experts in page-locked memory: they come from the file when needed")
        return
    seconds = max(time.perf_counter() - start, 1e-9)
    share = round(100 * arena.pinned_share)
    logger.info(
        "%s of experts in page-locked memory (%d %% of them), read at %.1f GB/s",
        gib(arena.nbytes),
        share,
        total_bytes / seconds / 1e9,
    )


def _rows(model: ModelFile, arena: BlobArena) -> Iterator[Rows]:
    for layer, blobs in enumerate(arena.layers):
        out, count = blobs.numpy(), blobs.shape[0]
        for part in blob_parts(model, layer):
            yield Rows(out[:, part.offset_bytes : part.end_bytes], part.rows[:count])
