"""Steps whose experts lie in host memory: brought to the device first, in the pass itself.

A layer's missing experts are fetched when it is routed, and then the link rests until the next one
is. Meanwhile those come that the next layer's router would choose if it read what this layer's
does. What its logits turn out to lack, expert by expert, is learned from token to token and added:
then it is mostly right. Where it is wrong nothing is lost: what routing wants ends it, and goes
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import NamedTuple, Self

import numpy as np

from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Device, Stream, Tensor, empty
from strata_cli.engine.experts.blobs import BlobLayout, slot_bytes
from strata_cli.engine.experts.resident import ExpertMatrices, blob_experts
from strata_cli.engine.kernels.fetch import (
    AHEAD_WORDS,
    MOST_FETCHED,
    PROGRESS_WORDS,
    Ahead,
    LayersAhead,
    bring_ahead,
    bring_layers,
    can_bring_layers,
    coming_of,
    fetch_blobs,
    fetch_stride,
    learn_errors,
)
from strata_cli.engine.kernels.splitting import Coming, SlotRange
from strata_cli.errors import DeviceError

FETCH_TOKENS = 4  # of a pass, whose experts all find a slot
AHEAD_SLOTS = 8  # that a link fills while a layer and a half are computed, and some
LIKELY = 1.5  # as many experts as tokens choose; less likely ones load the link and are not wanted
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

    def nbytes(self, blob_bytes: int, num_layers: int, num_pairs: int) -> int:
        """Device memory of the Fetcher, for so many (layer, expert) pairs."""
        if not self.num_slots:
            return 0
        stride = fetch_stride(blob_bytes)
        ahead = TURNS * self.num_ahead * stride + TAIL_BYTES
        tables = 4 * (2 * FETCH_TOKENS + 2) * num_pairs + 4 * AHEAD_WORDS * num_layers
        room = ahead + tables if self.num_ahead else 0
        return self.num_slots * stride + TAIL_BYTES + 8 * num_pairs // num_layers + room


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
        slots_shape: slots, and bytes of each.
        blob_bytes: of each layer's experts.

    Attributes:
        stream: beside that of the passes.
        is_whole: one launch serves a whole pass, else one each layer.
        states: of all layers, see Ahead.
        errors: what is added to foreseen logits, float32 [L, E].
    """

    def __init__(
        self,
        device: Device,
        shape: tuple[int, int],
        slots_shape: tuple[int, int],
        blob_bytes: Sequence[int],
    ) -> None:
        num_slots, stride = slots_shape
        with ExitStack() as resources:
            self.stream = device.stream("ahead")
            resources.callback(self.stream.close)
            self.is_whole = can_bring_layers(self.stream)
            table = device.resident(np.array(blob_bytes, np.int64).view(np.uint8))
            self._sizes = tuple(blob_bytes)
            self._blob_bytes = Tensor.over(resources.enter_context(table), (shape[0],), np.int64)
            nbytes = TURNS * num_slots * stride + TAIL_BYTES
            memory = resources.enter_context(device.allocate(nbytes))
            self._slots = Tensor.over(memory, (TURNS, num_slots, stride), np.uint8)
            self.states = empty(device, (shape[0], AHEAD_WORDS), np.int32)
            resources.callback(self.states.buffer.close)
            self._foreseen, self._logits = (
                empty(device, (shape[0], FETCH_TOKENS, shape[1]), np.float32) for _ in range(2)
            )
            resources.callback(self._foreseen.buffer.close)
            resources.callback(self._logits.buffer.close)
            self.errors, self._kept_errors = (empty(device, shape, np.float32) for _ in range(2))
            resources.callback(self.errors.buffer.close)
            resources.callback(self._kept_errors.buffer.close)
            self.stream.fill(self.errors, 0)
            self.stream.synchronize()
            self._unlearning: object = None  # the latest block of it
            self._resources = resources.pop_all()

    def ahead(self, layer: int) -> Ahead:
        """What comes for a layer."""
        turn, own = layer % TURNS, self.states.rows(layer, layer + 1)
        slots = self._slots.rows(turn, turn + 1)
        return Ahead(own.reshape(AHEAD_WORDS), slots.reshape(*slots.shape[1:]))

    def bring(
        self, layer: int, addresses: Tensor, cached: SlotRange, num_tokens: int, num_likely: int
    ) -> None:
        """Enqueue, beside a pass, what comes for a layer; its addresses are int64 [E]."""
        bring_ahead(
            self.stream,
            self.foreseen(layer, num_tokens),
            self.errors.rows(layer, layer + 1).reshape(self.errors.shape[1]),
            addresses,
            cached,
            self.ahead(layer),
            num_likely,
            self._sizes[layer],
        )

    def bring_all(
        self, addresses: Tensor, cached: SlotRange, num_tokens: int, num_likely: int
    ) -> None:
        """The same for all layers; their addresses are int64 [L, E]."""
        ahead = LayersAhead(self.states, self._slots, self._blob_bytes)
        operands = (self._foreseen, self.errors, addresses, cached, ahead)
        bring_layers(self.stream, *operands, num_tokens, num_likely)

    def foreseen(self, layer: int, num_tokens: int) -> Tensor:
        """What a layer's router will probably say, less its errors, [T, E]."""
        return _of_layer(self._foreseen, layer, num_tokens)

    def logits(self, layer: int, num_tokens: int) -> Tensor:
        """Where what it says goes, [T, E]."""
        return _of_layer(self._logits, layer, num_tokens)

    @contextmanager
    def unlearning(self, stream: Stream) -> Iterator[None]:
        """Around passes on a stream that those behind it learn nothing from."""
        stream.copy(self._kept_errors, self.errors)
        own = self._unlearning = object()
        try:
            yield
        finally:
            if self._unlearning is own:  # else Ctrl-C left this end to the garbage collector
                with suppress(DeviceError):  # who works next is told, and no result depends on it
                    stream.copy(self.errors, self._kept_errors)

    def learn(self, num_tokens: int) -> None:
        """Enqueue, beside a pass whose routers have all spoken, what it teaches."""
        num_layers = self.errors.shape[0]
        foreseen, logits = (x.rows(1, num_layers) for x in (self._foreseen, self._logits))
        learn_errors(self.stream, foreseen, logits, self.errors.rows(1, num_layers), num_tokens)

    def close(self) -> None:
        """Give the memory back, when no pass runs any more. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _of_layer(tensor: Tensor, layer: int, num_tokens: int) -> Tensor:
    own = tensor.rows(layer, layer + 1)
    return own.reshape(*own.shape[1:]).rows(0, num_tokens)


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
        self._top_k = sizes.top_k
        num_experts, stride = addresses.shape[1], fetch_stride(slot_bytes(layouts))
        with ExitStack() as resources:
            memory = resources.enter_context(device.allocate(sizes.num_slots * stride + TAIL_BYTES))
            self._slots = Tensor.over(memory, (sizes.num_slots, stride), np.uint8)
            self._staged = empty(device, (1, num_experts), np.int64)
            resources.callback(self._staged.buffer.close)
            self._progress = empty(device, (PROGRESS_WORDS,), np.int32)
            resources.callback(self._progress.buffer.close)
            stream.fill(self._progress, 0)
            self._foresight: Foresight | None = None
            if sizes.num_ahead:
                shape = len(layouts), num_experts
                blob_bytes = [layout.nbytes for layout in layouts]
                foresight = Foresight(device, shape, (sizes.num_ahead, stride), blob_bytes)
                self._foresight = resources.enter_context(foresight)
            self._resources = resources.pop_all()
        self._experts = tuple(blob_experts((layout,), self._staged)[0] for layout in layouts)

    def looks_ahead(self, num_tokens: int) -> bool:
        """Whether passes that are recorded can bring experts before they are routed to."""
        return self._foresight is not None and num_tokens <= FETCH_TOKENS

    def unlearning(self) -> AbstractContextManager[None]:
        """Around passes that leave no mark: afterwards the same is foreseen as without them."""
        foresight = self._foresight
        return nullcontext() if foresight is None else foresight.unlearning(self._stream)

    def router_logits(self, layer: int, num_tokens: int) -> Tensor:
        """Where what a layer's router says must go in a pass that looks ahead, float32 [T, E]."""
        assert self._foresight is not None
        return self._foresight.logits(layer, num_tokens)

    def foreseen_logits(self, layer: int, num_tokens: int) -> Tensor | None:
        """Where what the next layer's router makes of this layer's input goes, float32 [T, E].

        None: there is no next layer.
        """
        assert self._foresight is not None
        is_last = layer + 1 == len(self._layouts)
        return None if is_last else self._foresight.foreseen(layer + 1, num_tokens)

    def coming(self, layer: int) -> Coming | None:
        """What comes for a layer of a pass that looks ahead; None: nothing ever does."""
        assert self._foresight is not None
        if not layer:
            return None
        return coming_of(self._foresight.ahead(layer), self._layouts[layer].nbytes)

    def fetch(
        self, layer: int, expert_start: Tensor, ahead_tokens: int | None = None
    ) -> ExpertMatrices:
        """Enqueue the fetch of a layer's missing experts.

        Args:
            layer: of the pass.
            expert_start: where each expert's pairs begin, int32 [E + 1] or longer, by id.
            ahead_tokens: what the next layer will probably miss is to come behind these, in a pass
                of so many. Only in a recorded one for which looks_ahead() holds, for all layers in
                turn, when both logits of the layer are on their way. None: nothing is.

        Returns:
            The layer's experts as they are until the next fetch.
        """
        if ahead_tokens is None:
            self._fetch(layer, expert_start)
        else:
            self._fetch_and_look_ahead(layer, expert_start, ahead_tokens)
        return self._experts[layer]

    def _fetch_and_look_ahead(self, layer: int, expert_start: Tensor, num_tokens: int) -> None:
        foresight, stream = self._foresight, self._stream
        assert foresight is not None
        num_likely = int(LIKELY * num_tokens * self._top_k)
        is_last = layer + 1 == len(self._layouts)
        if layer == 0:
            stream.fill(foresight.states, 0)
            stream.fork(foresight.stream)
            if foresight.is_whole:
                foresight.bring_all(self._addresses, self._cached, num_tokens, num_likely)
        own = foresight.ahead(layer) if layer else None
        following = None
        if foresight.is_whole and not is_last:
            following = foresight.ahead(layer + 1).state
        self._fetch(layer, expert_start, own, following)
        if is_last:
            stream.fork(foresight.stream)
            foresight.learn(num_tokens)
            stream.join(foresight.stream)
        elif not foresight.is_whole:
            stream.fork(foresight.stream)
            addresses = self._addresses_of(layer + 1)
            foresight.bring(layer + 1, addresses, self._cached, num_tokens, num_likely)

    def _addresses_of(self, layer: int) -> Tensor:
        return self._addresses.rows(layer, layer + 1).reshape(self._staged.size)

    def _fetch(
        self,
        layer: int,
        expert_start: Tensor,
        ahead: Ahead | None = None,
        next_state: Tensor | None = None,
    ) -> None:
        num_experts = self._staged.size
        fetch_blobs(
            self._stream,
            self._addresses_of(layer),
            expert_start.rows(0, num_experts + 1),
            self._cached,
            self._slots,
            self._staged.reshape(num_experts),
            self._progress,
            self._layouts[layer].nbytes,
            ahead,
            next_state,
        )

    def close(self) -> None:
        """Give the memory back, when no pass runs any more. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
