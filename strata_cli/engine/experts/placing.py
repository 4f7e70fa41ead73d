"""Which memory the experts' bytes go to, and each expert's place where all of them stay put."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.arena import Store
from strata_cli.engine.model.gguf import TensorInfo


class ExpertHome(Enum):
    """Where the experts lie. No result depends on it."""

    AUTO = "auto"  # on the device if they all fit, else cached
    DEVICE = "device"
    CACHED = "cached"  # page-locked host memory; those used most also in the device's
    MAPPED = "mapped"  # page-locked host memory, which kernels read over the link
    MIXED = "mixed"  # every other expert mapped


@dataclass(frozen=True, slots=True)
class Stores:
    """The two memories that kernels read weights from."""

    device: Store
    mapped: Store


def place_experts(info: TensorInfo, home: ExpertHome, stores: Stores) -> NDArray[np.int64]:
    """Give every expert of a tensor [E, rows, cols] its place.

    Args:
        info: the tensor.
        home: one where experts stay put.
        stores: the memories.

    Returns:
        the address of each expert's bytes, [E].
    """
    assert home not in (ExpertHome.AUTO, ExpertHome.CACHED), f"{home} is no place for a tensor"
    num_experts = info.shape[0]
    if home is ExpertHome.MIXED:
        turns = (stores.device, stores.mapped)
        return np.array([_place_one(info, e, turns[e % 2]) for e in range(num_experts)], np.int64)
    store = stores.device if home is ExpertHome.DEVICE else stores.mapped
    whole = store.add((info.nbytes,), np.uint8, lambda: info.data)
    return whole.address + np.arange(num_experts, dtype=np.int64) * (info.nbytes // num_experts)


def _place_one(info: TensorInfo, expert: int, store: Store) -> int:
    data = info.data[expert]
    return store.add((data.nbytes,), np.uint8, lambda: data).address
