"""What happens to a row of logits, on the host: log-softmax over the vocabulary, the best tokens.

V is the vocabulary's size. Every function refuses values that are not finite, so that no NaN or
infinity reaches a result.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.engine.kernels.math32 import log32
from strata_cli.engine.kernels.reduce import max16, sum16
from strata_cli.engine.kernels.rows import compile_small, exp_row, subtract_twice
from strata_cli.errors import ShapeError, StrataError

Floats = NDArray[np.float32]
F32 = np.float32

GROUP_TOKENS = 512  # of a vocabulary, whose largest stands for all when the best are looked for
PART_TOKENS = 4096  # the vocabulary is summed in parts of this many tokens, then part by part


def log_softmax_row(logits: Floats) -> Floats:
    """Log-probabilities of every token of the vocabulary, [V] -> [V].

    Raises:
        StrataError: a value is not finite.
    """
    require_finite(logits)
    out = np.empty(logits.size, F32)
    _log_softmax(np.ascontiguousarray(logits), out)
    return out


def top_k(values: Floats, k: int) -> NDArray[np.int64]:
    """Ids of the k largest values, best first, equal ones by lower id.

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
    candidates = _candidates(values, k)
    order = np.argsort(-values[candidates], kind="stable")
    return candidates[order[:k]]


def _candidates(values: Floats, k: int) -> NDArray[np.int64]:
    """Ids of at least the k largest values and all that equal the last of them, ascending.

    Where k is small, few more: those that reach the k-th largest of the largest of each group, most
    groups of which have none. Looking for the k-th largest of all takes longer.
    """
    num_groups = values.size // GROUP_TOKENS
    if k > num_groups:
        return np.flatnonzero(values >= np.partition(values, values.size - k)[values.size - k])
    grouped = num_groups * GROUP_TOKENS
    table = values[:grouped].reshape(GROUP_TOKENS, num_groups)  # a group is a column
    largest = table.max(axis=0)
    bound = np.partition(largest, num_groups - k)[num_groups - k]
    groups = np.flatnonzero(largest >= bound)
    rows, columns = np.nonzero(table[:, groups] >= bound)
    behind = grouped + np.flatnonzero(values[grouped:] >= bound)
    return np.concatenate((rows * num_groups + groups[columns], behind))


def argmax(values: Floats) -> int:
    """Id of the largest value, the lowest among equal ones.

    Raises:
        StrataError: a value is not finite.
    """
    require_finite(values)
    return int(np.argmax(values))


def require_finite(values: Floats) -> None:
    """Check logits or log-probabilities, [V], before anything is reported from them.

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
def _log_softmax(logits: Floats, out: Floats) -> None:
    """out = logits - largest - log(sum of exp(logits - largest))."""
    vocab_size = logits.size
    exps = np.empty(PART_TOKENS, F32)
    compile_small()
    largest = max16(logits, 0, vocab_size)
    total = F32(0.0)
    for first in range(0, vocab_size, PART_TOKENS):
        size = min(PART_TOKENS, vocab_size - first)
        exp_row(exps, 0, logits, first, largest, size)
        total += sum16(exps, 0, size)
    subtract_twice(out, 0, logits, 0, largest, log32(total), vocab_size)


def log_softmax_reference(logits: Floats) -> Floats:
    """log_softmax_row in plain numpy."""
    shifted = logits.astype(np.float64) - logits.max()
    out: Floats = (shifted - np.log(np.exp(shifted).sum())).astype(F32)
    return out
