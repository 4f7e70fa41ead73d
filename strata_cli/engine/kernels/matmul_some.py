"""Products of some rows, and of experts with some each: passes of about a hundred tokens, on a GPU.

Passes over eight rows at a time would decode the weights of many experts several times over, and
tiles of 128 rows would mostly be empty. Bits are those of ``grouped_matmul`` and ``swiglu``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_TOKENS, SOME_PAIRS_PER_EXPERT, SOME_TOKENS
from strata_cli.engine.kernels.few_shapes import book_bytes, cut_rows
from strata_cli.engine.kernels.gpu import Gpu, gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.matmul_several import Experts, matrix_of_experts
from strata_cli.engine.kernels.products import (
    WARP,
    Matrix,
    Plan,
    matrix_of,
    slice_cols,
    unit_of,
)
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight
from strata_cli.engine.model.quants import BLOCK
from strata_cli.errors import DeviceError

SOME_SOURCE = "matmul_some.cu"
CAPABILITY = (9, 0)  # the least that copies runs of bytes
MOST_WARPS = 20  # that multiply
TILE_ROWS = 16  # weight rows, of one matrix, of two, or of four streams
STREAMS = 4  # that can be mixed
ENDS = {1: "some", 2: "swiglu", STREAMS: "mix"}  # of functions' names, by matrices of a tile
GROUPS = (4, 2, 1)  # of eight pairs whose activations a block may hold
MOST_DEPTH = 4  # tiles of a team that are in shared memory or on their way
GATE_BYTES = 8
HELD_BYTES = 4 * 17  # what a slot holds
SUMS_BYTES = 16 * WARP  # of a slice of a tile, of eight pairs


class _Shape(NamedTuple):
    """A choice that fits; fields as in matmul_some.cu, groups of eight pairs."""

    groups: int
    teams: int
    team_warps: int
    slots: int
    slot_chunks: int
    span_shift: int
    chunks: int
    shared_bytes: int

    @property
    def depth(self) -> int:
        return blocks(self.slots, self.teams)


@lru_cache(maxsize=4096)
def _shape(
    matrix: Matrix, matrices: int, experts: int, gpu: Gpu, candidates: tuple[int, ...] = GROUPS
) -> _Shape | None:
    """The one of most pairs at once whose teams find their next tile on its way, if any fits."""
    slices = blocks(matrix.cols, slice_cols(matrix.qtype, matrix.cols))
    is_packed = BLOCK[matrix.qtype].weights % 32 == 0
    if gpu.capability < CAPABILITY or slices > MOST_WARPS or not is_packed:
        return None
    cut = cut_rows(matrix, TILE_ROWS // matrices)
    slot_chunks, known = matrices * cut.slot_chunks, 6 * (experts + 1)
    most = MOST_WARPS // slices
    for groups in candidates:
        for teams in range(most, most * 2 // 3 if groups > 1 else 0, -1):
            sums = teams * (slices - 1) * groups * SUMS_BYTES
            planes = 16 * groups * matrix.cols
            fixed = book_bytes(matrix.qtype) + planes + sums + known + teams * GATE_BYTES
            each = 16 * slot_chunks + HELD_BYTES + 2 * GATE_BYTES
            slots = min((gpu.shared_bytes - fixed) // each, MOST_DEPTH * teams)
            if slots >= teams + max(1, teams // 4):
                numbers = slots, slot_chunks, cut.span_shift, cut.chunks
                return _Shape(groups, teams, slices, *numbers, fixed + slots * each)
    return None


@lru_cache(maxsize=4096)
def some_plan(matrix: Matrix, matrices: int, experts: int, gpu: Gpu, tokens: int = 0) -> Plan:
    """The function for a matrix, or for gate and up: of each expert, or of all tokens.

    Args:
        matrix: what it is compiled for.
        matrices: 1 or 2.
        experts: how many; 0: none.
        gpu: where it runs.
        tokens: without experts.

    Raises:
        DeviceError: it does not fit.
    """
    shape = _shape(matrix, matrices, experts, gpu)
    if shape is None:
        raise DeviceError(
            f"{matrix.qtype.name} product with {matrix.cols} columns for pairs of {experts} "
            f"experts does not fit a block's {gpu.shared_bytes} bytes of shared memory"
        )
    if not experts:
        shape = _with_work(shape, matrix, matrices, gpu, tokens)
    name = ("grouped_" if experts else "matmul_") + ENDS[matrices]
    return Plan(
        unit=unit_of(SOME_SOURCE, name, matrix.qtype, matrix.lane, matrix.align, shape.groups),
        grid=(max(1, gpu.num_multiprocessors), 1, 1),
        block=(WARP * (shape.teams * shape.team_warps + 1), 1, 1),
        shared_bytes=shape.shared_bytes,
        extents=(
            *((experts,) if experts else ()),
            shape.teams,
            shape.team_warps,
            shape.slots,
            shape.slot_chunks,
            shape.depth,
            slice_cols(matrix.qtype, matrix.cols),
            shape.span_shift,
            shape.chunks,
        ),
    )


@lru_cache(maxsize=4096)
def _ready(
    matrix: Matrix, matrices: int, experts: int, gpu: Gpu, tokens: int = 0
) -> tuple[Kernel, Launch]:
    """``some_plan`` as what is launched."""
    plan = some_plan(matrix, matrices, experts, gpu, tokens)
    return gpu_kernel(plan.unit), plan.launch(1, 1, early=True)


def _with_work(shape: _Shape, matrix: Matrix, matrices: int, gpu: Gpu, tokens: int) -> _Shape:
    """With fewer tokens at once where else half of all teams would have no tile."""
    for groups in range(shape.groups - 1, 0, -1):
        tiles = blocks(tokens, 8 * shape.groups) * blocks(matrix.rows * matrices, TILE_ROWS)
        if 2 * tiles >= gpu.num_multiprocessors * shape.teams:
            break
        if groups in GROUPS:
            shape = _shape(matrix, matrices, 0, gpu, (groups,)) or shape
    return shape


def can_make_some(stream: Stream, weight: Weight, tokens: int, *, matrices: int = 1) -> bool:
    """Whether ``matmul_some``, or ``matmul_swiglu_some``, makes so many rows, and first."""
    if not stream.shared_bytes or not FEW_TOKENS < tokens <= SOME_TOKENS:
        return False
    matrix = _part(weight, STREAMS) if matrices == STREAMS else matrix_of(weight)
    return _shape(matrix, matrices, 0, gpu_of(stream)) is not None


def matmul_some(stream: Stream, rounded: Tensor, weight: Weight, out: Tensor) -> None:
    """Enqueue ``matmul``, where ``can_make_some``.

    Args:
        stream: where it runs.
        rounded: activations as ``round_rows`` left them, float16 [T, K].
        weight: N rows of K quantized weights.
        out: float32 [T, N], overwritten.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = rounded.shape[0]
    expect("matmul_some rounded", rounded, (tokens, weight.cols), np.float16)
    expect("matmul_some out", out, (tokens, weight.rows))
    numbers = (int(weight.qtype), tokens, weight.rows, weight.cols)
    ready = _ready(matrix_of(weight), 1, 0, gpu_of(stream), tokens)
    stream.launch(*ready, rounded, weight.data, out, *numbers)


def matmul_swiglu_some(
    stream: Stream, rounded: Tensor, gate: Weight, up: Weight, hidden: Tensor
) -> None:
    """Enqueue silu(gate) * up of two products, where ``can_make_some`` of two such matrices.

    Args:
        stream: where it runs.
        rounded: activations as ``round_rows`` left them, float16 [T, K].
        gate: N rows of K quantized weights.
        up: the same, of the same type and alignment.
        hidden: float16 [T, N], overwritten: the product rounded as ``round_rows`` does.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = rounded.shape[0]
    expect("matmul_swiglu_some rounded", rounded, (tokens, gate.cols), np.float16)
    expect("matmul_swiglu_some hidden", hidden, (tokens, gate.rows), np.float16)
    numbers = (int(gate.qtype), tokens, gate.rows, gate.cols)
    operands = (rounded, gate.data, up.data, hidden)
    ready = _ready(matrix_of(gate), 2, 0, gpu_of(stream), tokens)
    stream.launch(*ready, *operands, *numbers)


def can_mix_some(stream: Stream, up: Weight, num_streams: int, tokens: int) -> bool:
    """Whether ``matmul_mix_some`` takes the gates of so many rows."""
    if num_streams != STREAMS or up.rows % STREAMS:
        return False
    return can_make_some(stream, up, tokens, matrices=STREAMS)


def matmul_mix_some(
    stream: Stream, low: Tensor, up: Weight, normed: Tensor, out: Tensor, rounded: Tensor
) -> None:
    """Enqueue ``stream_mix`` by the gates that a product makes, where ``can_mix_some``.

    Args:
        stream: where it runs.
        low: float16 [T, K].
        up: S * D rows of K quantized weights.
        normed: float32 [T, S * D].
        out: float32 [T, D], overwritten.
        rounded: float16 [T, D], overwritten: out as ``round_rows`` rounds it.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens, rows = low.shape[0], up.rows // STREAMS
    expect("matmul_mix_some low", low, (tokens, up.cols), np.float16)
    expect("matmul_mix_some normed", normed, (tokens, up.rows))
    expect("matmul_mix_some out", out, (tokens, rows))
    expect("matmul_mix_some rounded", rounded, (tokens, rows), np.float16)
    numbers = (int(up.qtype), tokens, rows, up.cols)
    operands = (low, up.data, normed, out, rounded)
    ready = _ready(_part(up, STREAMS), STREAMS, 0, gpu_of(stream), tokens)
    stream.launch(*ready, *operands, *numbers)


def are_alike(first: Weight, second: Weight) -> bool:
    """Whether one function is compiled for both."""
    return matrix_of(first) == matrix_of(second)


def _part(weight: Weight, parts: int) -> Matrix:
    """One of so many equal runs of a weight's rows."""
    whole = matrix_of(weight)
    return whole._replace(rows=whole.rows // parts)


class ExpertMlp(NamedTuple):
    """Gate, up and down of every expert; their outputs are the hidden rows twice, and the last."""

    gate: Experts
    up: Experts
    down: Experts


def can_take_some(stream: Stream, mlp: ExpertMlp, pairs: int) -> bool:
    """Whether ``experts_of_some`` makes so many pairs, and first of all that could."""
    experts = mlp.gate.blobs.shape[0]
    if not stream.shared_bytes or not 0 < pairs <= SOME_PAIRS_PER_EXPERT * experts:
        return False
    gpu = gpu_of(stream)
    gate, up, down = (matrix_of_experts(each.layout) for each in mlp)
    fits = _shape(gate, 2, experts, gpu) is not None and _shape(down, 1, experts, gpu) is not None
    return gate == up and fits


def experts_of_some(
    stream: Stream,
    rounded: Tensor,
    mlp: ExpertMlp,
    row_of: Tensor,
    expert_start: Tensor,
) -> None:
    """Enqueue gate, up, silu(gate) * up and down of every pair, where ``can_take_some``.

    Args:
        stream: where it runs.
        rounded: activations as ``round_rows`` left them, float16 [R, K].
        mlp: the matrices; down's output [P, N] is overwritten where these experts have pairs. What
            the others' outputs hold afterwards is not told.
        row_of: row of rounded that each pair reads, int32 [P], pairs sorted by expert.
        expert_start: as of ``grouped_matmul``.

    Raises:
        ShapeError: extents or types do not fit.
    """
    gate, up, down = mlp
    pairs, experts, gpu = row_of.shape[0], gate.blobs.shape[0], gpu_of(stream)
    rows, cols, kind = gate.layout.rows, gate.layout.cols, int(gate.layout.qtype)
    expect("experts_of_some rounded", rounded, (rounded.shape[0], cols), np.float16)
    expect("experts_of_some gate", gate.out, (pairs, rows))
    expect("experts_of_some down", down.out, (pairs, down.layout.rows))
    expect("experts_of_some hidden", gate.out, (pairs, down.layout.cols))
    expect("experts_of_some expert_start", expert_start, (experts + 1,), row_of.dtype)
    hidden = Tensor.over(gate.out.buffer, gate.out.shape, np.float16, gate.out.offset_bytes)
    stream.launch(
        *_ready(matrix_of_experts(gate.layout), 2, experts, gpu),
        *(rounded, gate.blobs, up.blobs, row_of, expert_start, hidden),
        *(kind, rows, cols, gate.layout.offset_bytes, up.layout.offset_bytes),
    )
    stream.launch(
        *_ready(matrix_of_experts(down.layout), 1, experts, gpu),
        *(hidden, down.blobs, expert_start, down.out),
        *(int(down.layout.qtype), down.layout.rows, rows, down.layout.offset_bytes),
    )
