"""Where the prompts of an engine get the slots that they stream experts through.

The expert cache lends its last slots to a prompt, and is filled again before the next step: prompts
that follow each other, and decisions that need no step, go without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.device.arena import TAIL_BYTES
from strata_cli.engine.device.base import Tensor
from strata_cli.engine.experts.keeping import KeptBlobs
from strata_cli.engine.experts.sizing import RingNeeds, ring_slots
from strata_cli.engine.experts.streaming import SMALL_RING_SLOTS, StreamCounts
from strata_cli.engine.prefill.feed import StreamTables
from strata_cli.engine.prefill.prompt_stream import (
    History,
    PromptStream,
    Rings,
    Setting,
    StreamRules,
)
from strata_cli.engine.prefill.sharing import HostShare
from strata_cli.errors import StallError, StrataError

logger = logging.getLogger(__name__)


class PromptStreamer:
    """Streams experts for the prompts of one engine, on the thread that computes.

    Args:
        setting: what to work with.
        rules: see StreamRules.
        scores: use of each expert in general, [L, E].
        own_slots: of a ring beside the cache; 0: there is none. The cache lends longer ones.

    Attributes:
        setting: see above.

    Raises:
        OutOfMemory: there is no room for the tables or the ring.
    """

    def __init__(
        self,
        setting: Setting,
        rules: StreamRules,
        scores: NDArray[np.float32],
        own_slots: int = 0,
    ) -> None:
        self.setting = setting
        self._rules = rules
        self._history = History(scores)
        self._lent: Tensor | None = None
        self._kept: KeptBlobs | None = None
        self._prompt: object = None  # the latest
        store = setting.store
        with ExitStack() as resources:
            tables = StreamTables(setting.device, setting.reads, store.layouts, store.num_experts)
            self._tables = resources.enter_context(tables)
            self._rings = Rings(setting)
            resources.callback(self._rings.close)
            self._share: HostShare | None = None
            if rules.cpu_share != 0 and store.pinned_share > 0:
                share = HostShare(
                    setting.device,
                    setting.reads,
                    store,
                    rules.cpu_share,
                    rules.cpu_threads,
                    setting.trace,
                )
                self._share = resources.enter_context(share)
            self._own: Tensor | None = None
            if own_slots:
                nbytes = own_slots * store.slot_bytes
                memory = resources.enter_context(setting.device.allocate(nbytes + TAIL_BYTES))
                self._own = Tensor.over(memory, (own_slots, store.slot_bytes), np.uint8)
            self._resources = resources.pop_all()

    @property
    def counts(self) -> list[StreamCounts]:
        """What the streams of the last prompt did, chunk by chunk."""
        return self._history.counts

    @property
    def use(self) -> NDArray[np.int64] | None:
        """Tokens of each expert in them, [L, E]; None: there were none."""
        return self._history.use

    def describe(self, chunk_tokens: int) -> str:
        """Where the experts are and how chunks of so many tokens get them, in words."""
        cache, stream = self.setting.store.cache, self._rules.stream
        what = "routed or not"
        if stream.skips_unrouted:
            what = f"as far as they are routed, {stream.depth or 'auto'} copies deep"
        if self._share is not None:
            what += "; short chunks leave some to the host's processor"
        share = self.setting.store.pinned_share
        if share < 1:
            what += f"; {100 * share:.0f} % are in page-locked memory, the file has the others"
        return (
            f"{cache.num_slots} of {cache.slot_of.size} in cache slots, the others stream through "
            f"{self.ring_slots(chunk_tokens)} ring slots, {what}"
        )

    def hold(self, ranking: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """Fill the cache anew: the pairs that it should hold, best first, and their use [L, E].

        Raises what settle() and ExpertCache.fill() raise.
        """
        cache = self.setting.store.cache
        self.settle()
        cache.fill(ranking)
        self._history.scores = scores

    def ring_slots(self, num_tokens: int) -> int:
        """Slots of the ring for a prompt's chunks of so many tokens; 0: none is needed."""
        store = self.setting.store
        num_entries = int((~store.cache.is_resident).sum())
        is_short = num_tokens <= self._rules.short_tokens
        if not num_entries or (is_short and store.is_all_in_place):
            return 0
        if is_short:
            return SMALL_RING_SLOTS
        cache = store.cache
        lendable_bytes = (cache.num_slots - cache.least_slots) * store.slot_bytes
        own_bytes = 0 if self._own is None else self._own.nbytes
        needs = RingNeeds(
            chunk_tokens=num_tokens,
            slot_bytes=store.slot_bytes,
            pinned_share=store.pinned_share,
            num_entries=num_entries,
            room_bytes=max(lendable_bytes, own_bytes),
            selects=self._rules.selects(num_tokens, self._share),
        )
        return ring_slots(self._rules.ring, needs)

    @contextmanager
    def prompt(
        self, num_tokens: int, chunk_tokens: int, cancellation: Cancellation = NEVER
    ) -> Iterator[PromptStream]:
        """Around the chunks of a prompt. An error inside gives back at once what was lent.

        Args:
            num_tokens: of the prompt.
            chunk_tokens: of its chunks; the last one may have fewer.
            cancellation: ends the waits of its chunks.
        """
        self._history.begin()
        num_slots = self.ring_slots(min(num_tokens, chunk_tokens))
        num_kept = self._rules.kept_slots if num_tokens > chunk_tokens else 0
        with self._giving_back_on_error():
            kept = self._keep(self._borrow(num_slots, num_kept)) if num_slots else None
            yield PromptStream(
                self._rings,
                self._rules,
                self._tables,
                self._history,
                kept,
                num_slots,
                cancellation,
                self._share,
            )
            self._rings.finish_trace()

    @contextmanager
    def unlearning(self) -> Iterator[None]:
        """Around prompts that leave no mark: what was expected of the next chunk is so again."""
        still = nullcontext() if self._share is None else self._share.paused()
        with still, self._history.unlearning():
            yield

    @property
    def deviates(self) -> bool:
        """Whether chunks may be computed otherwise than canonical ones: in part on the host.

        The host's kernels round in another way than a GPU's.
        """
        return self._share is not None and self.setting.device.has_own_memory

    @property
    def is_needed_for_steps(self) -> bool:
        """Whether steps find some experts nowhere but in a stream, now that all is settled."""
        return not self.setting.store.is_all_in_place

    def settle(self) -> None:
        """Fill again what a prompt was lent; before steps. Blocks until it is done.

        Raises:
            DeviceError: a copy failed; the experts are then read where they lie.
        """
        if self._lent is not None:
            self._mend()

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _borrow(self, num_slots: int, num_kept: int) -> Tensor:
        """At least so many slots for a ring and, as far as there are any, for what is kept."""
        cache, slot_bytes = self.setting.store.cache, self.setting.store.slot_bytes
        count = num_slots + num_kept
        if self._own is not None and num_slots <= self._own.shape[0]:
            return self._own
        count = min(count, cache.num_slots - cache.least_slots)
        if self._lent is None or self._lent.shape[0] < count:
            self._mend()
            loan = cache.lend(count * slot_bytes)
            self._lent = loan.memory.reshape(count, slot_bytes)
        return self._lent

    def _keep(self, slots: Tensor) -> KeptBlobs:
        """What is kept in these slots; what was in others no longer is."""
        if self._kept is None or self._kept.slots is not slots:
            setting, store = self.setting, self.setting.store
            blob_bytes = [layout.nbytes for layout in store.layouts]
            self._kept = KeptBlobs(setting.reads, slots, blob_bytes, store.num_experts)
        return self._kept

    @contextmanager
    def _giving_back_on_error(self) -> Iterator[None]:
        """Not behind a stall: what waits for a device that hangs would hang too.

        Nor when the next prompt has begun: interrupted twice, this one may have been left to the
        garbage collector, and what is lent is the next one's.
        """
        own = self._prompt = object()
        try:
            yield
        except StallError:
            if self._prompt is own:
                self._kept = None
            raise
        except BaseException:
            if self._prompt is own:
                self._kept = None
                self._try_to_mend()
            raise

    def _try_to_mend(self) -> None:
        """The same behind an error, which says more than this one would."""
        try:
            self._mend()
        except StrataError as error:
            logger.warning("the expert cache could not be filled again: %s", error)

    def _mend(self) -> None:
        """Fill what was lent, also to a prompt whose end was interrupted."""
        self._rings.end()
        if self._lent is not None:
            self._lent = self._kept = None
        cache = self.setting.store.cache
        if cache.loan is not None:
            cache.take_back(cache.loan)
        cache.mend()
