"""Steps whose experts lie in host memory: brought to the device first, in the pass itself.

A layer's missing experts are fetched when it is routed, and then the link rests until the next one
is. Meanwhile those come that the next layer's router would choose if it read what this layer's
does, rather those that the token before used: layers add little to the residual streams, and tokens
little to what the text is about, so it is mostly right. Where it is wrong nothing is lost: what
routing wants ends it, and goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.experts.blobs import BlobLayout, slot_bytes
from strata_cli.engine.experts.resident import ExpertMatrices, blob_experts
from strata_cli.engine.kernels.fetch import (
    AHEAD_WORDS,
    MOST_FETCHED,
    Ahead,
    bring_ahead,
    fetch_blobs,
    fetch_stride,
)
from strata_cli.engine.kernels.splitting import SlotRange

FETCH_TOKENS = 4  # of a pass, whose experts all find a slot
TURNS = 2  # a layer's slots are read while the next one's are filled


class FetchSizes(NamedTuple):
    """Slots of a Fetcher.

    Attributes:
        num_slots: for what a layer misses, 1..MOST_FETCHED; 0: there is no Fetcher.
        num_ahead: for what the next layer will probably miss, 0..MOST_AHEAD.
        top_k: experts of a token and layer; of use where there are such slots.
    """

    num_slots: int
    num_ahead: int = 0
    top_k: int = 0

    def nbytes(self, blob_bytes: int, num_pairs: int) -> int:
        """Device memory of the Fetcher, at most, for so many (layer, expert) pairs."""
        if not self.num_slots:
            return 0
        stride = fetch_stride(blob_bytes)
        ahead = TURNS * self.num_ahead * stride + TAIL_BYTES
        tables = 4 * (2 * FETCH_TOKENS + AHEAD_WORDS) * num_pairs
        room = ahead + tables if self.num_ahead else 0
        return self.num_slots * stride + TAIL_BYTES + 8 * num_pairs + room


NO_FETCHING = FetchSizes(0)


def fetch_slots(num_experts_per_tok: int) -> int:
    """Slots for the experts of a pass of FETCH_TOKENS tokens, as far as there may be."""
    return min(FETCH_TOKENS * num_experts_per_tok, MOST_FETCHED)


class Foresight:
    """Room for what may be brought before it is routed to. A context manager.

    A stream of its own goes beside recorded passes. Its slots take turns, layer by layer: one's are
    filled while the other's are read. Everything else is there for each layer.

    Args:
        device: of the passes.
        shape: layers, and experts of each.
        sizes: of the Fetcher.
        stride: bytes of a slot.

    Attributes:
        stream: beside that of the passes.
    """

    def __init__(
        self, device: Device, shape: tuple[int, int], sizes: FetchSizes, stride: int
    ) -> None:
        num_slots = sizes.num_ahead
        with ExitStack() as resources:
            self.stream = device.stream("ahead")
            resources.callback(self.stream.close)
            nbytes = TURNS * num_slots * stride + TAIL_BYTES
            memory = resources.enter_context(device.allocate(nbytes))
            self._slots = Tensor.over(memory, (TURNS, num_slots, stride), np.uint8)
            self._states = empty(device, (shape[0], AHEAD_WORDS), np.int32)
            resources.callback(self._states.buffer.close)
            self._before = empty(device, (shape[0], FETCH_TOKENS * sizes.top_k), np.int32)
            resources.callback(self._before.buffer.close)
            self._logits = empty(device, (shape[0], FETCH_TOKENS, shape[1]), np.float32)
            resources.callback(self._logits.buffer.close)
            self._resources = resources.pop_all()

    def begin(self, stream: Stream, routed: Tensor) -> None:
        """Enqueue, on the stream of a pass, what must be so before any layer is looked ahead to.

        Args:
            stream: of the pass.
            routed: experts of every layer that the last pass wanted, int32 [L, T, k].
        """
        stream.fill(self._states, 0)
        before = self._before.reshape(self._before.size).rows(0, routed.size)
        stream.copy(before, routed.reshape(routed.size))

    def before(self, layer: int, num_tokens: int) -> Tensor:
        """Experts of a layer that the last pass of so few tokens wanted, [T * k]."""
        num_layers = self._before.shape[0]
        count = self._before.shape[1] // FETCH_TOKENS * num_tokens
        own = self._before.reshape(self._before.size).rows(0, num_layers * count)
        return own.rows(layer * count, (layer + 1) * count)

    def ahead(self, layer: int) -> Ahead:
        """What comes for a layer."""
        turn, own = layer % TURNS, self._states.rows(layer, layer + 1)
        slots = self._slots.rows(turn, turn + 1)
        return Ahead(own.reshape(AHEAD_WORDS), slots.reshape(*slots.shape[1:]))

    def logits(self, layer: int, num_tokens: int) -> Tensor:
        """What its router will probably say, [T, E]."""
        own = self._logits.rows(layer, layer + 1)
        return own.reshape(*own.shape[1:]).rows(0, num_tokens)

    def close(self) -> None:
        """Give the memory back, when no pass runs any more. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Fetcher:
    """Slots that layer after layer fetches missing experts into. A context manager.

    No result depends on whether an expert is fetched: its bytes are the same wherever they lie.

    Args:
        device: of the passes.
        stream: that they run on.
        layouts: of each layer's blobs.
        addresses: where the experts are, int64 [L, E]; may change between passes.
        cached: what is in the device's memory already.
        sizes: slots, at least one.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        layouts: Sequence[BlobLayout],
        addresses: Tensor,
        cached: SlotRange,
        sizes: FetchSizes,
    ) -> None:
        self._stream = stream
        self._layouts = layouts
        self._addresses = addresses
        self._cached = cached
        num_experts, stride = addresses.shape[1], fetch_stride(slot_bytes(layouts))
        with ExitStack() as resources:
            memory = resources.enter_context(device.allocate(sizes.num_slots * stride + TAIL_BYTES))
            self._slots = Tensor.over(memory, (sizes.num_slots, stride), np.uint8)
            self._staged = empty(device, (1, num_experts), np.int64)
            resources.callback(self._staged.buffer.close)
            self._foresight: Foresight | None = None
            if sizes.num_ahead:
                foresight = Foresight(device, (len(layouts), num_experts), sizes, stride)
                self._foresight = resources.enter_context(foresight)
            self._resources = resources.pop_all()
        self._experts = tuple(blob_experts((layout,), self._staged)[0] for layout in layouts)

    def looks_ahead(self, num_tokens: int) -> bool:
        """Whether passes that are recorded can bring experts before they are routed to."""
        return self._foresight is not None and num_tokens <= FETCH_TOKENS

    def next_logits(self, layer: int, num_tokens: int) -> Tensor | None:
        """Where what the next layer's router makes of this layer's input goes, float32 [T, E].

        None: there is no next layer.
        """
        assert self._foresight is not None
        is_last = layer + 1 == len(self._layouts)
        return None if is_last else self._foresight.logits(layer + 1, num_tokens)

    def fetch(
        self, layer: int, expert_start: Tensor, routed: Tensor | None = None
    ) -> ExpertMatrices:
        """Enqueue the fetch of a layer's missing experts.

        Args:
            layer: of the pass; all of them in turn where it looks ahead.
            expert_start: where each expert's pairs begin, int32 [E + 1] or longer, by id.
            routed: experts of every layer, int32 [L, T, k], which layers up to this one have
                overwritten: bring what the next layer will probably miss, behind these. In a
                recorded pass alone, for which looks_ahead() holds; next_logits() are on their way.
                None: this layer's alone.

        Returns:
            The layer's experts as they are until the next fetch.
        """
        foresight = self._foresight
        if foresight is None or routed is None:
            self._fetch(layer, expert_start, None)
            return self._experts[layer]
        if layer == 0:
            foresight.begin(self._stream, routed)
        self._fetch(layer, expert_start, foresight.ahead(layer) if layer else None)
        if layer + 1 < len(self._layouts):
            self._bring(layer + 1, routed.shape[1], foresight)
        elif layer:
            self._stream.join(foresight.stream)
        return self._experts[layer]

    def _bring(self, layer: int, num_tokens: int, foresight: Foresight) -> None:
        """Enqueue what a layer will probably miss, beside what follows on the pass's stream."""
        self._stream.fork(foresight.stream)
        bring_ahead(
            foresight.stream,
            foresight.logits(layer, num_tokens),
            foresight.before(layer, num_tokens),
            self._addresses_of(layer),
            self._cached,
            foresight.ahead(layer),
            self._layouts[layer].nbytes,
        )

    def _addresses_of(self, layer: int) -> Tensor:
        return self._addresses.rows(layer, layer + 1).reshape(self._staged.size)

    def _fetch(self, layer: int, expert_start: Tensor, ahead: Ahead | None) -> None:
        num_experts = self._staged.size
        fetch_blobs(
            self._stream,
            self._addresses_of(layer),
            expert_start.rows(0, num_experts + 1),
            self._cached,
            self._slots,
            self._staged.reshape(num_experts),
            self._layouts[layer].nbytes,
            ahead,
        )

    def close(self) -> None:
        """Give the memory back, when no pass runs any more. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
