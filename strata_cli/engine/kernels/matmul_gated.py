"""Products of activations that are gated, or normed, as they are loaded, for few rows on a GPU.

Bits are those of the gate's own kernel followed by the product; a launch and its wait are saved.
"""

from __future__ import annotations

import numpy as np

from strata_cli.engine.device.base import Stream, Tensor
from strata_cli.engine.kernels.choice import FEW_PAIRS_PER_EXPERT, GATED_TOKENS
from strata_cli.engine.kernels.few import GATED, Extra, few_plan
from strata_cli.engine.kernels.few_shapes import FEW_COLUMNS
from strata_cli.engine.kernels.gpu import gpu_of
from strata_cli.engine.kernels.gpu_only import gpu_kernel
from strata_cli.engine.kernels.matmul_several import Experts, matrix_of_experts
from strata_cli.engine.kernels.products import WARP, Plan, matrix_of
from strata_cli.engine.kernels.routing import ROUTE_IN_REGISTERS, RouteOperands, route_bytes
from strata_cli.engine.kernels.shapes import blocks, expect
from strata_cli.engine.kernels.weight import Weight

MOST_NORMED_DIM = 128  # of a head
MOST_ROUTED_BESIDE = 4  # tokens that are routed beside a product, a warp each


def can_gate(stream: Stream, tokens: int) -> bool:
    """Whether a product of so many rows may be gated as it loads them: few, and on a GPU."""
    return stream.shared_bytes > 0 and tokens <= GATED_TOKENS


def can_gate_pairs(stream: Stream, pairs: int, experts: int) -> bool:
    """The same for the pairs of experts."""
    return stream.shared_bytes > 0 and pairs <= FEW_PAIRS_PER_EXPERT * experts


def matmul_swiglu(stream: Stream, gate: Tensor, up: Tensor, weight: Weight, out: Tensor) -> None:
    """Enqueue ``matmul`` of silu(gate) * up, where ``can_gate``.

    Args:
        stream: where it runs.
        gate: float32 [T, K].
        up: float32 [T, K].
        weight: N rows of K quantized weights.
        out: float32 [T, N], overwritten; must overlap neither.

    Raises:
        ShapeError: extents or types do not fit.
    """
    expect("matmul_swiglu up", up, (gate.shape[0], weight.cols))
    _launch(stream, gate, up, 1, weight, out)


def can_route_beside(stream: Stream, weight: Weight, operands: RouteOperands) -> bool:
    """Whether ``matmul_swiglu_route`` takes them: very few tokens, and on a GPU."""
    (tokens, num_experts), top_k = operands.logits.shape, operands.ids.shape[1]
    if not can_gate(stream, tokens) or not 0 < tokens <= MOST_ROUTED_BESIDE:
        return False
    plan = _plan(stream, weight, tokens)
    has_warps = plan.block[0] >= WARP * tokens
    has_room = has_warps and plan.shared_bytes >= route_bytes(tokens, top_k)
    return has_room and num_experts <= ROUTE_IN_REGISTERS


def matmul_swiglu_route(
    stream: Stream, gate: Tensor, up: Tensor, weight: Weight, out: Tensor, operands: RouteOperands
) -> None:
    """Enqueue ``matmul_swiglu`` and ``route_in_order``, which run beside each other.

    Args:
        stream: where it runs; ``can_route_beside`` said yes.
        gate: as of ``matmul_swiglu``.
        up: as of ``matmul_swiglu``.
        weight: as of ``matmul_swiglu``.
        out: as of ``matmul_swiglu``.
        operands: of ``route_in_order``, with as many tokens.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens = gate.shape[0]
    _expect_gated(gate, weight, out)
    expect("matmul_swiglu up", up, gate.shape)
    expect("matmul_swiglu_route ids", operands.ids, (tokens, operands.ids.shape[1]), np.int32)
    num_experts, top_k = operands.check(), operands.ids.shape[1]
    plan = _plan(stream, weight, tokens)
    parameters = plan.unit.function.partition("<")[2].rstrip(">")
    function = f"gated_few_route<{parameters}, {ROUTE_IN_REGISTERS // WARP}>"
    passes, num_blocks, _ = plan.grid
    launch = plan.launch(1, 1, early=True)._replace(grid=(passes, num_blocks + 1, 1))
    numbers = (int(weight.qtype), tokens, weight.rows, weight.cols, num_experts, top_k)
    kernel = gpu_kernel(plan.unit._replace(function=function))
    stream.launch(kernel, launch, gate, up, weight.data, out, *operands, *numbers)


def matmul_silu(stream: Stream, x: Tensor, divisor: int, weight: Weight, out: Tensor) -> None:
    """Enqueue ``matmul`` of silu(x / divisor), where ``can_gate``; arguments as of ``matmul``."""
    _launch(stream, x, x, divisor, weight, out)


def can_norm(stream: Stream, x: Tensor, dim: int) -> bool:
    """Whether ``matmul_normed`` takes heads so wide: of one token, and on a GPU."""
    is_one = stream.shared_bytes > 0 and x.shape[0] == 1
    return is_one and dim % 32 == 0 and dim <= MOST_NORMED_DIM


def matmul_normed(
    stream: Stream, x: Tensor, z: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor
) -> None:
    """Enqueue ``matmul`` of what ``gated_norm`` makes of x.

    Args:
        stream: where it runs; ``can_norm`` said yes.
        x: float32 [T, K].
        z: as of ``gated_norm``.
        norm: the norm's weight, float32 [dim].
        eps: as of ``gated_norm``.
        weight: N rows of K.
        out: float32 [T, N], overwritten; must overlap neither.

    Raises:
        ShapeError: extents or types do not fit.
    """
    tokens, dim = x.shape[0], norm.shape[0]
    _expect_gated(x, weight, out)
    expect("normed matmul z", z, x.shape)
    expect("normed matmul norm", norm, (dim,))
    matrix = matrix_of(weight)
    plan = few_plan((matrix,), tokens, 1, gpu_of(stream), extra=Extra(head_dim=dim))
    numbers = (int(weight.qtype), tokens, weight.rows, weight.cols, dim)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, x, z, norm, eps, weight.data, out, *numbers)


def _launch(
    stream: Stream, x: Tensor, up: Tensor, divisor: int, weight: Weight, out: Tensor
) -> None:
    tokens = x.shape[0]
    _expect_gated(x, weight, out)
    if tokens == 0:
        return
    plan = _plan(stream, weight, tokens)
    numbers = (int(weight.qtype), tokens, weight.rows, weight.cols, divisor)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, x, up, weight.data, out, *numbers)


def _expect_gated(x: Tensor, weight: Weight, out: Tensor) -> None:
    expect("gated matmul x", x, (x.shape[0], weight.cols))
    expect("gated matmul out", out, (x.shape[0], weight.rows))


def _plan(stream: Stream, weight: Weight, tokens: int) -> Plan:
    matrix = matrix_of(weight)
    passes = blocks(tokens, FEW_COLUMNS)
    return few_plan((matrix,), tokens, passes, gpu_of(stream), extra=GATED)


def grouped_matmul_swiglu(
    stream: Stream,
    gate: Tensor,
    up: Tensor,
    experts: Experts,
    row_of: Tensor,
    expert_start: Tensor,
    num_pairs: int,
) -> None:
    """Enqueue ``grouped_matmul`` of silu(gate) * up, where ``can_gate_pairs``.

    Args:
        stream: where it runs.
        gate: float32 [R, K].
        up: float32 [R, K].
        experts: the matrices, and the output, which must overlap neither.
        row_of: row of gate and up that each pair reads, int32 [P].
        expert_start: as of ``grouped_matmul``.
        num_pairs: of all these experts, at most P.

    Raises:
        ShapeError: extents or types do not fit.
    """
    layout, num_experts = experts.layout, experts.blobs.shape[0]
    expect("grouped_matmul_swiglu gate", gate, (gate.shape[0], layout.cols))
    expect("grouped_matmul_swiglu up", up, gate.shape)
    expect("grouped_matmul_swiglu out", experts.out, (row_of.shape[0], layout.rows))
    expect("grouped_matmul_swiglu expert_start", expert_start, (num_experts + 1,), row_of.dtype)
    if num_pairs == 0:
        return
    matrix, gpu = matrix_of_experts(layout), gpu_of(stream)
    plan = few_plan((matrix,), gate.shape[0], num_pairs, gpu, num_experts, extra=GATED)
    numbers = (int(layout.qtype), layout.rows, layout.cols, layout.offset_bytes)
    operands = (gate, up, experts.blobs, row_of, expert_start, experts.out)
    launch = plan.launch(1, 1, early=True)
    stream.launch(gpu_kernel(plan.unit), launch, *operands, *numbers)
