"""What happens to logits: log-softmax over the whole vocabulary, and the best tokens of a row.

T rows, V vocabulary size. Values reported to a user pass require_finite, so that no NaN or infinity
reaches a result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, Launch, Stream, Tensor
from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import log32
from strata_cli.engine.kernels.reduce import max16, sum16
from strata_cli.engine.kernels.rows import compile_small, exp_row, subtract_twice
from strata_cli.engine.kernels.shapes import blocks, expect, expect_rank, grain
from strata_cli.errors import ShapeError, StrataError

Floats = NDArray[np.float32]
F32 = np.float32

THREADS = 1024  # per block on a GPU: a row's 61 parts of the full vocabulary at once
PART_TOKENS = 4096  # the vocabulary is summed in parts of this many tokens, then part by part


def log_softmax(stream: Stream, logits: Tensor, out: Tensor) -> None:
    """Log-probabilities of every token of the vocabulary.

    A row with a value that is not a number, or with +inf, becomes NaN as a whole.

    Args:
        stream: enqueues here.
        logits: float32 [T, V].
        out: float32 [T, V], overwritten; may be logits itself.

    Raises:
        ShapeError: an argument has another shape or type.
    """
    expect_rank("log_softmax logits", logits, 2)
    expect("log_softmax logits", logits, logits.shape)
    expect("log_softmax out", out, logits.shape)
    launch = Launch(
        items=logits.shape[0],
        grain=grain(2 * logits.shape[1]),
        grid=(logits.shape[0], 1, 1),
        block=(THREADS, 1, 1),
        shared_bytes=4 * blocks(logits.shape[1], PART_TOKENS),
        extents=(logits.shape[1],),
        early=True,
    )
    stream.launch(LOG_SOFTMAX, launch, logits, out)


def log_softmax_row(logits: Floats) -> Floats:
    """Log-probabilities of one row on the host, [V] -> [V], with the kernel's own bits.

    Raises:
        StrataError: a value is not finite.
    """
    require_finite(logits)
    out = np.empty((1, logits.size), F32)
    _log_softmax(0, 1, np.ascontiguousarray(logits).reshape(1, -1), out)
    row: Floats = out[0]
    return row


def top_k(values: Floats, k: int) -> NDArray[np.int64]:
    """Ids of the k largest values of one row on the host, best first, equal ones by lower id.

    Args:
        values: logits or log-probabilities, [V].
        k: 1 <= k <= V.

    Raises:
        ShapeError: k is out of range.
        StrataError: a value is not finite.
    """
    if not 1 <= k <= values.size:
        raise ShapeError(f"cannot take the best {k} of {values.size} tokens")
    require_finite(values)
    threshold = np.partition(values, values.size - k)[values.size - k]
    candidates = np.flatnonzero(values >= threshold)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]


def argmax(values: Floats) -> int:
    """Id of the largest value of one row on the host, the lowest among equal ones.

    Raises:
        StrataError: a value is not finite.
    """
    require_finite(values)
    return int(np.argmax(values))


def require_finite(values: Floats) -> None:
    """Check one row of logits or log-probabilities, [V], before anything is reported from it.

    Raises:
        StrataError: a value is NaN or infinite; says how many, and where the first is.
    """
    finite = np.isfinite(values)
    if not finite.all():
        raise StrataError(
            f"the model gave {values.size - np.count_nonzero(finite)} of {values.size} scores that "
            f"are not finite numbers, the first at token {int(np.argmin(finite))}",
            hint="the model file may be damaged: compare its checksum with the published one",
        )


@nogil_jit
def _log_softmax(begin: int, end: int, logits: Floats, out: Floats) -> None:
    """Items: rows."""
    vocab_size = logits.shape[1]
    exps = np.empty(PART_TOKENS, F32)
    compile_small()
    for row in range(begin, end):
        at, last = row * vocab_size, (row + 1) * vocab_size
        largest = max16(logits, at, vocab_size)
        total = F32(0.0)
        for first in range(at, last, PART_TOKENS):
            size = PART_TOKENS if last - first > PART_TOKENS else last - first
            exp_row(exps, 0, logits, first, largest, size)
            total += sum16(exps, 0, size)
        # log32 reads bits and would make a number of NaN.
        log_total = log32(total) if total == total else total
        subtract_twice(out, at, logits, at, largest, log_total, vocab_size)


def log_softmax_reference(logits: Floats) -> Floats:
    """log_softmax in plain numpy: [T, V] -> [T, V]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    out: Floats = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).astype(F32)
    return out


LOG_SOFTMAX = Kernel("log_softmax", _log_softmax, log_softmax_reference, "head.cu")
