"""Mixture of experts behind routing: the activation between an expert's products, and their sum.

T tokens, k experts per token, P = T * k (token, expert) pairs, D hidden size, F expert width.
Source: qwen4exp MoE; a token's experts are summed in the order of their ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import sigmoid32
from strata_cli.engine.kernels.rows import add_scaled_row, clear_row, compile_small, swiglu_row
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
F32 = np.float32
I32 = np.int32
THREADS = 128  # per block on a GPU


class CombineOperands(NamedTuple):
    """What combine reads; see there."""

    expert_out: Tensor
    pair_of: Tensor
    weights: Tensor
    shared_out: Tensor
    shared_logit: Tensor

    def check(self, num_tokens: int, size: int) -> int:
        """Experts of a token.

        Raises:
            ShapeError: one has another shape or type.
        """
        expect_rank("combine pair_of", self.pair_of, 2)
        top_k = self.pair_of.shape[1]
        expect("combine expert_out", self.expert_out, (num_tokens * top_k, size))
        expect("combine pair_of", self.pair_of, (num_tokens, top_k), I32)
        expect("combine weights", self.weights, (num_tokens, top_k))
        expect("combine shared_out", self.shared_out, (num_tokens, size))
        expect("combine shared_logit", self.shared_logit, (num_tokens, 1))
        return top_k


def swiglu(stream: Stream, gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Gated activation: silu(gate) * up.

    Args:
        stream: enqueues here.
        gate: float32 [P, F].
        up: float32 [P, F].
        out: float32 [P, F], overwritten; may be gate or up itself.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("swiglu gate", gate, 2)
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        expect(f"swiglu {name}", tensor, gate.shape)
    launch = Launch(
        items=gate.shape[0],
        grain=grain(gate.shape[1]),
        grid=(blocks(gate.size, 4 * THREADS), 1, 1),
        block=(THREADS, 1, 1),
        extents=(gate.size,),
        early=True,
    )
    stream.launch(SWIGLU, launch, gate, up, out)


def combine(
    stream: Stream,
    expert_out: Tensor,
    pair_of: Tensor,
    weights: Tensor,
    shared_out: Tensor,
    shared_logit: Tensor,
    out: Tensor,
) -> None:
    """Sum a token's experts in rank order, then add the gated shared expert.

    Args:
        stream: enqueues here.
        expert_out: float32 [T * k, D], a row per sorted pair.
        pair_of: int32 [T, k], from order_by_expert.
        weights: float32 [T, k], from route.
        shared_out: float32 [T, D].
        shared_logit: float32 [T, 1], the shared expert's gate before the sigmoid.
        out: float32 [T, D], overwritten.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("combine out", out, 2)
    num_tokens, size = out.shape
    operands = CombineOperands(expert_out, pair_of, weights, shared_out, shared_logit)
    top_k = operands.check(num_tokens, size)
    expect("combine out", out, (num_tokens, size))
    launch = Launch(
        items=num_tokens,
        grain=grain((top_k + 1) * size),
        grid=(num_tokens, blocks(size, 4 * THREADS), 1),
        block=(THREADS, 1, 1),
        extents=(top_k, size),
        early=True,
    )
    stream.launch(COMBINE, launch, *operands, out)


@nogil_jit
def _swiglu(begin: int, end: int, gate: Floats, up: Floats, out: Floats) -> None:
    """Items: rows."""
    size = out.shape[1]
    compile_small()
    for row in range(begin, end):
        at = row * size
        swiglu_row(out, at, gate, at, up, at, size)


@nogil_jit
def _combine(
    begin: int,
    end: int,
    expert_out: Floats,
    pair_of: Ints,
    weights: Floats,
    shared_out: Floats,
    shared_logit: Floats,
    out: Floats,
) -> None:
    """Items: tokens."""
    size = out.shape[1]
    compile_small()
    for token in range(begin, end):
        at = token * size
        clear_row(out, at, size)
        for rank in range(pair_of.shape[1]):
            pair = pair_of[token, rank]
            add_scaled_row(out, at, weights[token, rank], expert_out, pair * size, size)
        add_scaled_row(out, at, sigmoid32(shared_logit[token, 0]), shared_out, at, size)


def swiglu_reference(gate: Floats, up: Floats) -> Floats:
    """swiglu in plain numpy: gate and up [P, F] -> [P, F]."""
    wide = gate.astype(np.float64)
    out: Floats = (wide / (1.0 + np.exp(-wide)) * up).astype(F32)
    return out


def combine_reference(
    expert_out: Floats, pair_of: Ints, weights: Floats, shared_out: Floats, shared_logit: Floats
) -> Floats:
    """combine in plain numpy, arguments as combine's -> [T, D]."""
    routed = (expert_out[pair_of].astype(np.float64) * weights[:, :, None]).sum(axis=1)
    out: Floats = (routed + shared_out / (1.0 + np.exp(-shared_logit.astype(np.float64)))).astype(
        F32
    )
    return out


SOURCE = "moe.cu"
SWIGLU = Kernel("swiglu", _swiglu, swiglu_reference, SOURCE)
COMBINE = Kernel("combine", _combine, combine_reference, SOURCE)
