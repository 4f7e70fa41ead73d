"""Who computes the missed experts of windows that need not be exact: device, host, or nobody."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.decode.pool_gate import PoolGate
from strata_cli.engine.device.base import Device, Stream, Tensor
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.experts.window_pool import MOST_ROWS, WindowPool, balanced_share, in_parts
from strata_cli.engine.forward.feeding import ExpertFeed, ResidentFeed, Split
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.kernels.splitting import SHARES, count_dropped


@dataclass(frozen=True, slots=True)
class ShareRules:
    """How the misses of a step are shared out, unless it is canonical.

    Attributes:
        tail_skip: rank, from 0, from which on they are left out; 0: none is.
        link_share: share of the others that the device reads over its link, 0..1; the host's
            processor computes the rest. None: so that both end together, in windows in which that
            turns out to pay.
    """

    tail_skip: int = 0
    link_share: float | None = 1.0

    @property
    def has_pool(self) -> bool:
        """Whether the host's processor computes any."""
        return self.link_share is None or self.link_share < 1


class Sharing:
    """Shares the misses of an engine's windows out. Used from the thread that computes.

    Args:
        device: of the forward pass.
        forward: runs the windows.
        store: of the experts.
        rules: see ShareRules.
        pool: the host's threads; None: the host computes nothing. Not owned.
    """

    def __init__(
        self,
        device: Device,
        forward: Forward,
        store: ExpertStore,
        rules: ShareRules,
        pool: WindowPool | None,
    ) -> None:
        self._forward = forward
        self._store = store
        self._rules = rules
        self._pool = pool
        self._top_k = top_k = forward.spec.num_experts_per_tok
        self._gates: defaultdict[int, PoolGate] = defaultdict(PoolGate)
        least_dropped = rules.tail_skip or top_k
        whole = device.resident(np.array([SHARES], np.int32).view(np.uint8))
        slots = store.cache.slot_range
        self._plain = Split(slots, Tensor.over(whole, (1,), np.int32), least_dropped)
        self._pooled = self._plain
        if pool is not None:
            self._pooled = Split(
                slots,
                pool.mailbox.current.rows(1, 2),
                least_dropped,
                pool.mailbox,
                pool.patience_ns,
            )
        self._blob_bytes = float(np.mean([layout.nbytes for layout in store.layouts]))

    def is_wanted(self, num_rows: int) -> bool:
        """Whether the next window of so many rows is to be one of feed(), if it need not be exact.

        It is not where an automatic share turned out not to pay.
        """
        return not self._is_free(num_rows) or self._gates[num_rows].is_open

    def note(self, num_rows: int, seconds: float) -> None:
        """How long a window took that need not be exact, as is_wanted() said."""
        if self._is_free(num_rows):
            self._gates[num_rows].add(seconds)

    def _is_free(self, num_rows: int) -> bool:
        """Whether it is left to this to share anything out."""
        leaves_out = self._plain.least_dropped < self._top_k
        return self._rules.link_share is None and not leaves_out and self._has_pool(num_rows)

    def feed(self, num_rows: int) -> ExpertFeed:
        """What a window gets its experts from."""
        experts = [layer.moe.experts for layer in self._forward.weights.layers]
        num_pairs = num_rows * self._forward.spec.num_experts_per_tok
        split = self._pooled if self._has_pool(num_rows) else self._plain
        return ResidentFeed(experts, num_pairs, split)

    def enqueue_orders(self, num_rows: int) -> None:
        """Ahead of the layers of a recorded window: what open() says goes to the device."""
        if self._pool is not None and self._has_pool(num_rows):
            mailbox = self._pool.mailbox
            self._forward.stream.copy(mailbox.current, mailbox.orders)

    def settle(self, stream: Stream) -> None:
        """Before any window: one that was interrupted is over.

        Raises:
            DeviceError: the threads or the stream do not come back.
        """
        if self._pool is not None and self._pool.is_open:
            self._pool.mend(stream)

    def open(self, num_rows: int) -> None:
        """Before a window of feed() is launched."""
        if self._pool is not None:
            self._pool.num_computed = 0
        if self._pool is not None and self._has_pool(num_rows):
            share = self._rules.link_share
            if share is None:
                rate = self._store.link_gbps
                share = balanced_share(self._pool.expert_s, self._blob_bytes, rate)
            self._pool.open(in_parts(share))

    def start(self) -> None:
        """Behind the launch of a window: the threads begin."""
        if self._pool is not None and self._pool.is_open:
            self._pool.start()

    def finish(self) -> None:
        """When a window's logits are there.

        Raises:
            DeviceError: they are not whole: the threads failed.
        """
        if self._pool is not None and self._pool.is_open:
            self._pool.finish()

    def abandon(self) -> None:
        """A window was interrupted: nobody need wait for it any more."""
        if self._pool is not None and self._pool.is_open:
            self._pool.abandon()

    def count(self, ids: NDArray[np.int32], addresses: NDArray[np.int64]) -> ResidencyCounts:
        """What became of a window's experts that no slot held.

        Args:
            ids: what it routed to, [L, T, k].
            addresses: where the device found each expert, [L, E].

        Returns:
            Its dropped and cpu alone.
        """
        slots, least_dropped = self._plain.slots, self._plain.least_dropped
        computed = 0 if self._pool is None else self._pool.num_computed
        dropped = count_dropped(ids, addresses, slots, least_dropped)
        return ResidencyCounts(cpu=computed, dropped=dropped)

    def _has_pool(self, num_rows: int) -> bool:
        return self._pool is not None and num_rows <= MOST_ROWS
