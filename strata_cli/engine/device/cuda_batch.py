"""Many copies in one call of the driver, by their addresses alone.

The bindings make an object of every address, and hold Python's lock for it: with hundreds of copies
in each layer, that is what issuing them costs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

BatchCopy: TypeAlias = Callable[[Sequence[int], Sequence[int], Sequence[int], int], int]
"""Copies from, to, of so many bytes, in a stream; gives the CUresult."""

_ATTRIBUTES = (ctypes.c_int * 6)(1)  # CUmemcpyAttributes: sources are read in stream order
_FIRST = (ctypes.c_size_t * 1)(0)  # the attributes are those of all copies from the first on


def load_batch_copy() -> BatchCopy | None:
    """The driver's cuMemcpyBatchAsync in the form of CUDA 13; None where it has no such."""
    try:
        entry = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync_v2
    except (OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    entry.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]

    def copy(dsts: Sequence[int], srcs: Sequence[int], sizes: Sequence[int], stream: int) -> int:
        count = len(sizes)
        array = size * count
        status: int = entry(
            array(*dsts), array(*srcs), array(*sizes), count, _ATTRIBUTES, _FIRST, 1, stream
        )
        return status

    return copy
