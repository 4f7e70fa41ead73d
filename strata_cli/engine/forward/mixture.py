"""A layer's experts as launches: routed and shared ones."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.experts.resident import ExpertMatrices
from strata_cli.engine.forward.feeding import ExpertFeed, ExpertGroup, PairRows, Split
from strata_cli.engine.forward.fetching import Fetcher
from strata_cli.engine.forward.hyper_connections import LayerInput
from strata_cli.engine.forward.on_stream import ModelOnStream
from strata_cli.engine.forward.weights import MoeWeights
from strata_cli.engine.kernels import moe
from strata_cli.engine.kernels.choice import FEW_TOKENS
from strata_cli.engine.kernels.float_pair import can_split_pair, route_by_slices
from strata_cli.engine.kernels.grouped_matmul import grouped_matmul
from strata_cli.engine.kernels.mailbox import post_pairs, take_rows
from strata_cli.engine.kernels.matmul import matmul
from strata_cli.engine.kernels.matmul_at_once import matmul_at_once
from strata_cli.engine.kernels.matmul_gated import (
    can_gate,
    can_gate_pairs,
    can_route_beside,
    grouped_matmul_swiglu,
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
from strata_cli.engine.kernels.matmul_some import (
    ExpertMlp,
    are_alike,
    can_make_some,
    can_take_some,
    experts_of_some,
    matmul_some,
    matmul_swiglu_some,
)
from strata_cli.engine.kernels.routing import (
    Ranked,
    RouteOperands,
    order_by_expert,
    order_pairs,
    route,
    route_in_order,
)
from strata_cli.engine.kernels.splitting import Coming, clear_rows, split_pairs
from strata_cli.engine.kernels.weight import Weight


def mix_experts(
    model: ModelOnStream,
    index: int,
    weights: MoeWeights,
    read: LayerInput,
    feed: ExpertFeed,
    *,
    is_recorded: bool,
) -> moe.CombineOperands:
    """Enqueue a layer's experts. What does not depend on the routing fills the wait for it."""
    take, num, stream = model.workspace.take, read.values.shape[0], model.stream
    experts, rank_of, split, foretells = feed.experts(index)
    is_few = num <= FEW_TOKENS
    fetcher = model.fetcher if is_few and rank_of is None else None
    ahead = fetcher if is_recorded and fetcher and fetcher.looks_ahead(num) else None
    router = take("router", num) if ahead is None else ahead.router_logits(index, num)
    ids = model.expert_ids(index, num)
    places, start = take("expert_weights", num), take("expert_start", model.spec.num_experts + 1)
    row_of = take("row_of", num * model.spec.num_experts_per_tok)
    pair_of = take("pair_of", num)
    shared_logit = take("shared_logit", num)
    gate, up = take("shared_gate", num), take("shared_up", num)
    products = (
        *(Product(weights.router, router), Product(weights.shared_logit, shared_logit)),
        *(Product(weights.shared_gate, gate), Product(weights.shared_up, up)),
    )
    is_some = read.rounded is not None and _is_some(stream, weights, num)
    foreseen = () if ahead is None else _foreseen(model, ahead, index, num)
    own = products[:2] if is_some else products
    begun = _before_routing(model, read, own, foreseen, (ids, places))
    shared_out, shared_down = take("shared_out", num), weights.shared_down
    routing = RouteOperands(router, ids, places, start, row_of, pair_of)
    is_plain = split is None and rank_of is None
    if is_beside := is_plain and can_route_beside(stream, shared_down, routing):
        matmul_swiglu_route(stream, gate, up, shared_down, shared_out, routing)
    elif split is None:
        _route_in_order(model, routing, rank_of, is_routed=begun.is_routed)
    else:
        _route(stream, routing, is_routed=begun.is_routed)
        coming = None if ahead is None else ahead.coming(index)
        start = _share_out(model, experts, split, (ids, row_of, pair_of), coming)
        if split.mailbox is not None:
            post_pairs(stream, index, ids, pair_of, start, read.values, split.mailbox)
    expert_out = take("expert_out", row_of.shape[0])
    next_start = foretell(model, index + 1, read.values, expert_out) if foretells else None
    feed.publish(index, start, PairRows(read.values, row_of, expert_out, next_start))
    if fetcher is not None:
        tokens = None if ahead is None else num
        experts = fetcher.fetch(index, start, tokens)
    if begun.left:
        matmul_several(stream, read.values, begun.left, read.rounded)
    if is_some:
        assert read.rounded is not None
        _shared_of_some(stream, weights, read.rounded, gate, shared_out)
    elif not is_beside:
        _shared(model, gate, up, shared_down, shared_out)
    for group in feed.groups(index):
        _routed(model, experts, read, row_of, start, group)
    if split is not None:
        _take_the_others(model, index, split, start, expert_out)
    return moe.CombineOperands(expert_out, pair_of, places, shared_out, shared_logit)


def foretell(model: ModelOnStream, index: int, values: Tensor, room: Tensor) -> Tensor:
    """Enqueue how a layer would route what the layer before it reads.

    Args:
        model: on its stream.
        index: of the layer.
        values: what the one before reads.
        room: float32 [pairs, D], used up.

    Returns:
        the expert_start of order_by_expert, int32 [E + 1], in the room.
    """
    stream, num, num_pairs = model.stream, values.shape[0], room.shape[0]
    logits, shape = model.workspace.take("router", num), (num, model.spec.num_experts_per_tok)
    ids, places, row_of, pair_of, start = (  # ids first, aligned whatever the number of pairs
        Tensor.over(room.buffer, size, kind, room.offset_bytes + 4 * part * num_pairs)
        for part, (size, kind) in enumerate(
            (
                (shape, np.int32),
                (shape, np.float32),
                ((num_pairs,), np.int32),
                (shape, np.int32),
                ((model.spec.num_experts + 1,), np.int32),
            )
        )
    )
    matmul(stream, values, model.weights.layers[index].moe.router, logits)
    route_in_order(stream, logits, ids, places, start, row_of, pair_of)
    return start


def _foreseen(
    model: ModelOnStream, ahead: Fetcher, index: int, num_tokens: int
) -> tuple[Product, ...]:
    """What the next layer's router makes of this layer's input, as far as there is one."""
    logits = ahead.foreseen_logits(index, num_tokens)
    if logits is None:
        return ()
    return (Product(model.weights.layers[index + 1].moe.router, logits),)


class _Begun(NamedTuple):
    """Products that are left to enqueue, and whether the tokens are routed already."""

    left: tuple[Product, ...]
    is_routed: bool = False


def _before_routing(
    model: ModelOnStream,
    read: LayerInput,
    products: tuple[Product, ...],
    foreseen: tuple[Product, ...],
    routing: tuple[Tensor, Tensor],
) -> _Begun:
    """Enqueue the router's product, and those that take little more time beside it.

    Args:
        model: on its stream.
        read: what the experts read.
        products: the router's, the shared expert's logit, and perhaps others.
        foreseen: more of them, of few tokens.
        routing: ids and weights, for what routes at once.
    """
    stream, num, x = model.stream, read.values.shape[0], read.values
    first, second, scratch = *products[:2], model.workspace.take_all("expert_gate")
    if can_split_pair(stream, x, first.weight, second.weight, scratch):
        route_by_slices(stream, x, first, second, scratch, *routing)
        return _Begun(products[2:], is_routed=True)
    if num <= FEW_TOKENS or can_launch_together(stream, products, num):
        matmul_several(stream, x, (*products, *foreseen), read.rounded)
        return _Begun(())
    matmul(stream, x, first.weight, first.out)
    return _Begun(products[1:])


def _route_in_order(
    model: ModelOnStream, routing: RouteOperands, rank_of: Tensor | None, *, is_routed: bool
) -> None:
    """Enqueue what is left of the routing, and the order of the pairs."""
    ranked = None
    if rank_of is not None:
        ranks = model.workspace.take("expert_ranks", routing.ids.shape[0])
        ranked = Ranked(rank_of, ranks)
    if not is_routed:
        route_in_order(model.stream, *routing, ranked)
        return
    order = routing.ids, routing.expert_start, routing.row_of, routing.pair_of
    order_pairs(model.stream, *order, ranked)


def _route(stream: Stream, routing: RouteOperands, *, is_routed: bool) -> None:
    """Enqueue the routing alone, if it is left."""
    if not is_routed:
        route(stream, routing.logits, routing.ids, routing.weights)


def _is_some(stream: Stream, weights: MoeWeights, num_tokens: int) -> bool:
    """Whether the shared expert of so many tokens is made like the others of some pairs."""
    gate, up, down = weights.shared_gate, weights.shared_up, weights.shared_down
    return (
        are_alike(gate, up)
        and can_make_some(stream, gate, num_tokens, matrices=2)
        and can_make_some(stream, down, num_tokens)
    )


def _shared_of_some(
    stream: Stream, weights: MoeWeights, rounded: Tensor, room: Tensor, out: Tensor
) -> None:
    """Enqueue the shared expert of rounded rows; room: float32 [T, F], overwritten."""
    hidden = Tensor.over(room.buffer, room.shape, np.float16, room.offset_bytes)
    matmul_swiglu_some(stream, rounded, weights.shared_gate, weights.shared_up, hidden)
    if not matmul_at_once(stream, hidden, (Product(weights.shared_down, out),)):
        matmul_some(stream, hidden, weights.shared_down, out)


def _shared(model: ModelOnStream, gate: Tensor, up: Tensor, down: Weight, out: Tensor) -> None:
    """Enqueue the shared expert's last product; gate and up are used up."""
    stream = model.stream
    if can_gate(stream, gate.shape[0]):
        matmul_swiglu(stream, gate, up, down, out)
        return
    moe.swiglu(stream, gate, up, gate)
    matmul(stream, gate, down, out, model.rounded_over(up, gate, 0))


def _share_out(
    model: ModelOnStream,
    experts: ExpertMatrices,
    split: Split,
    pairs: tuple[Tensor, Tensor, Tensor],
    coming: Coming | None,
) -> Tensor:
    """Enqueue the order of a layer's pairs, ids, row_of and pair_of, by who computes them.

    Returns:
        expert_start, with those of the host's processor and those left out at its end.
    """
    take, blobs, (ids, row_of, pair_of) = model.workspace.take, experts.gate.blobs, pairs
    ranks, start = take("expert_ranks", ids.shape[0]), model.workspace.take_all("expert_start")
    share, least_dropped = split.link_share, split.least_dropped
    split_pairs(model.stream, ids, blobs, share, split.slots, least_dropped, ranks, coming)
    order_by_expert(model.stream, ranks, start, row_of, pair_of)
    return start


def _take_the_others(
    model: ModelOnStream, index: int, split: Split, start: Tensor, expert_out: Tensor
) -> None:
    """Enqueue the rows of the pairs that the device does not compute."""
    if split.mailbox is None:
        clear_rows(model.stream, start.rows(start.size - 2, start.size), expert_out)
        return
    box, patience_ns = split.mailbox, split.patience_ns
    take_rows(model.stream, index, start, box, patience_ns, expert_out)


def _routed(
    model: ModelOnStream,
    experts: ExpertMatrices,
    read: LayerInput,
    row_of: Tensor,
    start: Tensor,
    group: ExpertGroup,
) -> None:
    """Enqueue the products of a group of experts: their pairs' rows of expert_out."""
    stream, pairs, ranks = model.stream, row_of.shape[0], group.ranks
    first, stop, num_pairs = group.pairs.start, group.pairs.stop, len(group.pairs)
    start = start.rows(ranks.start, ranks.stop + 1)
    gate, up = (
        model.workspace.take_shaped(name, pairs, matrix.layout.rows)
        for name, matrix in (("expert_gate", experts.gate), ("expert_up", experts.up))
    )
    both = [
        Experts(matrix.blobs.rows(ranks.start, ranks.stop), matrix.layout, out)
        for matrix, out in ((experts.gate, gate), (experts.up, up))
    ]
    blobs, layout = experts.down.blobs.rows(ranks.start, ranks.stop), experts.down.layout
    out = model.workspace.take("expert_out", pairs)
    mlp = ExpertMlp(both[0], both[1], Experts(blobs, layout, out))
    x, rounded = read.values, read.rounded
    if rounded is not None and can_take_some(stream, mlp, num_pairs):
        experts_of_some(stream, rounded, mlp, row_of, start)
        return
    grouped_matmul_pair(stream, x, both[0], both[1], row_of, start, rounded, num_pairs)
    in_order = model.workspace.numbers(pairs)
    if can_gate_pairs(stream, num_pairs, len(ranks)):
        grouped_matmul_swiglu(stream, gate, up, mlp.down, in_order, start, num_pairs)
        return
    own = gate.rows(first, stop)
    moe.swiglu(stream, own, up.rows(first, stop), own)
    rounded = model.rounded_over(up, own, first)
    grouped_matmul(stream, gate, blobs, layout, in_order, start, out, rounded, num_pairs)
