"""The experts of one prompt, chunk after chunk, through rings in the slots that it was given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.experts.depth import AutoDepth
from strata_cli.engine.experts.entries import Ranking, RingShape, rank_experts
from strata_cli.engine.experts.keeping import KeptBlobs
from strata_cli.engine.experts.order import (
    BOLD_TOKENS,
    LIKELY_TOKENS,
    by_score,
    count_likely,
    expected_use,
)
from strata_cli.engine.experts.ring import Ring
from strata_cli.engine.experts.sizing import LONG_CHUNK_TOKENS, SPARE_RING_SLOTS, RingRules
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.experts.streaming import (
    SMALL_RING_SLOTS,
    ChunkStream,
    Outlook,
    StreamCounts,
    StreamOptions,
)
from strata_cli.engine.forward.feeding import ExpertFeed
from strata_cli.engine.prefill.feed import StreamFeed, StreamTables
from strata_cli.engine.prefill.sharing import HostShare
from strata_cli.engine.trace import NO_TRACE, Trace
from strata_cli.errors import DeviceError

DEFAULT_RING = RingRules()
DEFAULT_STREAM = StreamOptions()
SHORT_TOKENS = 32  # so few use most blobs once: kernels may as well read them over the link
ORDER_CLASSES = 16  # of likelihood; neighbours within one are copied together


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRules:
    """How prompts come by experts that are not resident. No result depends on it.

    Attributes:
        ring: its size, and from how many tokens on experts are copied ahead of their routing.
        stream: how each chunk's experts are streamed.
        is_likely: copy first what is likely to be routed, else in the order of ids.
        foresees: what is likely in a layer is what its router makes of what the layer before
            reads; in chunks that are not long, see LONG_CHUNK_TOKENS, where anything is skipped.
            Nothing else is copied ahead of its routing in chunks that are short, see RingRules.
        kept_slots: lent to a prompt of several chunks for its most used experts, beside its ring.
        short_tokens: chunks of at most so many, and steps, read experts where they are, over the
            link; only those that are not in page-locked memory come through a small ring.
        cpu_share: of the experts of a short chunk that are not resident, those that the host's
            processor computes, 0..1; None: as it pays. On a GPU this changes bits.
        cpu_threads: for it; 0: automatic.
    """

    ring: RingRules = DEFAULT_RING
    stream: StreamOptions = DEFAULT_STREAM
    is_likely: bool = True
    foresees: bool = True
    kept_slots: int = 0
    short_tokens: int = SHORT_TOKENS
    cpu_share: float | None = 0.0
    cpu_threads: int = 0

    @property
    def may_foresee(self) -> bool:
        """Whether any chunk does."""
        return self.is_likely and self.foresees and self.stream.skips_unrouted

    def selects(self, num_tokens: int, share: HostShare | None) -> bool:
        """Whether a chunk of so many tokens copies only what is foreseen or routed.

        Args:
            num_tokens: of the chunk.
            share: takes experts of short chunks to the host's processor, where it serves; None:
                nobody does.
        """
        is_shared = share is not None and share.serves(num_tokens)
        is_short = self.short_tokens < num_tokens < self.ring.stream_min
        return self.may_foresee and is_short and not is_shared


@dataclass(frozen=True, slots=True)
class Setting:
    """What the streams of one engine work with.

    Attributes:
        device: of the store.
        reads: the stream that passes run on.
        store: of the experts; outlives the streamer.
        trace: told what the streams do.
    """

    device: Device
    reads: Stream
    store: ExpertStore
    trace: Trace = NO_TRACE


class History:
    """What chunks have used, and thus what the next one will probably use.

    Args:
        scores: use of each expert in general, [L, E].

    Attributes:
        scores: see above; may be replaced.
        depth: what the streams found out about the link.
        counts: what the streams of the last prompt did, chunk by chunk.
        use: tokens of each expert in them, int64 [L, E]; None: there were none.
    """

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self.scores = scores
        self.depth = AutoDepth()
        self.counts: list[StreamCounts] = []
        self.use: NDArray[np.int64] | None = None
        self._last_use: NDArray[np.int64] | None = None
        self._unlearning: object = None  # the latest block of it
        self._pairs_per_token = 0.0

    def begin(self) -> None:
        """A prompt begins."""
        self.counts = []
        self.use = None

    def order(self) -> NDArray[np.int64]:
        """All experts, likely ones first, [L, E]."""
        return by_score(self.leaning, finest=ORDER_CLASSES)

    @property
    def leaning(self) -> NDArray[np.float32]:
        """Shares of use that are expected of the next chunk, [L, E]."""
        return expected_use(self._last_use, self.scores)

    def num_likely(
        self,
        num_tokens: int,
        is_streamed: NDArray[np.bool_],
        least_tokens: float = LIKELY_TOKENS,
    ) -> list[int]:
        """Of each layer's streamed experts [L, E], how many the next chunk will want for sure.

        See count_likely().
        """
        num_pairs = int(num_tokens * self._pairs_per_token)
        return count_likely(self.leaning, is_streamed, num_pairs, least_tokens)

    @contextmanager
    def unlearning(self) -> Iterator[None]:
        """Around chunks that those behind it learn nothing from but what is true of all."""
        last_use, depth = self._last_use, copy(self.depth)
        own = self._unlearning = object()
        try:
            yield
        finally:
            if self._unlearning is own:  # else Ctrl-C left this end to the garbage collector
                self._last_use, self.depth = last_use, depth

    def add(self, stream: ChunkStream, num_tokens: int, *, is_typical: bool) -> None:
        """Take note of a chunk that is done, and expect the like of it if it is typical."""
        if is_typical:
            self._last_use = stream.use
            self._pairs_per_token = stream.use.sum(axis=1).max() / num_tokens
        self.use = stream.use if self.use is None else self.use + stream.use
        self.counts.append(stream.counts)


class Rings:
    """The rings of one engine, made once: hundreds of events each.

    Args:
        setting: what to work with.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._rings: dict[RingShape, Ring] = {}
        self._passed = setting.device.event()
        self._stream: ChunkStream | None = None

    def over(self, slots: Tensor) -> Ring:
        """The ring over these slots, uint8 [n, slot_bytes]."""
        num_slots, slot_bytes = slots.shape
        shape = RingShape(slots.address, slot_bytes, num_slots)
        if shape not in self._rings:
            setting = self.setting
            ring = Ring(setting.device, slots, setting.store.copies, setting.reads, setting.trace)
            self._rings[shape] = ring
        return self._rings[shape]

    def begin(self, stream: ChunkStream) -> None:
        """Before a chunk's stream starts, which end() ends in any case."""
        self._stream = stream

    def end(self) -> None:
        """Nothing more is copied into any ring for a chunk, wherever Ctrl-C kept it from its end.

        Raises:
            StallError: the device hangs.
        """
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def fence(self) -> None:
        """Copies from here on wait for all that reads now: of another ring, or broken off."""
        self.setting.reads.record(self._passed)
        self.setting.store.copies.wait(self._passed)

    def finish_trace(self) -> None:
        """With a trace, blocks until what it was told of a prompt is over and written."""
        for ring in self._rings.values():
            ring.finish_trace()

    def close(self) -> None:
        """Wait for copies under way and give the events back. Safe to call twice."""
        self.end()
        rings, self._rings = self._rings, {}
        if rings:
            with suppress(DeviceError):  # a prompt was told, if any needed what failed
                self.setting.store.copies.synchronize()
        for ring in rings.values():
            ring.close()
        self._passed.close()


class PromptStream:
    """Streams the chunks of one prompt, one after the other.

    Args:
        rings: of the engine.
        rules: see StreamRules.
        tables: for the chunks.
        history: of the engine.
        kept: slots, and what is kept in them; None: every chunk finds its experts where they are.
        ring_slots: of those that are the ring of long chunks; blobs are kept in the others.
        cancellation: ends the waits of chunks.
        share: takes experts to the host's processor; None: nobody does.
    """

    def __init__(
        self,
        rings: Rings,
        rules: StreamRules,
        tables: StreamTables,
        history: History,
        kept: KeptBlobs | None,
        ring_slots: int,
        cancellation: Cancellation = NEVER,
        share: HostShare | None = None,
    ) -> None:
        self._rings = rings
        self._setting = rings.setting
        self._rules = rules
        self._tables = tables
        self._history = history
        self._kept = kept
        self._ring_slots = ring_slots
        self._cancellation = cancellation
        self._share = share
        self._current_slots = 0

    def ring_slots(self, num_tokens: int) -> int:
        """Slots of the ring of a chunk; 0: it needs none."""
        is_short = num_tokens <= self._rules.short_tokens
        if self._kept is None or (is_short and self._setting.store.is_all_in_place):
            return 0
        if self._rules.selects(num_tokens, self._share):
            most = self._rules.ring.slots or SPARE_RING_SLOTS
            return min(most, self._kept.slots.shape[0])
        if is_short or num_tokens < self._rules.ring.stream_min:
            return min(SMALL_RING_SLOTS, self._ring_slots)
        return self._ring_slots

    @contextmanager
    def chunk(self, num_tokens: int) -> Iterator[ExpertFeed | None]:
        """Around the pass of a chunk; gives its feed, None where experts are used as they lie.

        Leaving waits until every copy is on its way, and raises what failed.

        Raises:
            Cancelled: while the chunk's experts were waited for.
        """
        num_slots = self.ring_slots(num_tokens)
        kept = self._kept
        if kept is None or not num_slots:
            yield None
            return
        self._rings.end()
        store, ring = self._setting.store, self._ring(kept.slots.rows(0, num_slots))
        kept.begin(num_slots)
        resident = store.cache.is_resident | kept.is_kept
        addresses = np.where(kept.is_kept, kept.addresses, store.cache.addresses)
        is_short = num_tokens <= self._rules.short_tokens
        if is_short:
            resident = resident | store.is_pinned
        ranking, outlook = self._expected(num_tokens, resident, ring)
        stream = ChunkStream(ranking, ring, store.blobs, self._rules.stream, kept, outlook)
        self._rings.begin(stream)
        with store.staging(stream.entries), stream, self._cancellation.stopping(stream.stop):
            share = None if is_short else self._share_of(num_tokens, ring)
            leaning = self._history.leaning if stream.foresees else None
            yield StreamFeed(self._tables, stream, ranking, addresses, ring.shape, share, leaning)
            stream.finish()
        kept.leave(stream.entries, stream.use)
        self._history.add(stream, num_tokens, is_typical=not is_short)

    def _expected(
        self, num_tokens: int, resident: NDArray[np.bool_], ring: Ring
    ) -> tuple[Ranking, Outlook]:
        """In which order a chunk's experts are copied; link and device stand still meanwhile."""
        rules, learnt = self._rules, self._history.depth
        if not rules.is_likely or ring.num_slots <= SMALL_RING_SLOTS:
            return rank_experts(resident), Outlook(learnt=learnt)
        selects = rules.selects(num_tokens, self._share)
        least_tokens = BOLD_TOKENS if selects else LIKELY_TOKENS  # the link would idle else
        num_likely = self._history.num_likely(num_tokens, ~resident, least_tokens)
        if not rules.may_foresee or num_tokens >= LONG_CHUNK_TOKENS:
            ranking = rank_experts(resident, self._history.order())
            return ranking, Outlook(learnt=learnt, num_likely=num_likely)
        ranking = rank_experts(resident)
        if ranking.num_layers:
            ranking.reorder(0, self._history.leaning[0])  # the others in turn
        outlook = Outlook(learnt=learnt, num_likely=num_likely, foresees=True, selects=selects)
        return ranking, outlook

    def _share_of(self, num_tokens: int, ring: Ring) -> HostShare | None:
        share = self._share
        if share is None or ring.num_slots > SMALL_RING_SLOTS or not share.serves(num_tokens):
            return None
        share.begin_chunk()
        return share

    def _ring(self, slots: Tensor) -> Ring:
        """The ring over the first slots. Its copies wait for those who read them so far."""
        if slots.shape[0] != self._current_slots:
            self._rings.fence()
            self._current_slots = slots.shape[0]
        return self._rings.over(slots)
