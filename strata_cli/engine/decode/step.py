"""One token at a time, of one sequence or several: a pass recorded once and replayed."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.decode.residency import Residency
from strata_cli.engine.device.base import Buffer, Graph, Tensor
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.feeding import ExpertFeed
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.forward.rows import RowPort, advancing, positions_of
from strata_cli.engine.forward.segments import segment_rows, wants_table
from strata_cli.engine.forward.state import SequenceState

MOST_GRAPHS = 32
"""Recorded passes that are kept: one for each set of sequences that stepped together."""


class Recorded(NamedTuple):
    """A pass over one row of each sequence. It holds on to their states: it has their addresses.

    Attributes:
        graph: the pass.
        states: of the sequences.
        table: of several of them, which every replay copies to the device; None: there is none.
    """

    graph: Graph
    states: tuple[SequenceState, ...]
    table: Buffer | None

    def close(self) -> None:
        """Ends it; its last replay must be done."""
        self.graph.close()
        if self.table is not None:
            self.table.close()


class Decoder:
    """Steps an engine's sequences. The bits equal those of reading the same tokens as prompts.

    Args:
        forward: the model.
        port: staging of the forward's workspace.
        residency: told of each step; None: nobody asks where experts are.

    Attributes:
        most_rows: sequences that step in one pass.
    """

    def __init__(self, forward: Forward, port: RowPort, residency: Residency | None = None) -> None:
        self._forward = forward
        self._port = port
        self._residency = residency
        self._recorded: OrderedDict[tuple[bool, tuple[int, ...]], Recorded] = OrderedDict()
        workspace = forward.workspace
        rows = min(workspace.num_tokens, workspace.logit_rows)
        self.most_rows = rows if residency is None else min(rows, residency.most_rows)

    def step(
        self, states: Sequence[SequenceState], ids: Sequence[int], *, is_exact: bool = True
    ) -> NDArray[np.float32]:
        """Read one token of each sequence. Blocks until the logits are there.

        Args:
            states: of the sequences, each once, at most most_rows.
            ids: a token for each.
            is_exact: whether all are computed as a canonical read would.

        Returns:
            Logits, [len(states), V].

        Raises:
            StateError: an earlier pass of one was interrupted halfway.
        """
        residency, num = self._residency, len(states)
        if is_exact or residency is None or not residency.deviates:
            return self._step(states, ids, is_exact=is_exact)
        shares, began = residency.wants_feed(num), time.perf_counter()
        rows = self._step(states, ids, is_exact=not shares)
        residency.note_time(num, time.perf_counter() - began)
        return rows

    def _step(
        self, states: Sequence[SequenceState], ids: Sequence[int], *, is_exact: bool
    ) -> NDArray[np.float32]:
        port, residency, num = self._port, self._residency, len(states)
        segments = tuple(Segment(state, row, row + 1) for row, state in enumerate(states))
        batch = Batch(num, segments, is_recorded=True)
        for state in states:  # all, before the pass of any is begun
            state.require_consistent()
        shares = residency is not None and residency.deviates and not is_exact
        try:
            if residency is not None:
                residency.begin(num, is_exact=is_exact)
            with ExitStack() as passes:
                for state, token_id in zip(states, ids, strict=True):
                    passes.enter_context(advancing(state, [token_id], is_exact=is_exact))
                port.stage(ids, positions_of(batch))
                self._forward.stream.replay(self._graph(batch, is_exact=is_exact))
                port.mark_inputs()
                if not shares:  # all of it will run, whatever comes; else others may give up
                    passes.close()
                if residency is not None:
                    residency.launched()
                rows = port.read_logits(num)
                if residency is not None:
                    residency.end(num, is_exact=is_exact)
        except BaseException:
            if residency is not None:
                residency.abandon()
            raise
        return rows

    def forget(self, state: SequenceState) -> None:
        """Drop what was recorded of a sequence; before its memory goes. Safe to call twice."""
        gone = [
            key
            for key, recorded in self._recorded.items()
            if any(other is state for other in recorded.states)
        ]
        for key in gone:
            self._recorded.pop(key).close()

    def close(self) -> None:
        """Drop everything that was recorded. Safe to call twice."""
        while self._recorded:
            self._recorded.popitem()[1].close()

    def _graph(self, batch: Batch, *, is_exact: bool) -> Graph:
        states = tuple(segment.state for segment in batch.segments)
        feed = None if is_exact or self._residency is None else self._residency.feed(len(states))
        key = feed is None, tuple(map(id, states))
        if key in self._recorded:
            self._recorded.move_to_end(key)
            return self._recorded[key].graph
        while len(self._recorded) >= MOST_GRAPHS:
            # No longer in use: a step waits for its logits.
            self._recorded.popitem(last=False)[1].close()
        recorded = self._recorded[key] = self._record(batch, feed)
        return recorded.graph

    def _record(self, batch: Batch, feed: ExpertFeed | None) -> Recorded:
        states = tuple(segment.state for segment in batch.segments)
        table = self._staged_table(batch)
        try:
            return Recorded(self._capture(batch, feed, table), states, table)
        except BaseException:
            if table is not None:
                table.close()
            raise

    def _capture(self, batch: Batch, feed: ExpertFeed | None, table: Buffer | None) -> Graph:
        num = batch.num_tokens
        with self._forward.stream.capture() as graph:
            self._port.enqueue_inputs(num)
            if table is not None:
                own = self._forward.workspace.segments(num)
                self._forward.stream.copy(own, Tensor.over(table, own.shape, own.dtype))
                batch = replace(batch, table=own)
            if feed is not None and self._residency is not None:
                self._residency.enqueue_orders(num)
            self._forward.run(batch, feed=feed)
            if self._residency is not None:
                self._residency.enqueue_routing(num)
            self._port.enqueue_logits(self._forward.head(0, num))
        return graph

    def _staged_table(self, batch: Batch) -> Buffer | None:
        """Page-locked memory with the table of the pass; None where it needs none."""
        forward = self._forward
        if not wants_table(forward.stream, batch, forward.workspace.most_segments):
            return None
        rows = segment_rows(forward.spec, forward.workspace, batch.segments)
        buffer = batch.segments[0].state.device.allocate_pinned(rows.nbytes)
        Tensor.over(buffer, rows.shape, rows.dtype).numpy()[:] = rows
        return buffer
