"""The pinned arena: every expert's blob in page-locked memory, those of a layer side by side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Buffer, Device, Tensor
from strata_cli.engine.device.filling import Rows, fill_rows
from strata_cli.engine.device.host_memory import host_memory, memlock_limit
from strata_cli.engine.device.sizes import gib
from strata_cli.engine.experts.blobs import BlobLayout, arena_bytes, blob_parts
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import OutOfMemory

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[int, int], None]

LOCK_THREADS = 3
"""Layers whose memory is taken at once: the driver locks one while others are given their pages."""

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
    layers: list[Tensor] = []
    start = time.perf_counter()
    with ExitStack() as undo:
        room = _Room(device, layouts, counts, undo)
        _fill(model, room, layers, progress)
        arena = BlobArena(layers, num_experts)
        undo.pop_all()
    _tell(arena, time.perf_counter() - start)
    return arena


def pinned_counts(
    layouts: Sequence[BlobLayout], num_experts: int, pinned_bytes: int | None
) -> list[int]:
    """How many experts of each layer fit into so many bytes, as evenly as whole blobs allow."""
    whole = arena_bytes(layouts, num_experts)
    if pinned_bytes is None or pinned_bytes >= whole:
        return [num_experts] * len(layouts)
    return [max(pinned_bytes, 0) * num_experts // whole] * len(layouts)


class _Room:
    """Memory for layer after layer, locked by threads, some layers ahead of its use.

    One buffer for each layer: the driver locks smaller pieces where it refuses a large one.

    Attributes:
        counts: experts of each layer.

    Raises:
        OutOfMemory: the machine has less.
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[BlobLayout],
        counts: Sequence[int],
        undo: ExitStack,
    ) -> None:
        self.counts = tuple(counts)
        self._shapes = [(n, layout.nbytes) for layout, n in zip(layouts, counts, strict=True)]
        self._device, self._undo = device, undo
        if self.nbytes > host_memory().free_bytes:
            raise _does_not_fit(self.nbytes, 0, "")

    @property
    def nbytes(self) -> int:
        """Of all layers."""
        return sum(count * nbytes for count, nbytes in self._shapes)

    def layers(self) -> Generator[Tensor, None, None]:
        """Each layer's memory as soon as it is there; ``undo`` closes what was given.

        Raises:
            OutOfMemory: the driver would not lock it.
        """
        with ThreadPoolExecutor(LOCK_THREADS, thread_name_prefix="strata-lock") as threads:
            waiting = [
                threads.submit(self._device.allocate_pinned, count * nbytes + TAIL_BYTES)
                for count, nbytes in self._shapes
            ]
            locked = 0
            try:
                for shape in self._shapes:
                    buffer = waiting[0].result()
                    self._undo.enter_context(buffer)
                    del waiting[0]
                    yield Tensor.over(buffer, shape, np.uint8)
                    locked += shape[0] * shape[1]
            except OutOfMemory as error:
                raise _does_not_fit(self.nbytes, locked, f" ({error.message})") from error
            finally:
                threads.shutdown(cancel_futures=True)
                _close_all(waiting)


def _close_all(waiting: Sequence[Future[Buffer]]) -> None:
    for future in waiting:
        if not future.cancelled() and future.exception() is None:
            future.result().close()


def _does_not_fit(need: int, locked: int, reason: str) -> OutOfMemory:
    free_bytes, total_bytes = host_memory()
    return OutOfMemory(
        f"the experts do not fit page-locked host memory: need {gib(need)}, locked {gib(locked)}, "
        f"available {gib(free_bytes)} of {gib(total_bytes)}, "
        f"RLIMIT_MEMLOCK {memlock_limit()}{reason}",
        hint=_HINT,
    )


def _fill(model: ModelFile, room: _Room, layers: list[Tensor], progress: Progress | None) -> None:
    """Read every layer into its memory, from the first on while others are still locked."""
    total_bytes = sum(
        part.rows[:count].nbytes
        for layer, count in enumerate(room.counts)
        for part in blob_parts(model, layer)
    )
    done_bytes = 0

    def count(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if progress is not None:
            progress(done_bytes, total_bytes)

    def rows() -> Generator[Rows, None, None]:
        with closing(room.layers()) as locked:
            for blobs in locked:
                layers.append(blobs)
                yield from _rows(model, len(layers) - 1, blobs)

    with closing(rows()) as parts:
        fill_rows(parts, count)


def _rows(model: ModelFile, layer: int, blobs: Tensor) -> Iterator[Rows]:
    out, count = blobs.numpy(), blobs.shape[0]
    for part in blob_parts(model, layer):
        yield Rows(out[:, part.offset_bytes : part.end_bytes], part.rows[:count])


def _tell(arena: BlobArena, seconds: float) -> None:
    if not arena.nbytes:
        logger.info("no experts in page-locked memory: they come from the file when needed")
        return
    logger.info(
        "%s of experts in page-locked memory (%d %% of them), locked and read at %.1f GB/s",
        gib(arena.nbytes),
        round(100 * arena.pinned_share),
        arena.nbytes / max(seconds, 1e-9) / 1e9,
    )
