"""FNV-1a, the 64-bit hash that state hashes are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.kernels.jit import nogil_jit
from strata_cli.errors import ShapeError

FNV_OFFSET = 0xCBF29CE484222325
_PRIME = np.uint64(0x100000001B3)


def fnv1a64(data: NDArray[Any], start: int = FNV_OFFSET) -> int:
    """FNV-1a 64 of an array's bytes. Releases the GIL.

    Args:
        data: C-contiguous, of any shape and type.
        start: the hash so far, to continue over several arrays.

    Raises:
        ShapeError: data is not contiguous.

    Source: http://www.isthe.com/chongo/tech/comp/fnv/
    """
    if not data.flags.c_contiguous:
        raise ShapeError(
            f"fnv1a64: {data.dtype} {list(data.shape)} is not contiguous",
            hint="pass numpy.ascontiguousarray(data)",
        )
    return int(_fnv1a64(data.reshape(-1).view(np.uint8), np.uint64(start)))


@nogil_jit
def _fnv1a64(data: NDArray[np.uint8], start: np.uint64) -> np.uint64:
    digest = start
    for byte in data:
        digest = np.uint64((digest ^ np.uint64(byte)) * _PRIME)
    return digest
