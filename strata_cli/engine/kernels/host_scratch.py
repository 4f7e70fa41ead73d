"""Memory of the threads that compute missed experts: where experts are, and what threads share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.host_products import Digits, new_digits
from strata_cli.engine.kernels.mailbox import LINE

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]

LINE_BYTES = 64  # of the cache: counters in lines of their own do not disturb each other
STAGE_BYTES = 2 * LINE_BYTES  # pieces taken, and pieces done
COUNTERS = 2 * STAGE_BYTES // 8  # of a layer, in two stages
LONGS_OF_LINE = LINE_BYTES // 8


class HostLayers(NamedTuple):
    """Where compiled code finds the experts of every layer.

    Attributes:
        blobs: address of each expert's blob in host memory, int64 [L, E]; 0: not there.
        matrices: see matrix_fields(), int64 [L, 3, FIELDS]: gate, up, down.
    """

    blobs: Longs
    matrices: Longs


class Scratch(NamedTuple):
    """Memory of a pool beside the mailbox.

    Attributes:
        counters: int64 [L, COUNTERS]; zero before a window.
        gate, up: float32 [P, F].
        times: int64 [2]: nanoseconds and experts of what was computed, added up.
        latest: number of the window that was announced last, int64 [LONGS_OF_LINE], the first.
    """

    counters: Longs
    gate: Floats
    up: Floats
    times: Longs
    latest: Longs


class OwnScratch(NamedTuple):
    """Memory of one thread: the pairs of a layer by expert.

    Attributes:
        start: first pair of each distinct expert, int32 [P + 1].
        blobs: address of each, int64 [P].
        rows: token of each pair, int32 [P].
        numbers: 0, 1, ..., int32 [P].
        place: where each posted pair went, int32 [P].
        back: number of the window that the thread was last done with, int32 [LINE], the first.
        digits: rows that it has made into fixed point.
        rests: 1 where it must be told of windows by Python, int64 [LONGS_OF_LINE], the first.
    """

    start: Ints
    blobs: Longs
    rows: Ints
    numbers: Ints
    place: Ints
    back: Ints
    digits: Digits
    rests: Longs


def new_scratch(num_layers: int, pairs: int, width: int) -> Scratch:
    """For windows of so many pairs, and experts of at most this width."""
    counters = np.zeros((num_layers, COUNTERS), np.int64)
    gate, up = (np.zeros((pairs, width), np.float32) for _ in range(2))
    times, latest = np.zeros(2, np.int64), np.zeros(LONGS_OF_LINE, np.int64)
    return Scratch(counters, gate, up, times, latest)


def own_scratch(pairs: int, matrices: Longs) -> OwnScratch:
    """For windows of so many pairs; matrices are those of HostLayers."""
    return OwnScratch(
        start=np.zeros(pairs + 1, np.int32),
        blobs=np.zeros(pairs, np.int64),
        rows=np.zeros(pairs, np.int32),
        numbers=np.arange(pairs, dtype=np.int32),
        place=np.zeros(pairs, np.int32),
        back=np.zeros(LINE, np.int32),
        digits=new_digits(matrices, pairs),
        rests=np.ones(LONGS_OF_LINE, np.int64),
    )
