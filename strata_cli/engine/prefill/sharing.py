"""A short chunk's experts shared between the link and the host's processor, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Event, Stream
from strata_cli.engine.experts.cpu_share import MOST_TOKENS, LayerTimes, ShareGate, choose_shared
from strata_cli.engine.experts.entries import Ranking
from strata_cli.engine.experts.host_pool import HostPool, HostTask
from strata_cli.engine.experts.store import ExpertStore
from strata_cli.engine.experts.streaming import ChunkStream
from strata_cli.engine.forward.feeding import PairRows
from strata_cli.engine.trace import NO_TRACE, Trace


class _Marks:
    """Points of one layer on the stream that computes: routed, link's part done, all done."""

    def __init__(self, device: Device, resources: ExitStack) -> None:
        self.routed, self.linked, self.done = (device.event(timing=True) for _ in range(3))
        for event in (self.routed, self.linked, self.done):
            resources.callback(event.close)


class SharedLayer(NamedTuple):
    """How a layer that is routed is shared.

    Attributes:
        marks: its points.
        task: of the processor; None: it has none.
        streamed: experts that come over the link.
    """

    marks: _Marks
    task: HostTask | None
    streamed: int


class HostShare:
    """Sharing for the chunks of one engine, on the thread that computes. A context manager.

    For each layer: fetch() behind its routing, choose() when that is known, begin(), the groups of
    the link, end(). What a broken-off chunk has begun is waited for by the next one.

    Args:
        device: of the passes.
        reads: the stream that they run on.
        store: of the experts.
        share: of the experts that are not resident, 0..1; None: as it pays.
        num_threads: of the processor; 0: automatic.
        trace: told of what the processor computes.

    Attributes:
        gate: sets the shares.
    """

    def __init__(
        self,
        device: Device,
        reads: Stream,
        store: ExpertStore,
        share: float | None,
        num_threads: int = 0,
        trace: Trace = NO_TRACE,
    ) -> None:
        self.gate = ShareGate(share)
        self._reads = reads
        self._store = store
        self._trace = trace
        self._pauses = 0
        self._share = 0.0
        self._number = 0
        self._learnt_from: SharedLayer | None = None  # whose times are not known yet
        with ExitStack() as resources:
            pool = HostPool(device, store.layouts, store.blobs.layers, num_threads)
            self._pool = resources.enter_context(pool)
            self._marks = [_Marks(device, resources) for _ in range(2)]
            self._fetched: Event = device.event()
            resources.callback(self._fetched.close)
            self._pool.warm_up()
            self._resources = resources.pop_all()

    def serves(self, num_tokens: int) -> bool:
        """Whether a chunk of so many tokens, with a small ring, is shared."""
        return not self._pauses and num_tokens <= MOST_TOKENS

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is shared, and nothing is learned."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def begin_chunk(self) -> None:
        """Wait for what a broken-off chunk has begun. What came before says nothing more."""
        self._learnt_from = None
        self._pool.wait()

    def fetch(self, rows: PairRows) -> None:
        """Enqueue, behind a layer's routing, the copies that the processor needs, if it does."""
        self._number += 1
        self._reads.record(self._now.routed)
        self._share = self.gate.next_share()
        if self._share:
            x, row_of = self._pool.inputs(rows.x.shape[0], rows.row_of.shape[0])
            self._reads.copy(x, rows.x)
            self._reads.copy(row_of, rows.row_of)
            self._reads.record(self._fetched)

    def choose(self, layer: int, start: NDArray[np.int32], ranking: Ranking) -> SharedLayer:
        """The layer's experts that the processor computes. The routing event is reached.

        Args:
            layer: the one that was fetched last.
            start: where each rank's pairs begin, [E + 1].
            ranking: of the experts.
        """
        self._learn()
        counts = np.diff(start)
        first = ranking.num_resident[layer]
        num_streamed = int(np.count_nonzero(counts[first:]))
        task = None
        if self._share:
            may_be = self._store.is_pinned[layer][ranking.expert_at[layer]]
            may_be[:first] = False
            ranks = choose_shared(counts, may_be, num_streamed, self._share)
            if ranks.size:
                experts = ranking.expert_at[layer, ranks].astype(np.int64)
                task = HostTask(layer, experts, ranks, start[ranks], counts[ranks])
        num_shared = 0 if task is None else task.experts.size
        return SharedLayer(self._now, task, num_streamed - num_shared)

    def begin(self, chosen: SharedLayer, stream: ChunkStream) -> None:
        """Let the processor begin. Waits until it has what it needs."""
        if chosen.task is not None:
            stream.await_event(self._fetched, "what the processor is to compute")
            self._pool.start(chosen.task)

    def end(self, chosen: SharedLayer, rows: PairRows, stream: ChunkStream) -> None:
        """Wait for the processor and enqueue the copies of its outputs to where they belong."""
        marks, task = chosen.marks, chosen.task
        self._reads.record(marks.linked)
        if task is not None:
            stream.await_event(self._pool.done, f"experts of layer {task.layer} on the processor")
            stops = np.cumsum(task.counts)
            self._reads.copy_many(
                [
                    (rows.out.rows(start, start + n), self._pool.out.rows(stop - n, stop))
                    for start, n, stop in zip(
                        task.starts.tolist(), task.counts.tolist(), stops.tolist(), strict=True
                    )
                ]
            )
            self._trace.event(
                "layer.cpu",
                layer=task.layer,
                experts=task.experts.size,
                pairs=task.num_pairs,
                dur_us=round(self._pool.took_us, 1),
            )
        self._reads.record(marks.done)
        self._learnt_from = chosen

    def close(self) -> None:
        """End the threads and give the memory back. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def _now(self) -> _Marks:
        return self._marks[self._number % len(self._marks)]

    def _learn(self) -> None:
        """From the layer before, which the device is done with when the next one is routed."""
        layer, self._learnt_from = self._learnt_from, None
        if layer is None or not self.gate.measures:
            return
        marks, shared = layer.marks, 0 if layer.task is None else layer.task.experts.size
        self.gate.add(
            LayerTimes(
                streamed=layer.streamed,
                shared=shared,
                all_us=marks.done.elapsed_ms(marks.routed) * 1e3,
                link_us=marks.linked.elapsed_ms(marks.routed) * 1e3,
                cpu_us=self._pool.took_us if shared else 0.0,
            )
        )
