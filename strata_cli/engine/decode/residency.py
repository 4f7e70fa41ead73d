"""Experts between the windows of the decode path: counted, and moved to where they are wanted.

A window is one pass of few rows over all layers. The routing that it leaves behind says which
experts it wanted; every few windows those wanted most change places with those wanted least. The
device is never waited for: the next round is planned, and its copies are started, while it works on
a window, and a copy that has not landed is not seen by any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.decode.sharing import Sharing
from strata_cli.engine.device.base import Device, Tensor
from strata_cli.engine.experts.adapting import AdaptRules, Returns, plan_swaps
from strata_cli.engine.experts.cache import NOT_RESIDENT
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.forward.feeding import ExpertFeed
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.trace import NO_TRACE, Trace

Learn: TypeAlias = Callable[[NDArray[np.int64]], None]


class Residency:
    """Brackets the windows of one engine, on the thread that computes. A context manager.

    begin(), the replay of a graph that holds enqueue_routing(), launched(), and end() once the
    window's logits are on the host; or begin(), a pass whose experts are streamed, end_streamed()
    and launched(). Any of them may be interrupted: begin() of the next window makes up for it.

    Args:
        device: of the forward pass.
        forward: runs the windows.
        store: of the experts; None: all are where kernels read them at full speed.
        rules: when experts change places.
        sharing: who computes misses where not all of them are the device's; None: they are.
        trace: told of windows and swaps.
        learn: called with the pairs, layer * E + expert, of each window, int64 [n].

    Attributes:
        counts: of all windows so far.
        most_rows: of a window.
    """

    def __init__(
        self,
        device: Device,
        forward: Forward,
        store: ExpertStore | None,
        rules: AdaptRules,
        *,
        sharing: Sharing | None = None,
        trace: Trace = NO_TRACE,
        learn: Learn | None = None,
    ) -> None:
        self.counts = ResidencyCounts()
        self._forward = forward
        self._store = store
        self._rules = rules
        self._returns = Returns()
        self._trace = trace
        self._learn = learn
        spec = forward.spec
        self._num_experts = spec.num_experts
        shape = (spec.num_layers, spec.num_experts)
        self.most_rows = forward.workspace.routed_rows
        routed = forward.routed(self.most_rows)
        self._room = device.allocate_pinned(max(routed.nbytes, 1))
        self._use = np.zeros(shape, np.float32)
        self._sharing = sharing
        self._resident = np.ones(shape, np.bool_)
        self._addresses: NDArray[np.int64] | None = None
        self._windows = 0
        self._is_due = False
        self._pauses = 0

    @property
    def deviates(self) -> bool:
        """Whether a window may compute otherwise than an exact one does."""
        return self._sharing is not None

    def wants_feed(self, num_rows: int) -> bool:
        """Whether the next window of so many rows is to be run with feed(), if it may be."""
        return self._sharing is not None and self._sharing.is_wanted(num_rows)

    def note_time(self, num_rows: int, seconds: float) -> None:
        """How long a window took that might have been run with feed(), as wants_feed() said."""
        if self._sharing is not None:
            self._sharing.note(num_rows, seconds)

    def feed(self, num_rows: int) -> ExpertFeed | None:
        """What a window that need not be exact gets its experts from; None: they are as placed."""
        return None if self._sharing is None else self._sharing.feed(num_rows)

    def enqueue_orders(self, num_rows: int) -> None:
        """Ahead of the layers of a pass that is recorded with feed()."""
        if self._sharing is not None:
            self._sharing.enqueue_orders(num_rows)

    def begin(self, num_rows: int = 1, *, is_exact: bool = True) -> None:
        """Before a window: swaps that have landed count from now on.

        Args:
            num_rows: of the window.
            is_exact: whether it is run without feed().

        Raises:
            DeviceError: a copy failed, or what an interrupt left does not end.
        """
        if self._sharing is not None:
            self._sharing.settle(self._forward.stream)
            if not is_exact:
                self._sharing.open(num_rows)
        if self._store is None:
            return
        cache = self._store.cache
        if cache.is_torn:
            cache.mend()
        landed = cache.land()
        if landed:
            self._trace.event("cache.land", landed=landed, coming=cache.num_coming)
        self._resident, self._addresses = cache.is_resident, cache.addresses

    def enqueue_routing(self, num_rows: int) -> None:
        """Behind the layers of a pass: bring what it routed to to the host."""
        routed = self._forward.routed(num_rows)
        self._forward.stream.copy(self._on_host(num_rows), routed)

    def launched(self) -> None:
        """Behind the launch of a window, while the device works: start swaps, if it is time.

        Raises:
            DeviceError: a copy cannot be started.
        """
        if self._sharing is not None:
            self._sharing.start()
        if self._store is None or not self._is_due or self._pauses:
            return
        self._is_due = False
        cache = self._store.cache
        if cache.loan is not None:
            return
        may_come = self._store.is_pinned & ~cache.is_coming
        most = self._rules.most_swaps(self._store.link_gbps)
        # Nobody could read one in place that is not pinned: it stays.
        slot_of = np.where(self._store.is_pinned, cache.slot_of, NOT_RESIDENT)
        bar = self._returns.bar(self._use)
        swaps = plan_swaps(self._use, slot_of, may_come, most, bar)
        self._use *= np.float32(self._rules.decay)
        self._returns.watch(swaps.pairs, cache.pair_in[swaps.slots], self._use)
        cache.swap(swaps)
        if swaps.pairs.size:
            self.counts += ResidencyCounts(swaps=swaps.pairs.size)
            self._trace.event("cache.swap", swaps=swaps.pairs.size)

    def end(self, num_rows: int, *, is_exact: bool = True) -> None:
        """When a window's logits are there: count what it routed to.

        Args:
            num_rows: of the window.
            is_exact: whether it was run without feed().

        Raises:
            DeviceError: its results are not whole.
        """
        if self._sharing is not None:
            self._sharing.finish()
        pairs = self._pairs(num_rows)
        self._note(num_rows, self._count(num_rows, pairs, is_exact=is_exact), pairs)
        if self._learn is not None and not self._pauses:
            self._learn(pairs)

    def end_streamed(self, num_rows: int, use: NDArray[np.int64]) -> None:
        """When a window is done whose experts were streamed, in place of end(): count it.

        Nothing is told to ``learn``: who streamed them knows.

        Args:
            num_rows: of the window.
            use: rows that each expert computed, [L, E].
        """
        pairs = np.flatnonzero(use)
        hits = int(np.count_nonzero(self._resident.reshape(-1)[pairs]))
        pcie = pairs.size - hits
        counts = ResidencyCounts(windows=1, routed=pairs.size, hits=hits, pcie=pcie)
        self._note(num_rows, counts, pairs)

    def _note(self, num_rows: int, counts: ResidencyCounts, pairs: NDArray[np.int64]) -> None:
        self.counts += counts
        self._trace.event(
            "window.experts",
            rows=num_rows,
            routed=counts.routed,
            hits=counts.hits,
            pcie=counts.pcie,
            cpu=counts.cpu,
            dropped=counts.dropped,
        )
        if self._pauses:
            return
        self._use.reshape(-1)[pairs] += np.float32(1)
        self._windows += 1
        if not self._rules.is_static and self._windows % self._rules.every == 0:
            self._is_due = True

    def abandon(self) -> None:
        """When a window was interrupted or failed: nobody need wait for it any more."""
        if self._sharing is not None:
            self._sharing.abandon()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is learned and nothing moves: swaps under way are waited for first.

        Raises:
            DeviceError: a copy failed.
        """
        if self._store is not None:
            self._store.cache.mend()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def close(self) -> None:
        """Give the memory back, when no window runs any more. Safe to call twice."""
        self._room.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _on_host(self, num_rows: int) -> Tensor:
        routed = self._forward.routed(num_rows)
        return Tensor.over(self._room, routed.shape, routed.dtype)

    def _count(self, num_rows: int, pairs: NDArray[np.int64], *, is_exact: bool) -> ResidencyCounts:
        """What became of the experts of a window."""
        others = ResidencyCounts()
        hits = int(np.count_nonzero(self._resident.reshape(-1)[pairs]))
        if not is_exact and self._sharing is not None and self._addresses is not None:
            others = self._sharing.count(self._on_host(num_rows).numpy(), self._addresses)
        pcie = pairs.size - hits - others.cpu - others.dropped
        return others + ResidencyCounts(windows=1, routed=pairs.size, hits=hits, pcie=pcie)

    def _pairs(self, num_rows: int) -> NDArray[np.int64]:
        """Distinct pairs that a window routed to."""
        ids = self._on_host(num_rows).numpy()
        layers = np.arange(ids.shape[0])[:, None] * self._num_experts
        pairs: NDArray[np.int64] = (layers + ids.reshape(ids.shape[0], -1)).reshape(-1)
        return pairs if num_rows == 1 else np.unique(pairs)
