"""Steps whose experts lie in host memory: brought to the device first, in the pass itself."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.experts.blobs import BlobLayout, slot_bytes
from strata_cli.engine.experts.resident import ExpertMatrices, blob_experts
from strata_cli.engine.kernels.fetch import MOST_FETCHED, fetch_blobs, fetch_stride
from strata_cli.engine.kernels.splitting import SlotRange

FETCH_TOKENS = 4  # of a pass, whose experts all find a slot


def fetch_slots(num_experts_per_tok: int) -> int:
    """Slots for the experts of a pass of FETCH_TOKENS tokens, as far as there may be."""
    return min(FETCH_TOKENS * num_experts_per_tok, MOST_FETCHED)


def fetch_bytes(num_slots: int, blob_bytes: int, num_experts: int) -> int:
    """Device memory of a Fetcher; 0 slots: there is none."""
    if not num_slots:
        return 0
    return num_slots * fetch_stride(blob_bytes) + TAIL_BYTES + 8 * num_experts


class Fetcher:
    """Slots that layer after layer fetches missing experts into. A context manager.

    No result depends on whether an expert is fetched: its bytes are the same wherever they lie.

    Args:
        device: of the passes.
        stream: that they run on.
        layouts: of each layer's blobs.
        addresses: where the experts are, int64 [L, E]; may change between passes.
        cached: what is in the device's memory already.
        num_slots: 1..MOST_FETCHED.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        layouts: Sequence[BlobLayout],
        addresses: Tensor,
        cached: SlotRange,
        num_slots: int,
    ) -> None:
        self._stream = stream
        self._layouts = layouts
        self._addresses = addresses
        self._cached = cached
        num_experts, stride = addresses.shape[1], fetch_stride(slot_bytes(layouts))
        with ExitStack() as resources:
            memory = resources.enter_context(device.allocate(num_slots * stride + TAIL_BYTES))
            self._slots = Tensor.over(memory, (num_slots, stride), np.uint8)
            self._staged = empty(device, (1, num_experts), np.int64)
            resources.callback(self._staged.buffer.close)
            self._resources = resources.pop_all()
        self._experts = tuple(blob_experts((layout,), self._staged)[0] for layout in layouts)

    def fetch(self, layer: int, expert_start: Tensor) -> ExpertMatrices:
        """Enqueue the fetch of a layer's missing experts.

        Args:
            layer: of the pass.
            expert_start: where each expert's pairs begin, int32 [E + 1] or longer, by id.

        Returns:
            The layer's experts as they are until the next fetch.
        """
        num_experts = self._staged.size
        addresses = self._addresses.rows(layer, layer + 1).reshape(num_experts)
        fetch_blobs(
            self._stream,
            addresses,
            expert_start.rows(0, num_experts + 1),
            self._cached,
            self._slots,
            self._staged.reshape(num_experts),
            self._layouts[layer].nbytes,
        )
        return self._experts[layer]

    def close(self) -> None:
        """Give the memory back, when no pass runs any more. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
