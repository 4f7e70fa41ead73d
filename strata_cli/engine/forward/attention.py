"""Attention as launches: of all segments at once, or of one after the other."""

from __future__ import annotations

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.forward.batch import Batch, rows_of
from strata_cli.engine.forward.hyper_connections import LastProduct, LayerInput
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.state import AttentionState
from strata_cli.engine.forward.weights import AttentionWeights, IndexerWeights
from strata_cli.engine.kernels import indexer, rope
from strata_cli.engine.kernels.attention import attend
from strata_cli.engine.kernels.attention_inputs import (
    HeadRows,
    IndexRows,
    KeyRows,
    attention_inputs,
    can_take_inputs,
)
from strata_cli.engine.kernels.attention_plan import AttendPlan
from strata_cli.engine.kernels.cache_rows import store_kv, store_rows
from strata_cli.engine.kernels.cache_segments import (
    attend_segments,
    can_attend_segments,
    can_select_segments,
    pool_segments,
    select_segments,
    store_segments,
)
from strata_cli.engine.kernels.matmul_several import Product, matmul_several


def attention(
    model: ModelOnStream, index: int, weights: AttentionWeights, batch: Batch, read: LayerInput
) -> LastProduct:
    """Enqueue a layer's attention and what it stores.

    Returns:
        the product that makes its output, not enqueued yet.
    """
    take, num, stream = model.workspace.take, batch.num_tokens, model.stream
    ratio = model.spec.index_ratio[index]
    _project(model, weights, ratio, num, read)
    is_together = can_take_inputs(
        stream, num, model.spec.head_dim, model.spec.indexer_head_dim if ratio else 0
    )
    if not is_together:
        _turn_heads(model, weights, ratio, num)
    positions, q_gate, q = take("positions", num), take("q_gate", num), take("q", num)
    k, v = take("k", num), take("v", num)
    attended = take("attended", num)
    # A step that is recorded is replayed at later positions; these are in what that launches.
    is_one_by_one = is_together or batch.is_recorded
    is_done = not is_one_by_one and _attend_together(model, index, weights.indexer, batch)
    for segment in () if is_done else batch.segments:
        state = segment.state.layers[index]
        assert isinstance(state, AttentionState)
        part = slice(segment.start, segment.stop)
        own = rows_of(positions, part)
        if is_together:
            _take_inputs(model, weights, ratio, state, part)
        else:
            store_kv(stream, rows_of(k, part), rows_of(v, part), own, state.keys, state.values)
            _keep_index_keys(model, weights.indexer, ratio, state, part)
        # A step may be recorded and replayed at later positions; others see how far they go.
        rows = part.stop - part.start
        seen = state.keys.shape[0] if rows == 1 else segment.state.position + rows
        selected, num_selected = _select(model, ratio, state, part)
        attend(
            stream,
            rows_of(q, part),
            rows_of(q_gate, part),
            state.keys.rows(0, seen),
            state.values.rows(0, seen),
            own,
            selected,
            num_selected,
            ratio,
            model.workspace.take_all("attend_sums"),
            rows_of(attended, part),
        )
    return LastProduct(attended, weights.out, model.workspace.take_all("q"))


def _project(
    model: ModelOnStream, weights: AttentionWeights, ratio: int, num: int, read: LayerInput
) -> None:
    """Enqueue queries with their gates, keys and values of all rows, and what the index needs."""
    take = model.workspace.take
    products = [
        Product(weights.q, _flat(take("q_gate", num))),
        Product(weights.k, _flat(take("k_raw", num))),
        Product(weights.v, take("v", num)),
    ]
    if ratio:
        products += [
            Product(weights.indexer.q, _flat(take("index_q_raw", num))),
            Product(weights.indexer.k, take("index_k", num)),
        ]
    matmul_several(model.stream, read.values, products, read.rounded)


def _turn_heads(model: ModelOnStream, weights: AttentionWeights, ratio: int, num: int) -> None:
    """Enqueue norm and rope of all rows' queries and keys, and of the index's queries."""
    take, eps = model.workspace.take, model.spec.rms_eps
    positions, table = take("positions", num), model.weights.rope
    heads = [("q_gate", weights.q_norm, "q"), ("k_raw", weights.k_norm, "k")]
    if ratio:
        heads.append(("index_q_raw", weights.indexer.q_norm, "index_q"))
    for raw, norm, turned in heads:
        src, out = take(raw, num), take(turned, num)
        rope.head_norm_rope(model.stream, src, norm, table, positions, eps, out)


def _attend_together(
    model: ModelOnStream, index: int, weights: IndexerWeights, batch: Batch
) -> bool:
    """Enqueue attention of all segments at once; False where that would leave a GPU idle."""
    segments, state = batch.together(index), batch.segments[0].state.layers[index]
    if segments is None:
        return False
    assert isinstance(state, AttentionState)
    num, ratio, eps = batch.num_tokens, model.spec.index_ratio[index], model.spec.rms_eps
    take, sums = model.workspace.take, model.workspace.take_all("attend_sums")
    stream, positions, q = model.stream, take("positions", num), take("q", num)
    budget = model.spec.indexer_budget_tokens // ratio if ratio else 1
    plan = AttendPlan.of(q, state.keys, budget, ratio, stream.shared_bytes, sums)
    blocks = max(batch.last_position // ratio, 1) if ratio else 1
    rows = min(num, model.workspace.take_all("block_scores").size // blocks)
    can_select = not ratio or can_select_segments(model.spec.indexer_head_dim, rows, segments)
    if not (can_select and can_attend_segments(plan, segments.counts, batch.last_position)):
        return False
    index_keys = take("index_k", num) if ratio else None
    store_segments(stream, take("k", num), take("v", num), index_keys, positions, segments)
    selected = model.workspace.take_shaped("selected", num, budget)
    num_selected = take("num_selected", num)
    if ratio:
        norm, table = weights.k_norm, model.weights.rope
        pool_segments(stream, segments, positions, ratio, norm, table, eps)
        scores = model.workspace.take_shaped("block_scores", rows, blocks)
        chosen = (scores, selected, num_selected)
        queries = take("index_q", num)
        select_segments(stream, queries, segments, positions, ratio, *chosen)
    own = (segments, positions, selected, num_selected, plan, take("attended", num))
    attend_segments(stream, q, take("q_gate", num), *own)
    return True


def _take_inputs(
    model: ModelOnStream, weights: AttentionWeights, ratio: int, state: AttentionState, part: slice
) -> None:
    """Enqueue what precedes a segment's selection and attention, in one launch."""

    def rows(name: str) -> Tensor:
        return rows_of(model.workspace.take(name, part.stop), part)

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
        model.stream,
        HeadRows(rows("q_gate"), weights.q_norm, rows("q")),
        KeyRows(rows("k_raw"), weights.k_norm, rows("v"), state.keys, state.values),
        index,
        model.weights.rope,
        rows("positions"),
        model.spec.rms_eps,
    )


def _keep_index_keys(
    model: ModelOnStream, weights: IndexerWeights, ratio: int, state: AttentionState, part: slice
) -> None:
    """Enqueue the indexer's keys of a segment, and those of the blocks that it completes."""
    if not ratio:
        return
    positions, keys = (
        rows_of(model.workspace.take(name, part.stop), part) for name in ("positions", "index_k")
    )
    store_rows(model.stream, keys, positions, state.index_keys)
    indexer.pool_index_blocks(
        model.stream,
        state.index_keys,
        positions,
        ratio,
        weights.k_norm,
        model.weights.rope,
        model.spec.rms_eps,
        state.pooled,
    )


def _select(
    model: ModelOnStream, ratio: int, state: AttentionState, part: slice
) -> tuple[Tensor, Tensor]:
    num, take = part.stop - part.start, model.workspace.take
    budget = model.spec.indexer_budget_tokens // ratio if ratio else 1
    selected = model.workspace.take_shaped("selected", num, budget)
    num_selected = take("num_selected", num)
    if ratio:
        queries, positions = (
            rows_of(take(name, part.stop), part) for name in ("index_q", "positions")
        )
        blocks = state.pooled.shape[0]
        rows = min(num, model.workspace.take_all("block_scores").size // max(blocks, 1))
        scores = model.workspace.take_shaped("block_scores", rows, blocks)
        indexer.select_blocks(
            model.stream, queries, state.pooled, positions, ratio, scores, selected, num_selected
        )
    return selected, num_selected


def _flat(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], tensor.size // max(tensor.shape[0], 1))
