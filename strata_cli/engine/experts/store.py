"""The store of all experts: pinned arena, stager, and the cache in device memory over them."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.experts.arena import BlobArena, Progress, open_arena
from strata_cli.engine.experts.blobs import BlobLayout, BlobReader, blob_layouts, slot_bytes
from strata_cli.engine.experts.cache import LEAST_SLOTS, CacheSizes, ExpertCache
from strata_cli.engine.experts.profile import even_profile
from strata_cli.engine.experts.stager import JobList, Stager, StagerSize
from strata_cli.engine.experts.streaming import Blobs
from strata_cli.engine.experts.uploading import Uploader
from strata_cli.engine.model.tensors import ModelFile

logger = logging.getLogger(__name__)

DEFAULT_STAGER = StagerSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """How the experts are kept. No result depends on it.

    Attributes:
        num_slots: of the cache; more than there are experts are not made.
        pinned_bytes: most bytes of blobs in page-locked memory, the others are staged out of the
            file whenever they are copied; None: all blobs must be pinned.
        least_slots: of the cache that no loan takes.
        stager: see StagerSize.
    """

    num_slots: int
    pinned_bytes: int | None = None
    least_slots: int = LEAST_SLOTS
    stager: StagerSize = DEFAULT_STAGER


class ExpertStore:
    """Every expert of a model; a context manager. Made by open().

    Attributes:
        num_layers, num_experts: of the model.
        layouts: of each layer's blobs.
        slot_bytes: of every slot, in the cache and in rings.
        copies: the stream for rings and refills; whoever uses it, one at a time.
        blobs: where streams of experts find the bytes.
        cache: the slots.
        is_pinned: which experts are in page-locked memory, [L, E].
        pinned_share: of all experts, those in page-locked memory.
        link_gbps: rate of the fastest copies from host memory as the store was opened, in GB/s;
            0: unknown. It stays, so that what adapts by it does not depend on what was read.
    """

    def __init__(
        self,
        layouts: tuple[BlobLayout, ...],
        copies: Stream,
        arena: BlobArena,
        stager: Stager | None,
        cache: ExpertCache,
        uploader: Uploader,
    ) -> None:
        self.num_layers, self.num_experts = arena.num_layers, arena.num_experts
        self.layouts = layouts
        self.slot_bytes = cache.slot_bytes
        self.copies = copies
        self.blobs = Blobs(arena.layers, None if stager is None else ~arena.is_pinned, stager)
        self.cache = cache
        self.is_pinned = arena.is_pinned
        self.pinned_share = arena.pinned_share
        self._stager = stager
        self.link_gbps = uploader.link_gbps
        self._resources = ExitStack()

    @property
    def is_all_in_place(self) -> bool:
        """Whether kernels find every expert now, in a slot or in page-locked memory."""
        return self.pinned_share == 1 or bool(self.cache.addresses.all())

    @classmethod
    def open(
        cls,
        model: ModelFile,
        device: Device,
        reads: Stream,
        options: StoreOptions,
        *,
        ranking: NDArray[np.int64] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Bring the experts into pinned memory and the first of a ranking into the cache. Blocks.

        Args:
            model: an opened, checked model file; it must outlive the store.
            device: whose kernels read the experts.
            reads: the stream that they run on.
            options: see StoreOptions.
            ranking: pairs, layer * num_experts + expert, best first; None: of an even profile.
            progress: called with (bytes of the arena done, in all).

        Raises:
            OutOfMemory: host or device has not enough, or host memory may not be locked.
            ShapeError: the ranking lists a pair twice, or one that does not exist.
            DeviceError: the file cannot be read any more.
        """
        layouts, spec = blob_layouts(model), model.spec
        largest, num_pairs = slot_bytes(layouts), spec.num_layers * spec.num_experts
        with ExitStack() as undo:
            arena = open_arena(model, layouts, device, options.pinned_bytes, progress)
            undo.callback(arena.close)
            stager = None
            if not arena.is_pinned.all():
                stager = Stager(device, BlobReader(model), largest, *options.stager)
                undo.callback(stager.close)
            copies = device.stream("copies")
            undo.callback(copies.close)
            sizes = CacheSizes(min(options.num_slots, num_pairs), largest, options.least_slots)
            uploader = Uploader(device, copies, arena, stager)
            cache = undo.enter_context(ExpertCache(device, reads, uploader, arena, sizes))
            cache.fill(even_profile(model).ranking() if ranking is None else ranking)
            if device.has_own_memory:
                uploader.probe()
                logger.info("experts: copies from host memory at %.1f GB/s", uploader.link_gbps)
            store = cls(layouts, copies, arena, stager, cache, uploader)
            store._resources = undo.pop_all()
            return store

    @property
    def host_addresses(self) -> NDArray[np.int64]:
        """Where this process finds each pinned expert's blob, [L, E]; 0: it is not pinned."""
        ids = np.arange(self.num_experts)
        rows = [blobs.numpy().ctypes.data + ids * blobs.shape[1] for blobs in self.blobs.layers]
        addresses: NDArray[np.int64] = np.where(self.is_pinned, rows, 0)
        return addresses

    def staging(self, entries: JobList) -> AbstractContextManager[object]:
        """Around a ChunkStream, with its entries: brings those into pinned memory that are not.

        Leaving waits until the staged copies are done. Does nothing where all is pinned.
        """
        return nullcontext() if self._stager is None else self._stager.staging(entries)

    def close(self) -> None:
        """Give the memory back, behind the rings that use it. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
