"""Gated attention over a K/V cache: dense causal, or the index blocks chosen for each token.

Source: qwen4exp QSA. H query heads share KV key/value heads, H / KV to each; softmax over
q . k / sqrt(dim); the result is gated by a sigmoid. A token's allowed positions are taken in
ascending order, by one sequence of operations that depends on nothing but the token, its position,
its blocks and the cache.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, KernelArgument, Stream, Tensor
from strata_cli.engine.kernels.attention_plan import AttendPlan
from strata_cli.engine.kernels.cache_rows import cache_type
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import exp32
from strata_cli.engine.kernels.pointers import address_of
from strata_cli.engine.kernels.reduce import max16, sum16
from strata_cli.engine.kernels.rows import (
    add_weighted_rows,
    clear_row,
    compile_small,
    multiply_row,
    scale_row,
    sigmoid_row,
)
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.engine.kernels.simd import multiply_rows

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
F32 = np.float32
SOURCE = "attention.cu"
FEW_SOURCE = "attention_few.cu"
U64 = np.uint64  # an unsigned index lets LLVM turn a loop into vectors
HEADS_AT_ONCE = 4  # share the reading of a key row; changes no bit
POSITIONS_AT_ONCE = 64  # whose value rows stay in the first cache for all heads; changes no bit
_ROWS_OF_HEADS = np.arange(HEADS_AT_ONCE, dtype=np.int32)


def attend(
    stream: Stream,
    q: Tensor,
    gate_src: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    selected: Tensor,
    num_selected: Tensor,
    ratio: int,
    sums: Tensor,
    out: Tensor,
) -> None:
    """Gated attention of T tokens of one sequence over its cache, their own rows included.

    A token sees the positions of its selected blocks and those after its last complete block; all
    positions up to its own when ratio is 0 or every complete block is selected.

    Args:
        stream: enqueues here.
        q: queries, normalised and turned, float32 [T, H, dim].
        gate_src: float32 [T, H, 2 * dim], of which the second half of a head is its gate.
        keys: cache_type [context, KV * dim].
        values: cache_type [context, KV * dim].
        positions: int32 [T].
        selected: int32 [T, budget_blocks] from select_blocks; not read when ratio is 0.
        num_selected: int32 [T]; not read when ratio is 0.
        ratio: positions per block, 0 for dense attention.
        sums: scratch, float32 [any], best at least attend_scratch_floats.
        out: float32 [T, H * dim], overwritten.

    Raises:
        ShapeError: an argument has another shape or type, or KV does not divide H.
    """
    expect_rank("attend q", q, 3)
    expect_rank("attend keys", keys, 2)
    expect_rank("attend selected", selected, 2)
    num_tokens, num_heads, dim = q.shape
    num_kv_heads = keys.shape[1] // dim
    group = num_heads // max(num_kv_heads, 1)
    expect("attend q", q, (num_tokens, group * num_kv_heads, dim))
    expect("attend gate_src", gate_src, (num_tokens, num_heads, 2 * dim))
    dtype = cache_type(stream)
    expect("attend keys", keys, (keys.shape[0], num_kv_heads * dim), dtype)
    expect("attend values", values, keys.shape, dtype)
    expect("attend positions", positions, (num_tokens,), np.int32)
    expect("attend selected", selected, (num_tokens, selected.shape[1]), np.int32)
    expect("attend num_selected", num_selected, (num_tokens,), np.int32)
    expect("attend sums", sums, (sums.size,))
    expect("attend out", out, (num_tokens, num_heads * dim))
    arguments = (q, gate_src, keys, values, positions, selected, num_selected, ratio, sums, out)
    plan = AttendPlan.of(q, keys, selected.shape[1], ratio, stream.shared_bytes, sums)
    if not stream.shared_bytes or not (plan.is_by_parts or plan.is_by_units):
        items = num_tokens * num_kv_heads * blocks(group, HEADS_AT_ONCE)
        launch = plan.whole(items, grain(keys.shape[0] * dim // 8))
        stream.launch(_tile_kernel(plan, is_cut=False), launch, *arguments)
        return
    for step in plan.steps():
        part = _rows(arguments, step.first, step.last)
        if plan.is_by_parts:
            stream.launch(_part_kernel(plan), plan.parts(step), *part)
            stream.launch(JOIN_PARTS, plan.join(step), *part)
        else:
            stream.launch(_tile_kernel(plan, is_cut=True), plan.units(step), *part)
            stream.launch(JOIN_UNITS, plan.join(step), *part)


def _rows(arguments: tuple[KernelArgument, ...], first: int, last: int) -> list[KernelArgument]:
    """Arguments of attend for tokens first .. last."""
    of_tokens = (0, 1, 4, 5, 6, 9)
    return [
        argument.rows(first, last)
        if index in of_tokens and isinstance(argument, Tensor)
        else argument
        for index, argument in enumerate(arguments)
    ]


@nogil_jit
def _attend(
    begin: int,
    end: int,
    q: Floats,
    gate_src: Floats,
    keys: Floats,
    values: Floats,
    positions: Ints,
    selected: Ints,
    num_selected: Ints,
    ratio: int,
    _sums: Floats,
    out: Floats,
) -> None:
    """Items: (part of a kv head's heads, token).

    Parts are outermost: late tokens cost more, so every thread gets some. The allowed positions are
    runs of consecutive ones: the selected blocks, then the tail; or the tail alone, from 0 on.
    """
    (num_tokens, num_heads, dim), (context, width) = q.shape, keys.shape
    group = num_heads * dim // width
    parts = (group + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    scale = F32(1.0) / np.sqrt(F32(dim))
    weights, gate = np.empty(HEADS_AT_ONCE * context, F32), np.empty(dim, F32)
    compile_small()
    for item in range(begin, end):
        part, token = item // num_tokens, item % num_tokens
        kv_head, skipped = part // parts, part % parts * HEADS_AT_ONCE
        heads = group - skipped if group - skipped < HEADS_AT_ONCE else HEADS_AT_ONCE
        at = (token * num_heads + kv_head * group + skipped) * dim
        stop = positions[token] + 1
        blocks, complete = num_selected[token], stop // ratio if ratio > 0 else 0
        if blocks >= complete:
            blocks, complete = 0, 0
        count = 0
        for run in range(blocks + 1):
            first = (selected[token, run] if run < blocks else complete) * ratio
            length = ratio if run < blocks else stop - first
            multiply_rows(
                address_of(keys) + (first * width + kv_head * dim) * 4,
                width * 4,
                length,
                address_of(q) + at * 4,
                dim,
                address_of(_ROWS_OF_HEADS),
                heads,
                address_of(weights) + count * 4,
                context * 4,
            )
            count += length
        for head in range(heads):
            largest = scale * max16(weights, head * context, count)
            for index in range(U64(head * context), U64(head * context + count)):
                weights[index] = exp32(scale * weights[index] - largest)
        clear_row(out, at, heads * dim)
        count = 0
        for run in range(blocks + 1):
            first = (selected[token, run] if run < blocks else complete) * ratio
            last = first + ratio if run < blocks else stop
            for position in range(first, last, POSITIONS_AT_ONCE):
                rest = last - position
                length = rest if rest < POSITIONS_AT_ONCE else POSITIONS_AT_ONCE
                row = position * width + kv_head * dim
                for head in range(heads):
                    row_out, w = at + head * dim, head * context + count
                    add_weighted_rows(out, row_out, weights, w, values, row, width, length, dim)
                count += length
        for head in range(heads):
            row_out = at + head * dim
            sigmoid_row(gate, 0, gate_src, 2 * row_out + dim, dim)
            total = sum16(weights, head * context, count)
            scale_row(out, row_out, out, row_out, F32(1.0) / total, dim)
            multiply_row(out, row_out, gate, 0, dim)


def _nothing_to_join(begin: int, end: int, *_arguments: Any) -> None:
    """The host does not cut a token's positions into units: all is in out by now."""


def attend_reference(
    q: Floats,
    gate_src: Floats,
    keys: Floats,
    values: Floats,
    positions: Ints,
    selected: Ints,
    num_selected: Ints,
    ratio: int,
) -> Floats:
    """Attend in plain numpy: [T, H * dim]."""
    num_tokens, num_heads, dim = q.shape
    kv = keys.shape[1] // dim
    k, v = (cache.astype(np.float64).reshape(-1, kv, dim) for cache in (keys, values))
    heads_of = np.arange(num_heads) // (num_heads // kv)
    out = np.empty((num_tokens, num_heads, dim))
    for t, position in enumerate(positions):
        allowed = np.arange(position + 1)
        if ratio:
            blocks = np.append(selected[t, : num_selected[t]], (position + 1) // ratio)
            allowed = allowed[np.isin(allowed // ratio, blocks)]
        scores = np.einsum("hd,phd->hp", q[t], k[allowed][:, heads_of]) / np.sqrt(dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[t] = np.einsum("hp,phd->hd", weights, v[allowed][:, heads_of])
    gate = 1.0 / (1.0 + np.exp(-gate_src[..., dim:].astype(np.float64)))
    return (out * gate).reshape(num_tokens, -1).astype(np.float32)


@functools.cache
def _tile_kernel_of(dim: int, warps: int, stages: int, is_cut: bool) -> Kernel:
    function = f"attend<{dim}, {warps}, {stages}, {str(is_cut).lower()}>"
    return Kernel(function, _attend, attend_reference, SOURCE, function)


def _tile_kernel(plan: AttendPlan, *, is_cut: bool) -> Kernel:
    return _tile_kernel_of(plan.padded_dim, plan.tile.warps, plan.tile.stages, is_cut)


@functools.cache
def _part_kernel_of(dim: int, stages: int) -> Kernel:
    function = f"attend_parts<{dim}, {stages}>"
    return Kernel(function, _attend, attend_reference, FEW_SOURCE, function)


def _part_kernel(plan: AttendPlan) -> Kernel:
    return _part_kernel_of(plan.padded_dim, plan.part_stages)


JOIN_PARTS = Kernel("join_parts", _nothing_to_join, attend_reference, FEW_SOURCE)
JOIN_UNITS = Kernel("join_units", _nothing_to_join, attend_reference, FEW_SOURCE)
ATTEND = _tile_kernel_of(256, 8, 2, is_cut=False)
