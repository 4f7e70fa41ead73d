"""The model as launches: embed, layers, head. One recipe for prompts, steps and mixed batches.

Every launch reads token ids and positions from device memory, so a recorded pass can be replayed
for the next token. Source of the equations: the qwen4exp architecture (hyper-connections, gated
delta net, indexed sparse attention, hashed n-gram embedding, mixture of experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.device.timing import NO_SPANS, Spans
from strata_cli.engine.experts.resident import ExpertMatrices
from strata_cli.engine.forward.branch import BranchRoom
from strata_cli.engine.forward.feeding import (
    ExpertFeed,
    ExpertGroup,
    PairRows,
    ResidentFeed,
    Split,
)
from strata_cli.engine.forward.fetching import Fetcher
from strata_cli.engine.forward.state import AttentionState, GdnState, SequenceState
from strata_cli.engine.forward.weights import (
    AttentionWeights,
    GdnWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    NgramWeights,
    ReadWeights,
)
from strata_cli.engine.forward.workspace import Workspace
from strata_cli.engine.kernels import attention as attention_kernels
from strata_cli.engine.kernels import gdn as gdn_kernels
from strata_cli.engine.kernels import hyper, indexer, moe, ngram, rope
from strata_cli.engine.kernels.attention_inputs import (
    HeadRows,
    IndexRows,
    KeyRows,
    attention_inputs,
    can_take_inputs,
)
from strata_cli.engine.kernels.attention_plan import AttendPlan
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.combine_write import (
    can_write_few,
    combine_write_norm,
    write_norm_few,
)
from strata_cli.engine.kernels.embed import embed_streams
from strata_cli.engine.kernels.inject import can_mix_inject, inject_parts, stream_mix_inject
from strata_cli.engine.kernels.mailbox import post_pairs, take_rows
from strata_cli.engine.kernels.matmul import grouped_matmul, matmul, round_rows
from strata_cli.engine.kernels.matmul_gated import (
    can_gate,
    can_gate_pairs,
    can_route_beside,
    grouped_matmul_swiglu,
    matmul_silu,
    matmul_swiglu,
    matmul_swiglu_route,
)
from strata_cli.engine.kernels.matmul_several import (
    Experts,
    Product,
    can_launch_together,
    grouped_matmul_pair,
    matmul_several,
)
from strata_cli.engine.kernels.segments import (
    Segments,
    attend_segments,
    can_attend_segments,
    can_select_segments,
    conv_segments,
    delta_rule_segments,
    ngram_conv_segments,
    ngram_rows_segments,
    pool_segments,
    select_segments,
    store_segments,
)
from strata_cli.engine.kernels.splitting import clear_rows, split_pairs
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a batch that belong to one sequence.

    Attributes:
        state: of the sequence.
        start, stop: rows.
        room: None: the sequence goes on by these rows. Else they are a branch, which leaves its
            running state as it was; only the rows of K/V behind its position are used up.
    """

    state: SequenceState
    start: int
    stop: int
    room: BranchRoom | None = None

    def gdn(self, index: int) -> GdnState:
        """The recurrent state of a layer that the rows go through; a branch's is ready to use."""
        state = self.state.layers[index]
        assert isinstance(state, GdnState)
        return state if self.room is None else self.room.gdn_from(state)

    def history(self) -> Tensor:
        """The n-gram history that the rows go through; a branch's is ready to use."""
        state = self.state.ngram
        assert state is not None
        return state.history if self.room is None else self.room.history_from(state)

    def ngram_columns(self) -> Tensor:
        """The n-gram convolution's columns that the rows go through, like history()."""
        state = self.state.ngram
        assert state is not None
        return state.conv if self.room is None else self.room.columns_from(state)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one pass. Their ids and positions already lie in the workspace.

    Attributes:
        num_tokens: rows.
        segments: cover all rows, in order; each sequence once, or as many branches of it as one
            likes. Branches work on one room and on the same rows of K/V, one after the other.
        is_recorded: the pass goes into a graph. Then a second stream may work beside it.
        table: in which kernels find all segments at once, int64 [L + 1, S, SEGMENT_WORDS]; None:
            they come one after the other.
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    is_recorded: bool = False
    table: Tensor | None = None

    @property
    def last_position(self) -> int:
        """The furthest that any segment will have come; where it begins is its sequence's."""
        return max(s.state.position + s.stop - s.start for s in self.segments)

    def together(self, index: int) -> Segments | None:
        """All segments as a layer sees them, -1: the n-gram embedding; None: one by one."""
        if self.table is None:
            return None
        index %= self.table.shape[0]
        own = self.table.rows(index, index + 1)
        counts = tuple(segment.stop - segment.start for segment in self.segments)
        are_steps = counts == (1,) * len(counts) and not any(s.room for s in self.segments)
        return Segments(own.reshape(*own.shape[1:]), counts, are_steps)


class LayerInput(NamedTuple):
    """What a mixer or the experts read, float32 [T, D], perhaps also f16; inject for the write."""

    values: Tensor
    rounded: Tensor | None
    inject: Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    """One model on one stream. The workspace is shared by all passes: one pass at a time.

    Attributes:
        fetcher: brings experts to passes of few tokens that would read them over the link; None:
            they do that.
    """

    spec: ModelSpec
    weights: ModelWeights
    workspace: Workspace
    stream: Stream
    fetcher: Fetcher | None = None

    def run(self, batch: Batch, spans: Spans = NO_SPANS, feed: ExpertFeed | None = None) -> None:
        """Enqueue all layers; the residual streams of every row end up in workspace x.

        Args:
            batch: the rows.
            spans: told of each layer; not while the stream is captured.
            feed: brings the routed experts; None: they are where the weights say.
        """
        take, num = self.workspace.take, batch.num_tokens
        x = take("x", num)
        embed_streams(self.stream, take("ids", num), self.weights.embed, x)
        start = spans.mark(self.stream)
        for index, layer in enumerate(self.weights.layers):
            self.layer(index, layer, batch, x, feed)
            stop = spans.mark(self.stream)
            spans.span("layer.run", start, stop, layer=index)
            start = stop

    def layer(
        self,
        index: int,
        layer: LayerWeights,
        batch: Batch,
        x: Tensor,
        feed: ExpertFeed | None = None,
    ) -> None:
        """Enqueue one layer, updating the residual streams x [T, S, D] in place.

        Layers follow each other: each leaves x normed for the next in the workspace.
        """
        if layer.ngram is not None:
            self._ngram(layer.ngram, batch, x)
        y = self._read(layer.mixer_read, x, is_normed=self._norm_ahead(index) is not None)
        if layer.gdn is not None:
            out = self._gdn(index, layer.gdn, batch, y)
        else:
            assert layer.attention is not None
            out = self._attention(index, layer.attention, batch, y)
        self._write(x, out, y.inject, layer.ffn_read.norm)
        y = self._read(layer.ffn_read, x, is_normed=True)
        feed = feed or self._residents(batch.num_tokens)
        combined = self._moe(index, layer.moe, y, feed, is_recorded=batch.is_recorded)
        self._combine(x, combined, y.inject, self._norm_ahead(index + 1))

    def head(self, start: int, stop: int) -> Tensor:
        """Enqueue the final read and the head for rows start..stop of the last pass.

        Returns:
            logits [stop - start, V] in the workspace; at most workspace.logit_rows rows.
        """
        x = self.workspace.take("x", stop).rows(start, stop)
        y = self._read(self.weights.final_read, x, is_normed=False)
        logits = self.workspace.take("logits", stop - start)
        matmul(self.stream, y.values, self.weights.head, logits, y.rounded)
        return logits

    def routed(self, num_tokens: int) -> Tensor:
        """Experts of every layer that the last pass of so few tokens was routed to, best first.

        Returns:
            int32 [L, T, k] in the workspace; T is at most workspace.routed_rows.
        """
        shape = (len(self.weights.layers), num_tokens, self.spec.num_experts_per_tok)
        return self.workspace.take_shaped("routed", *shape)

    def _expert_ids(self, index: int, num_tokens: int) -> Tensor:
        """Where a layer's routing goes, int32 [T, k]."""
        if num_tokens > self.workspace.routed_rows:
            return self.workspace.take("expert_ids", num_tokens)
        own = self.routed(num_tokens).rows(index, index + 1)
        return own.reshape(*own.shape[1:])

    def _read(self, weights: ReadWeights, x: Tensor, *, is_normed: bool) -> LayerInput:
        take, num, stream = self.workspace.take, x.shape[0], self.stream
        normed, low, gate = take("normed", num), take("low", num), take("stream_gate", num)
        y, inject = take("y", num), take("inject", num)
        rounded = self._room_for_rounded(normed)
        if not is_normed:
            hyper.stream_norm(stream, x, weights.norm, self.spec.rms_eps, normed, rounded)
        products = [Product(weights.down, low)]
        is_beside = weights.inject is not None and can_mix_inject(stream, normed, weights.inject)
        if weights.inject is not None and not is_beside:
            products.append(Product(weights.inject, inject))
        matmul_several(stream, normed, products, rounded, self.workspace.take_all("stream_gate"))
        if can_gate(stream, x.shape[0]):
            matmul_silu(stream, low, self.spec.num_streams, weights.up, gate)
        else:
            hyper.lowrank_silu(stream, low, self.spec.num_streams)
            matmul(stream, low, weights.up, gate, self._rounded(low))
        rounded = self._room_for_rounded(y)
        if is_beside:
            assert weights.inject is not None
            shape = (inject_parts(normed.shape[1]), num, weights.inject.rows)
            inject = self.workspace.take_shaped("inject_parts", *shape)
            stream_mix_inject(stream, gate, normed, y, weights.inject, inject)
        else:
            hyper.stream_mix(stream, gate, normed, y, rounded)
        return LayerInput(y, rounded, inject)

    def _norm_ahead(self, index: int) -> Tensor | None:
        """The norm of a layer's first read if the layer before already does it.

        Not of the first layer, nor where a layer changes the streams before it reads them.
        """
        if not 0 < index < len(self.weights.layers):
            return None
        layer = self.weights.layers[index]
        return layer.mixer_read.norm if layer.ngram is None else None

    def _write(self, x: Tensor, out: Tensor, inject: Tensor, norm: Tensor | None) -> None:
        """Enqueue a layer's write to the streams, and the norm of the read that follows at once."""
        if norm is None:
            hyper.stream_write(self.stream, x, out, inject)
            return
        normed = self.workspace.take("normed", x.shape[0])
        rounded, eps = self._room_for_rounded(normed), self.spec.rms_eps
        if can_write_few(self.stream, x, inject, norm):
            write_norm_few(self.stream, x, out, inject, norm, eps, normed)
            return
        hyper.stream_write_norm(self.stream, x, out, inject, norm, eps, normed, rounded)

    def _room_for_rounded(self, x: Tensor) -> Tensor | None:
        """Where x [T, K] goes as f16 for the products of many rows; None where rows are few.

        There is room for one: whatever is written there must be used up first.
        """
        if x.shape[0] <= FEW_TOKENS:
            return None
        return self.workspace.take_shaped("rounded", *x.shape)

    def _rounded(self, x: Tensor) -> Tensor | None:
        """Enqueue x [T, K] as f16, into the room for it, where there is any."""
        rounded = self._room_for_rounded(x)
        if rounded is not None:
            round_rows(self.stream, x, rounded)
        return rounded

    def _gdn(self, index: int, weights: GdnWeights, batch: Batch, read: LayerInput) -> Tensor:
        take, num, stream = self.workspace.take, batch.num_tokens, self.stream
        qkv, conv, z = take("qkv", num), take("conv", num), take("z", num)
        alpha, beta, delta = take("alpha", num), take("beta", num), take("delta", num)
        y, rounded = read.values, read.rounded
        products = (
            *(Product(weights.qkv, qkv), Product(weights.gate, z)),
            *(Product(weights.alpha, alpha), Product(weights.beta, beta)),
        )
        matmul_several(stream, y, products, rounded)
        num_keys, eps = self.spec.gdn_num_key_heads, self.spec.rms_eps
        together = batch.together(index)
        if together is not None:
            conv_segments(stream, qkv, together, weights.conv, conv)
            delta_rule_segments(
                stream, conv, alpha, beta, weights.a, weights.dt, together, delta, num_keys, eps
            )
        for segment in () if together is not None else batch.segments:
            state = segment.gdn(index)
            part = slice(segment.start, segment.stop)
            gdn_kernels.causal_conv_silu(
                stream, _rows(qkv, part), state.conv, weights.conv, _rows(conv, part)
            )
            gdn_kernels.delta_rule(
                stream,
                _rows(conv, part),
                _rows(alpha, part),
                _rows(beta, part),
                weights.a,
                weights.dt,
                state.matrix,
                _rows(delta, part),
                num_keys,
                eps,
            )
        gated, out = take("gated", num), take("out", num)
        rounded = self._room_for_rounded(gated)
        gdn_kernels.gated_norm(stream, delta, z, weights.norm, eps, gated, rounded)
        matmul(stream, gated, weights.out, out, rounded, self.workspace.take_all("qkv"))
        return out

    def _attention(
        self, index: int, weights: AttentionWeights, batch: Batch, read: LayerInput
    ) -> Tensor:
        take, num, stream, eps = (
            self.workspace.take,
            batch.num_tokens,
            self.stream,
            self.spec.rms_eps,
        )
        positions, table = take("positions", num), self.weights.rope
        q_gate, q = take("q_gate", num), take("q", num)
        k_raw, k, v = take("k_raw", num), take("k", num), take("v", num)
        y, rounded = read.values, read.rounded
        ratio = self.spec.index_ratio[index]
        products = [
            *(Product(weights.q, _flat(q_gate)), Product(weights.k, _flat(k_raw))),
            Product(weights.v, v),
        ]
        if ratio:
            raw, keys = take("index_q_raw", num), take("index_k", num)
            products += [
                Product(weights.indexer.q, _flat(raw)),
                Product(weights.indexer.k, keys),
            ]
        matmul_several(stream, y, products, rounded)
        is_together = can_take_inputs(
            stream, num, self.spec.head_dim, self.spec.indexer_head_dim if ratio else 0
        )
        if not is_together:
            rope.head_norm_rope(stream, q_gate, weights.q_norm, table, positions, eps, q)
            rope.head_norm_rope(stream, k_raw, weights.k_norm, table, positions, eps, k)
            if ratio:
                queries, norm = take("index_q", num), weights.indexer.q_norm
                rope.head_norm_rope(stream, raw, norm, table, positions, eps, queries)
        attended, out = take("attended", num), take("out", num)
        # A step that is recorded is replayed at later positions; these are in what that launches.
        is_one_by_one = is_together or batch.is_recorded
        is_done = not is_one_by_one and self._attend_together(index, weights.indexer, batch)
        for segment in () if is_done else batch.segments:
            state = segment.state.layers[index]
            assert isinstance(state, AttentionState)
            part = slice(segment.start, segment.stop)
            own = _rows(positions, part)
            if is_together:
                self._take_inputs(weights, ratio, state, part)
            else:
                attention_kernels.store_kv(
                    stream, _rows(k, part), _rows(v, part), own, state.keys, state.values
                )
                self._keep_index_keys(weights.indexer, ratio, state, part)
            # A step may be recorded and replayed at later positions; others see how far they go.
            rows = part.stop - part.start
            seen = state.keys.shape[0] if rows == 1 else segment.state.position + rows
            selected, num_selected = self._select(ratio, state, part)
            attention_kernels.attend(
                stream,
                _rows(q, part),
                _rows(q_gate, part),
                state.keys.rows(0, seen),
                state.values.rows(0, seen),
                own,
                selected,
                num_selected,
                ratio,
                self.workspace.take_all("attend_sums"),
                _rows(attended, part),
            )
        rounded = self._rounded(attended)
        matmul(stream, attended, weights.out, out, rounded, self.workspace.take_all("q"))
        return out

    def _attend_together(self, index: int, weights: IndexerWeights, batch: Batch) -> bool:
        """Enqueue attention of all segments at once; False where that would leave a GPU idle."""
        segments, state = batch.together(index), batch.segments[0].state.layers[index]
        if segments is None:
            return False
        assert isinstance(state, AttentionState)
        num, ratio, eps = batch.num_tokens, self.spec.index_ratio[index], self.spec.rms_eps
        take, sums = self.workspace.take, self.workspace.take_all("attend_sums")
        stream, positions, q = self.stream, take("positions", num), take("q", num)
        budget = self.spec.indexer_budget_tokens // ratio if ratio else 1
        plan = AttendPlan.of(q, state.keys, budget, ratio, stream.shared_bytes, sums)
        blocks = max(batch.last_position // ratio, 1) if ratio else 1
        rows = min(num, self.workspace.take_all("block_scores").size // blocks)
        can_select = not ratio or can_select_segments(self.spec.indexer_head_dim, rows, segments)
        if not (can_select and can_attend_segments(plan, segments.counts)):
            return False
        index_keys = take("index_k", num) if ratio else None
        store_segments(stream, take("k", num), take("v", num), index_keys, positions, segments)
        selected = self.workspace.take_shaped("selected", num, budget)
        num_selected = take("num_selected", num)
        if ratio:
            norm, table = weights.k_norm, self.weights.rope
            pool_segments(stream, segments, positions, ratio, norm, table, eps)
            scores = self.workspace.take_shaped("block_scores", rows, blocks)
            chosen = (scores, selected, num_selected)
            queries = take("index_q", num)
            select_segments(stream, queries, segments, positions, ratio, *chosen)
        own = (segments, positions, selected, num_selected, plan, take("attended", num))
        attend_segments(stream, q, take("q_gate", num), *own)
        return True

    def _take_inputs(
        self, weights: AttentionWeights, ratio: int, state: AttentionState, part: slice
    ) -> None:
        """Enqueue what precedes a segment's selection and attention, in one launch."""

        def rows(name: str) -> Tensor:
            return _rows(self.workspace.take(name, part.stop), part)

        index, indexer = None, weights.indexer
        if ratio:
            index = IndexRows(
                HeadRows(rows("index_q_raw"), indexer.q_norm, rows("index_q")),
                rows("index_k"),
                indexer.k_norm,
                state.index_keys,
                state.pooled,
                ratio,
            )
        attention_inputs(
            self.stream,
            HeadRows(rows("q_gate"), weights.q_norm, rows("q")),
            KeyRows(rows("k_raw"), weights.k_norm, rows("v"), state.keys, state.values),
            index,
            self.weights.rope,
            rows("positions"),
            self.spec.rms_eps,
        )

    def _keep_index_keys(
        self, weights: IndexerWeights, ratio: int, state: AttentionState, part: slice
    ) -> None:
        """Enqueue the indexer's keys of a segment, and those of the blocks that it completes."""
        if not ratio:
            return
        positions, keys = (
            _rows(self.workspace.take(name, part.stop), part) for name in ("positions", "index_k")
        )
        attention_kernels.store_rows(self.stream, keys, positions, state.index_keys)
        indexer.pool_index_blocks(
            self.stream,
            state.index_keys,
            positions,
            ratio,
            weights.k_norm,
            self.weights.rope,
            self.spec.rms_eps,
            state.pooled,
        )

    def _select(self, ratio: int, state: AttentionState, part: slice) -> tuple[Tensor, Tensor]:
        num, take = part.stop - part.start, self.workspace.take
        budget = self.spec.indexer_budget_tokens // ratio if ratio else 1
        selected = self.workspace.take_shaped("selected", num, budget)
        num_selected = take("num_selected", num)
        if ratio:
            queries, positions = (
                _rows(take(name, part.stop), part) for name in ("index_q", "positions")
            )
            blocks = state.pooled.shape[0]
            rows = min(num, self.workspace.take_all("block_scores").size // max(blocks, 1))
            scores = self.workspace.take_shaped("block_scores", rows, blocks)
            indexer.select_blocks(
                self.stream, queries, state.pooled, positions, ratio, scores, selected, num_selected
            )
        return selected, num_selected

    def _residents(self, num_tokens: int) -> ExpertFeed:
        experts = [layer.moe.experts for layer in self.weights.layers]
        return ResidentFeed(experts, num_tokens * self.spec.num_experts_per_tok)

    def _moe(
        self,
        index: int,
        weights: MoeWeights,
        read: LayerInput,
        feed: ExpertFeed,
        *,
        is_recorded: bool,
    ) -> moe.CombineOperands:
        """Enqueue a layer's experts. What does not depend on the routing fills the wait for it."""
        take, num, stream = self.workspace.take, read.values.shape[0], self.stream
        experts, rank_of, split, foretells = feed.experts(index)
        is_few = num <= FEW_TOKENS
        fetcher = self.fetcher if is_few and rank_of is None else None
        ahead = fetcher if is_recorded and fetcher and fetcher.looks_ahead(num) else None
        router = take("router", num) if ahead is None else ahead.router_logits(index, num)
        ids = self._expert_ids(index, num)
        places, start = take("expert_weights", num), take("expert_start", self.spec.num_experts + 1)
        row_of = take("row_of", num * self.spec.num_experts_per_tok)
        pair_of = take("pair_of", num)
        shared_logit = take("shared_logit", num)
        gate, up = take("shared_gate", num), take("shared_up", num)
        products = (
            *(Product(weights.router, router), Product(weights.shared_logit, shared_logit)),
            *(Product(weights.shared_gate, gate), Product(weights.shared_up, up)),
        )
        is_together = is_few or can_launch_together(stream, products, num)
        if is_together:  # for little more than the router takes
            foreseen = () if ahead is None else self._foreseen(ahead, index, num)
            matmul_several(stream, read.values, (*products, *foreseen), read.rounded)
        else:
            matmul(stream, read.values, weights.router, router)
        shared_out, shared_down = take("shared_out", num), weights.shared_down
        routing = moe.RouteOperands(router, ids, places, start, row_of, pair_of)
        is_plain = split is None and rank_of is None
        if is_beside := is_plain and can_route_beside(stream, shared_down, routing):
            matmul_swiglu_route(stream, gate, up, shared_down, shared_out, routing)
        elif split is None:
            ranked = None if rank_of is None else moe.Ranked(rank_of, take("expert_ranks", num))
            moe.route_in_order(stream, router, ids, places, start, row_of, pair_of, ranked)
        else:
            moe.route(stream, router, ids, places)
            start = self._share_out(experts, split, ids, row_of, pair_of)
            if split.mailbox is not None:
                post_pairs(stream, index, ids, pair_of, start, read.values, split.mailbox)
        expert_out = take("expert_out", row_of.shape[0])
        next_start = self._foretell(index + 1, read.values, expert_out) if foretells else None
        feed.publish(index, start, PairRows(read.values, row_of, expert_out, next_start))
        if fetcher is not None:
            tokens = None if ahead is None else num
            experts = fetcher.fetch(index, start, tokens)
        if not is_together:
            matmul_several(stream, read.values, products[1:], read.rounded)
        if not is_beside:
            self._shared(gate, up, shared_down, shared_out)
        for group in feed.groups(index):
            self._routed(experts, read, row_of, start, group)
        if split is not None:
            self._take_the_others(index, split, start, expert_out)
        return moe.CombineOperands(expert_out, pair_of, places, shared_out, shared_logit)

    def _foretell(self, index: int, values: Tensor, room: Tensor) -> Tensor:
        """Enqueue how a layer would route what the layer before it reads.

        Args:
            index: of the layer.
            values: what the one before reads.
            room: float32 [pairs, D], used up.

        Returns:
            the expert_start of order_by_expert, int32 [E + 1], in the room.
        """
        stream, num, num_pairs = self.stream, values.shape[0], room.shape[0]
        logits, shape = self.workspace.take("router", num), (num, self.spec.num_experts_per_tok)
        ids, places, row_of, pair_of, start = (  # ids first, aligned whatever the number of pairs
            Tensor.over(room.buffer, size, kind, room.offset_bytes + 4 * part * num_pairs)
            for part, (size, kind) in enumerate(
                (
                    (shape, np.int32),
                    (shape, np.float32),
                    ((num_pairs,), np.int32),
                    (shape, np.int32),
                    ((self.spec.num_experts + 1,), np.int32),
                )
            )
        )
        matmul(stream, values, self.weights.layers[index].moe.router, logits)
        moe.route_in_order(stream, logits, ids, places, start, row_of, pair_of)
        return start

    def _foreseen(self, ahead: Fetcher, index: int, num_tokens: int) -> tuple[Product, ...]:
        """What the next layer's router makes of this layer's input, as far as there is one."""
        logits = ahead.foreseen_logits(index, num_tokens)
        if logits is None:
            return ()
        return (Product(self.weights.layers[index + 1].moe.router, logits),)

    def _combine(
        self, x: Tensor, combined: moe.CombineOperands, inject: Tensor, norm: Tensor | None
    ) -> None:
        """Enqueue the sum of a layer's experts, and its write to the streams."""
        num, stream = x.shape[0], self.stream
        if norm is not None and can_write_few(stream, x, inject, norm):
            normed, eps = self.workspace.take("normed", num), self.spec.rms_eps
            combine_write_norm(stream, combined, x, inject, norm, eps, normed)
            return
        out = self.workspace.take("out", num)
        moe.combine(stream, *combined, out)
        self._write(x, out, inject, norm)

    def _shared(self, gate: Tensor, up: Tensor, down: Weight, out: Tensor) -> None:
        """Enqueue the shared expert's last product; gate and up are used up."""
        stream = self.stream
        if can_gate(stream, gate.shape[0]):
            matmul_swiglu(stream, gate, up, down, out)
            return
        moe.swiglu(stream, gate, up, gate)
        matmul(stream, gate, down, out, self._rounded_over(up, gate, 0))

    def _share_out(
        self, experts: ExpertMatrices, split: Split, ids: Tensor, row_of: Tensor, pair_of: Tensor
    ) -> Tensor:
        """Enqueue the order of a layer's pairs by who computes them.

        Returns:
            expert_start, with those of the host's processor and those left out at its end.
        """
        take, blobs = self.workspace.take, experts.gate.blobs
        ranks, start = take("expert_ranks", ids.shape[0]), self.workspace.take_all("expert_start")
        share, least_dropped = split.link_share, split.least_dropped
        split_pairs(self.stream, ids, blobs, share, split.slots, least_dropped, ranks)
        moe.order_by_expert(self.stream, ranks, start, row_of, pair_of)
        return start

    def _take_the_others(self, index: int, split: Split, start: Tensor, expert_out: Tensor) -> None:
        """Enqueue the rows of the pairs that the device does not compute."""
        if split.mailbox is None:
            clear_rows(self.stream, start.rows(start.size - 2, start.size), expert_out)
            return
        box, patience_ns = split.mailbox, split.patience_ns
        take_rows(self.stream, index, start, box, patience_ns, expert_out)

    def _routed(
        self,
        experts: ExpertMatrices,
        read: LayerInput,
        row_of: Tensor,
        start: Tensor,
        group: ExpertGroup,
    ) -> None:
        """Enqueue the products of a group of experts: their pairs' rows of expert_out."""
        stream, pairs, ranks = self.stream, row_of.shape[0], group.ranks
        first, stop, num_pairs = group.pairs.start, group.pairs.stop, len(group.pairs)
        start = start.rows(ranks.start, ranks.stop + 1)
        gate, up = (
            self.workspace.take_shaped(name, pairs, matrix.layout.rows)
            for name, matrix in (("expert_gate", experts.gate), ("expert_up", experts.up))
        )
        both = [
            Experts(matrix.blobs.rows(ranks.start, ranks.stop), matrix.layout, out)
            for matrix, out in ((experts.gate, gate), (experts.up, up))
        ]
        x, rounded = read.values, read.rounded
        grouped_matmul_pair(stream, x, both[0], both[1], row_of, start, rounded, num_pairs)
        in_order, down = self.workspace.numbers(pairs), experts.down
        blobs, layout = down.blobs.rows(ranks.start, ranks.stop), down.layout
        out = self.workspace.take("expert_out", pairs)
        if can_gate_pairs(stream, num_pairs, len(ranks)):
            products = Experts(blobs, layout, out)
            grouped_matmul_swiglu(stream, gate, up, products, in_order, start, num_pairs)
            return
        own = gate.rows(first, stop)
        moe.swiglu(stream, own, up.rows(first, stop), own)
        rounded = self._rounded_over(up, own, first)
        grouped_matmul(stream, gate, blobs, layout, in_order, start, out, rounded, num_pairs)

    def _rounded_over(self, used: Tensor, x: Tensor, first: int) -> Tensor | None:
        """Enqueue rows of f16 over float32 rows that are used up, where rows are many.

        Args:
            used: [R, K], its rows before the end of x's used up; halves of a row take half of its
                room, so that they reach no row behind them.
            x: rows first.. of R, [n, K].
            first: row.

        Returns:
            float16 [R, K]; rows before first as earlier calls left them.
        """
        if x.shape[0] <= FEW_TOKENS:
            return None
        halves = Tensor.over(used.buffer, used.shape, np.float16, used.offset_bytes)
        round_rows(self.stream, x, halves.rows(first, first + x.shape[0]))
        return halves

    def _ngram(self, weights: NgramWeights, batch: Batch, x: Tensor) -> None:
        take, num, stream = self.workspace.take, batch.num_tokens, self.stream
        spec, eps = weights.spec, self.spec.rms_eps
        ids, rows = take("ids", num), take("ngram_rows", num)
        together = batch.together(-1)
        hashes = (weights.multipliers, weights.offsets, weights.sizes, spec.eos_token_id)
        if together is not None:
            ngram_rows_segments(stream, ids, together, *hashes, rows)
        for segment in () if together is not None else batch.segments:
            part = slice(segment.start, segment.stop)
            ngram.ngram_rows(
                stream, _rows(ids, part), segment.history(), *hashes, _rows(rows, part)
            )
        embedding, key = take("ngram_embedding", num), take("ngram_key", num)
        value, gated = take("ngram_value", num), take("ngram_gated", num)
        ngram.gather_rows(stream, rows, weights.table, embedding)
        rounded = self._rounded(embedding)
        matmul(stream, embedding, weights.key, key, rounded)
        matmul(stream, embedding, weights.value, value, rounded)
        ngram.ngram_gate(stream, key, value, x, weights.norm_key, weights.norm_query, eps, gated)
        if together is not None:
            conv = (weights.conv, spec.max_n, eps)
            ngram_conv_segments(stream, gated, weights.norm_conv, together, *conv, x)
        for segment in () if together is not None else batch.segments:
            part = slice(segment.start, segment.stop)
            ngram.ngram_conv(
                stream,
                _rows(gated, part),
                weights.norm_conv,
                segment.ngram_columns(),
                weights.conv,
                spec.max_n,
                eps,
                _rows(x, part),
            )


def _rows(tensor: Tensor, part: slice) -> Tensor:
    return tensor.rows(part.start, part.stop)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], tensor.size // max(tensor.shape[0], 1))
