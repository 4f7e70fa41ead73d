"""The delta rule of gated delta nets: a recurrence over a state, one token after the other.

Source: qwen4exp GDN mixer. T tokens of one sequence, nk key heads, nv value heads, dim wide each;
value head h uses key head h % nk. kd = nk * dim, vd = nv * dim. The state of a head is
[dim of keys, dim of values]: its columns never mix, so they are computed side by side.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import exp32, sigmoid32, softplus32
from strata_cli.engine.kernels.reduce import sum_squares16
from strata_cli.engine.kernels.rows import (
    add_weighted_rows,
    clear_row,
    compile_small,
    decay_and_add,
    scale_row,
)
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.errors import ShapeError

Floats = NDArray[np.float32]
F32 = np.float32
SOURCE = "delta_rule.cu"
THREADS = 128  # per block on a GPU
SLICES = 16  # lanes of a GPU that share columns of the state
WARP_COLUMNS = 4  # of the state
STEPS = 16  # tokens that a GPU's block stages at a time
STEP_COLUMNS = 32  # of the state, that a GPU's block takes one token through
STEP_THREADS = 128


def delta_rule(
    stream: Stream,
    c: Tensor,
    alpha: Tensor,
    beta: Tensor,
    a: Tensor,
    dt: Tensor,
    state: Tensor,
    out: Tensor,
    num_key_heads: int,
    eps: float,
) -> None:
    """Run one sequence's next T tokens, one after the other, through the gated delta rule.

    q and k are l2-normalised (eps added to the sum of squares), q divided by sqrt(dim). Per head:
    S <- exp(a softplus(alpha + dt)) S;  S += k (sigmoid(beta) (v - S'k))';  out = S'q.

    Args:
        stream: enqueues here.
        c: q heads, k heads, v heads after the convolution, float32 [T, 2 kd + vd]; used up.
        alpha: float32 [T, nv]; used up.
        beta: float32 [T, nv], before the sigmoid; used up.
        a: minus the decay rate, float32 [nv].
        dt: float32 [nv].
        state: float32 [nv, dim, dim], zeros at a sequence's start, in place. For one token on a
            GPU, not written by the launch just ahead.
        out: float32 [T, nv * dim], overwritten.
        num_key_heads: nk.
        eps: added to the sum of squares.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("delta_rule c", c, 2)
    expect_rank("delta_rule state", state, 3)
    num_tokens, (num_values, dim, _) = c.shape[0], state.shape
    expect("delta_rule state", state, (num_values, dim, dim))
    expect("delta_rule c", c, (num_tokens, (2 * num_key_heads + num_values) * dim))
    expect("delta_rule alpha", alpha, (num_tokens, num_values))
    expect("delta_rule beta", beta, (num_tokens, num_values))
    expect("delta_rule a", a, (num_values,))
    expect("delta_rule dt", dt, (num_values,))
    expect("delta_rule out", out, (num_tokens, num_values * dim))
    arguments = (c, alpha, beta, a, dt, state, out, eps)
    if stream.shared_bytes and num_tokens == 1 and can_step(dim, c, state, out):
        step = Launch(
            items=1,
            grid=(dim // STEP_COLUMNS, num_values, 1),
            block=(STEP_THREADS, 1, 1),
            extents=(num_key_heads,),
            early=True,
        )
        stream.launch(_delta_step_kernel(dim // SLICES), step, *arguments)
        return
    shape = DeltaRuleShape.of(num_tokens, dim)
    if shape.is_prepared and stream.shared_bytes:
        prepare_delta_rule(stream, c, alpha, beta, a, dt, num_key_heads, dim, eps)
    launch = Launch(
        items=num_values,
        grain=grain(num_tokens * dim * dim),
        grid=(blocks(dim, shape.block_columns), num_values, 1),
        block=(32 * shape.warps, 1, 1),
        shared_bytes=shape.shared_bytes,
        extents=(num_tokens, num_key_heads, num_values, dim),
        early=True,
    )
    stream.launch(_delta_rule_kernel(shape), launch, *arguments)


def prepare_delta_rule(
    stream: Stream,
    c: Tensor,
    alpha: Tensor,
    beta: Tensor,
    a: Tensor,
    dt: Tensor,
    num_key_heads: int,
    dim: int,
    eps: float,
) -> None:
    """Turn arguments of ``delta_rule`` into what a GPU goes through: no row needs another.

    Args:
        stream: enqueues here.
        c: float32 [T, 2 kd + vd]; its heads of q and k become unit vectors, q over sqrt(dim).
        alpha: float32 [T, nv]; becomes the decay.
        beta: float32 [T, nv]; becomes its sigmoid.
        a: float32 [nv].
        dt: float32 [nv].
        num_key_heads: nk.
        dim: of a head.
        eps: added to the sum of squares.
    """
    num_tokens, num_values = alpha.shape
    launch = Launch(
        items=1,
        grid=(blocks(num_tokens * num_key_heads, THREADS // 16), 1, 1),
        block=(THREADS, 1, 1),
        extents=(num_tokens, num_key_heads, num_values, dim),
        early=True,
    )
    stream.launch(PREPARE_DELTA_RULE, launch, c, alpha, beta, a, dt, eps)


def can_step(dim: int, *rows: Tensor) -> bool:
    """Whether a GPU has a function for one token of heads dim wide, with rows where these are."""
    return dim in (32, 64, 128, 256) and all(tensor.address % 16 == 0 for tensor in rows)


class DeltaRuleShape(NamedTuple):
    """How a GPU's block holds the state: keys per lane, warps. Changes no bit.

    Many tokens: a launch ahead normalises keys and queries, which many blocks need.
    """

    keys: int
    warps: int
    is_prepared: bool

    @classmethod
    def of(cls, num_tokens: int, dim: int) -> DeltaRuleShape:
        """For T tokens of heads dim wide.

        Raises:
            ShapeError: they are too wide.
        """
        keys = next((keys for keys in (2, 4, 8, 16) if dim <= SLICES * keys), None)
        if keys is None:
            raise ShapeError(f"delta_rule: heads of {dim} are wider than 256")
        return cls(keys, 4, num_tokens >= STEPS)

    @property
    def block_columns(self) -> int:
        """Columns of the state that a block takes tokens through."""
        return self.warps * WARP_COLUMNS

    @property
    def shared_bytes(self) -> int:
        """Two batches of STEPS tokens: q, k, the block's part of v, and two rates."""
        return 2 * STEPS * 4 * (2 * self.keys * SLICES + self.block_columns + 2)


@nogil_jit
def _delta_rule(
    begin: int,
    end: int,
    c: Floats,
    alpha: Floats,
    beta: Floats,
    a: Floats,
    dt: Floats,
    state: Floats,
    out: Floats,
    eps: float,
) -> None:
    """Items: value heads. S'k is taken before the decay, then decayed."""
    num_heads, dim, row = state.shape[0], state.shape[1], c.shape[1]
    num_keys = (row // dim - num_heads) // 2
    q, k, change = np.empty(dim, F32), np.empty(dim, F32), np.empty(dim, F32)
    compile_small()
    for head in range(begin, end):
        matrix = head * dim * dim
        for token in range(c.shape[0]):
            q_at = token * row + head % num_keys * dim
            k_at, v_at = q_at + num_keys * dim, token * row + (2 * num_keys + head) * dim
            q_squares, k_squares = sum_squares16(c, q_at, dim), sum_squares16(c, k_at, dim)
            scale_row(q, 0, c, q_at, F32(1.0) / np.sqrt((q_squares + F32(eps)) * F32(dim)), dim)
            scale_row(k, 0, c, k_at, F32(1.0) / np.sqrt(k_squares + F32(eps)), dim)
            decay = exp32(a[head] * softplus32(alpha[token, head] + dt[head]))
            clear_row(change, 0, dim)
            add_weighted_rows(change, 0, k, 0, state, matrix, dim, dim, dim)
            decay_and_add(change, 0, -decay, F32(1.0), c, v_at, dim)
            scale_row(change, 0, change, 0, sigmoid32(beta[token, head]), dim)
            for key in range(dim):
                decay_and_add(state, matrix + key * dim, decay, k[key], change, 0, dim)
            out_at = (token * num_heads + head) * dim
            clear_row(out, out_at, dim)
            add_weighted_rows(out, out_at, q, 0, state, matrix, dim, dim, dim)


def _nothing_to_prepare(begin: int, end: int, *_arguments: Any) -> None:
    """The host normalises keys and queries where it uses them."""


def delta_rule_reference(
    c: Floats,
    alpha: Floats,
    beta: Floats,
    a: Floats,
    dt: Floats,
    state: Floats,
    num_key_heads: int,
    eps: float,
) -> tuple[Floats, Floats]:
    """delta_rule in plain numpy: (out [T, nv * dim], the new state)."""
    num_tokens, (num_values, dim, _) = len(c), state.shape
    parts = c.astype(np.float64).reshape(num_tokens, -1, dim)
    keys_of = np.arange(num_values) % num_key_heads
    v = parts[:, 2 * num_key_heads :]
    unit = parts / np.sqrt(np.sum(parts**2, axis=-1, keepdims=True) + eps)
    q, k = unit[:, keys_of] / np.sqrt(dim), unit[:, num_key_heads + keys_of]
    decay = np.exp(a * np.logaddexp(0.0, alpha.astype(np.float64) + dt))
    rate = 1.0 / (1.0 + np.exp(-beta.astype(np.float64)))
    s = state.astype(np.float64)
    out = np.empty((num_tokens, num_values, dim))
    for t in range(num_tokens):
        s = s * decay[t][:, None, None]
        recalled = np.einsum("hkv,hk->hv", s, k[t])
        s = s + np.einsum("hk,hv->hkv", k[t], rate[t][:, None] * (v[t] - recalled))
        out[t] = np.einsum("hkv,hk->hv", s, q[t])
    return out.reshape(num_tokens, -1).astype(np.float32), s.astype(np.float32)


@cache
def _delta_rule_kernel(shape: DeltaRuleShape) -> Kernel:
    function = f"delta_rule<{shape.keys}, {shape.warps}, {str(shape.is_prepared).lower()}>"
    return Kernel(function, _delta_rule, delta_rule_reference, SOURCE, function)


@cache
def _delta_step_kernel(keys: int) -> Kernel:
    function = f"delta_step<{keys}>"
    return Kernel(function, _delta_rule, delta_rule_reference, SOURCE, function)


DELTA_RULE = _delta_rule_kernel(DeltaRuleShape.of(STEPS, 128))
PREPARE_DELTA_RULE = Kernel("prepare_delta_rule", _nothing_to_prepare, delta_rule_reference, SOURCE)
