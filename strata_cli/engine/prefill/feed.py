"""A chunk's experts as a pass uses them: groups of what is resident and what has come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Event, Stream, Tensor
from strata_cli.engine.experts.blobs import BlobLayout
from strata_cli.engine.experts.entries import Ranking, RingShape, address_row, address_table
from strata_cli.engine.experts.order import FORESEEN_TOKENS
from strata_cli.engine.experts.resident import blob_experts
from strata_cli.engine.experts.streaming import ChunkStream
from strata_cli.engine.forward.feeding import ExpertGroup, PairRows, RankedExperts
from strata_cli.engine.prefill.sharing import HostShare

ADDRESS = np.dtype(np.int64)
RANK = np.dtype(np.int32)


class StreamTables:
    """Where a chunk's kernels find its experts, and where the host learns of its routing.

    One chunk at a time; a context manager.

    Args:
        device: of the experts.
        reads: the stream that passes run on.
        layouts: of each layer's blobs.
        num_experts: of a layer.

    Attributes:
        experts: of each layer, with tables by rank.
        routed: behind the latest copy of a layer's routing.
    """

    def __init__(
        self, device: Device, reads: Stream, layouts: Sequence[BlobLayout], num_experts: int
    ) -> None:
        self._reads = reads
        shape = (len(layouts), num_experts)
        num_pairs = len(layouts) * num_experts
        nbytes = num_pairs * (ADDRESS.itemsize + RANK.itemsize)
        with ExitStack() as resources:
            start_bytes = RANK.itemsize * (num_experts + 1)
            memory = resources.enter_context(device.allocate(nbytes))
            pinned = resources.enter_context(device.allocate_pinned(nbytes))
            starts = resources.enter_context(device.allocate_pinned(2 * start_bytes))
            self._all, self._all_host = (
                Tensor.over(buffer, (nbytes,), np.uint8) for buffer in (memory, pinned)
            )
            self._addresses, self._addresses_host = (
                Tensor.over(buffer, shape, ADDRESS) for buffer in (memory, pinned)
            )
            self._ranks, self._ranks_host = (
                Tensor.over(buffer, shape, RANK, num_pairs * ADDRESS.itemsize)
                for buffer in (memory, pinned)
            )
            self._start_host, self._next_start_host = (
                Tensor.over(starts, (num_experts + 1,), RANK, at) for at in (0, start_bytes)
            )
            self.routed: Event = device.event()
            resources.callback(self.routed.close)
            self._uploaded: Event = device.event()
            resources.callback(self._uploaded.close)
            self._resources = resources.pop_all()
        self.experts = blob_experts(layouts, self._addresses)

    def rank_of(self, layer: int) -> Tensor:
        """Rank of each of a layer's experts, int32 [E]."""
        return self._ranks.rows(layer, layer + 1).reshape(self._ranks.shape[1])

    def upload(self, addresses: NDArray[np.int64], rank_of: NDArray[np.int32]) -> None:
        """Enqueue the tables of a new chunk: addresses [L, E] by rank, rank_of [L, E] by id.

        Blocks while the last chunk's are still being copied.
        """
        self._uploaded.synchronize()
        self._addresses_host.numpy()[:] = addresses
        self._ranks_host.numpy()[:] = rank_of
        self._reads.copy(self._all, self._all_host)
        self._reads.record(self._uploaded)

    def upload_row(
        self, layer: int, addresses: NDArray[np.int64], rank_of: NDArray[np.int32] | None = None
    ) -> None:
        """Enqueue a layer's addresses [E], by rank; and its rank_of [E] where that has changed.

        Before the layer is ordered, or once it is routed: what came before is done.
        """
        self._addresses_host.numpy()[layer] = addresses
        tables = [(self._addresses, self._addresses_host)]
        if rank_of is not None:
            self._ranks_host.numpy()[layer] = rank_of
            tables.append((self._ranks, self._ranks_host))
        for table, host in tables:
            self._reads.copy(table.rows(layer, layer + 1), host.rows(layer, layer + 1))
        self._reads.record(self._uploaded)

    def fetch_start(self, expert_start: Tensor, next_start: Tensor | None) -> None:
        """Enqueue copies to the host: a layer's expert_start, and what is foretold of the next."""
        self._reads.copy(self._start_host, expert_start)
        if next_start is not None:
            self._reads.copy(self._next_start_host, next_start)
        self._reads.record(self.routed)

    def start(self) -> NDArray[np.int32]:
        """The expert_start that was fetched, [E + 1]; the event must be reached."""
        return self._start_host.numpy().copy()

    def foreseen(self) -> NDArray[np.int32]:
        """Tokens that the next layer's experts will probably have, [E], by id; likewise."""
        counts: NDArray[np.int32] = np.diff(self._next_start_host.numpy())
        return counts

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class StreamFeed:
    """ExpertFeed of a chunk whose experts are streamed.

    Args:
        tables: of the chunk, filled when the first layer asks: the device is busy by then.
        stream: of its experts, open.
        ranking: that the stream was made with.
        addresses: of resident experts, by id, int64 [L, E].
        ring: where the stream's slots are.
        share: takes some experts of each layer to the host's processor; None: nobody does. The
            stream's list is one of routed experts then.
        leaning: shares of use to order experts by that are foreseen to have as many tokens,
            [L, E]; for a stream that foresees.
    """

    def __init__(
        self,
        tables: StreamTables,
        stream: ChunkStream,
        ranking: Ranking,
        addresses: NDArray[np.int64],
        ring: RingShape,
        share: HostShare | None = None,
        leaning: NDArray[np.float32] | None = None,
    ) -> None:
        self._tables = tables
        self._stream = stream
        self._ranking = ranking
        self._addresses = addresses
        self._ring = ring
        self._lists_routed = stream.lists_routed
        self._leaning = leaning
        self._has_tables = False
        self._share = share
        self._rows: PairRows | None = None  # of the layer that was published last

    def experts(self, layer: int) -> RankedExperts:
        """See ExpertFeed."""
        if not self._has_tables:
            self._upload_tables()
            self._has_tables = True
        matrices, rank_of = self._tables.experts[layer], self._tables.rank_of(layer)
        return RankedExperts(matrices, rank_of, foretells=self._foresees(layer))

    def publish(
        self,
        layer: int,  # noqa: ARG002  in turn
        expert_start: Tensor,
        rows: PairRows,
    ) -> None:
        """See ExpertFeed. Layers come in turn."""
        self._tables.fetch_start(expert_start, rows.next_start)
        self._rows = rows
        if self._share is not None:
            self._share.fetch(rows)

    def groups(self, layer: int) -> Iterator[ExpertGroup]:
        """See ExpertFeed. Blocks until the device has routed, then while copies are not issued.

        Raises:
            StrataError: a copy failed, or nothing moved.
        """
        self._stream.await_event(self._tables.routed, f"the routing of layer {layer}")
        start = self._tables.start()
        if self._share is None:
            self._publish(layer, start)
            yield from self._foreseeing(layer, self._link_groups(layer, start))
            return
        assert self._rows is not None
        chosen = self._share.choose(layer, start, self._ranking)
        self._publish(layer, start, None if chosen.task is None else chosen.task.ranks)
        self._share.begin(chosen, self._stream)
        yield from self._link_groups(layer, start)
        self._share.end(chosen, self._rows, self._stream)

    def _publish(
        self, layer: int, start: NDArray[np.int32], elsewhere: NDArray[np.int64] | None = None
    ) -> None:
        """Tell the stream what the layer wants of it, and the kernels where they will find it."""
        entries = self._stream.entries
        num_listed = entries.count
        self._stream.publish(layer, start, elsewhere)
        if self._lists_routed or entries.count > num_listed:
            row = self._addresses[layer]
            by_rank = address_row(self._ranking, entries, layer, row, self._ring)
            self._tables.upload_row(layer, by_rank)

    def _foreseeing(self, layer: int, groups: Iterator[ExpertGroup]) -> Iterator[ExpertGroup]:
        """The groups; the next layer is listed while the device is busy with the first one."""
        is_due = self._foresees(layer)
        for group in groups:
            yield group
            if is_due:
                self._expect(layer + 1)
                is_due = False
        if is_due:
            self._expect(layer + 1)

    def _foresees(self, layer: int) -> bool:
        """Whether the layer behind this one is listed by what its router foretells."""
        return self._stream.foresees and layer + 1 < self._ranking.num_layers

    def _expect(self, layer: int) -> None:
        """Tell the stream what the layer will probably want, and the kernels where it comes."""
        assert self._leaning is not None
        foreseen = self._tables.foreseen()
        is_streamed = self._ranking.rank_of[layer] >= self._ranking.num_resident[layer]
        least = 1 if self._stream.selects else FORESEEN_TOKENS
        num_likely = int(((foreseen >= least) & is_streamed).sum())
        self._stream.expect(layer, foreseen + self._leaning[layer], num_likely)
        entries, resident = self._stream.entries, self._addresses[layer]
        by_rank = address_row(self._ranking, entries, layer, resident, self._ring)
        self._tables.upload_row(layer, by_rank, self._ranking.rank_of[layer])

    def _link_groups(self, layer: int, start: NDArray[np.int32]) -> Iterator[ExpertGroup]:
        for ranks in self._stream.groups(layer):
            yield ExpertGroup(ranks, range(int(start[ranks.start]), int(start[ranks.stop])))

    def _upload_tables(self) -> None:
        """As far as they are known before any routing."""
        entries = self._stream.entries
        if self._lists_routed or self._stream.foresees:
            by_rank = np.take_along_axis(self._addresses, self._ranking.expert_at, axis=1)
            if self._stream.foresees:
                own = self._addresses[0]
                by_rank[0] = address_row(self._ranking, entries, 0, own, self._ring)
        else:
            by_rank = address_table(self._ranking, entries, self._addresses, self._ring)
        self._tables.upload(by_rank, self._ranking.rank_of)
