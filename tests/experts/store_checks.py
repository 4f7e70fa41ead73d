"""Stores of tiny models, and what they say compared with what is in the device's memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.device.transfer import download
from strata_cli.engine.experts.cache import EMPTY, NOT_RESIDENT
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.experts.store import ExpertStore, StoreOptions
from strata_cli.engine.model.tensors import ModelFile
from tests.experts.tiny_store import has_expert


def open_store(model: ModelFile, device: Device, reads: Stream, **options: Any) -> ExpertStore:
    ranking = options.pop("ranking", None)
    wanted = StoreOptions(**{"num_slots": 10, "least_slots": 2, "stager": StagerSize(3), **options})
    return ExpertStore.open(model, device, reads, wanted, ranking=ranking)


class Checker:
    """Compares what a store says with what is in the device's memory."""

    def __init__(self, model: ModelFile, device: Device, reads: Stream, store: ExpertStore) -> None:
        self._model = model
        self._device = device
        self._reads = reads
        self._store = store

    def check(self) -> None:
        cache = self._store.cache
        shape = (self._store.num_layers, self._store.num_experts)
        seen = download(self._device, self._reads, cache.device_addresses)
        assert (seen == cache.addresses).all()
        assert (cache.is_resident == (cache.slot_of != NOT_RESIDENT)).all()
        assert cache.is_resident.sum() == (cache.pair_in != EMPTY).sum()
        for layer, expert in np.ndindex(shape):
            self._check_expert(layer, expert)

    def _check_expert(self, layer: int, expert: int) -> None:
        store, cache = self._store, self._store.cache
        address = int(cache.addresses[layer, expert])
        slot = int(cache.slot_of[layer, expert])
        if slot != NOT_RESIDENT:
            assert cache.pair_in[slot] == layer * store.num_experts + expert
            blob = self.slots().rows(slot, slot + 1)
            assert address == blob.address
            found = download(self._device, self._reads, blob.reshape(blob.size))
            assert has_expert(self._model, layer, expert, found)
        elif address:
            blobs = store.blobs.layers[layer]
            blob = blobs.rows(expert, expert + 1)
            assert address == blob.address
            assert has_expert(self._model, layer, expert, blob.numpy().reshape(-1))
        else:
            assert store.blobs.needs_stager is not None
            assert store.blobs.needs_stager[layer, expert]

    def slots(self) -> Tensor:
        return self._store.cache._slots
