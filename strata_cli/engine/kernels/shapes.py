"""What kernel wrappers check before they launch, and how finely a launch is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from strata_cli.engine.device.base import Tensor
from strata_cli.errors import ShapeError

# About 15 us of float work. Waking a second thread costs as much, so less stays on one.
ELEMENTS_PER_THREAD = 32_768
_DTYPES: dict[DTypeLike, np.dtype[Any]] = {
    kind: np.dtype(kind)
    for kind in (np.float32, np.float16, np.int32, np.int64, np.uint8, np.uint16)
}


def expect(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: DTypeLike = np.float32
) -> None:
    """Check one argument of a kernel wrapper.

    Raises:
        ShapeError: the tensor has another shape or element type; names both.
    """
    if tensor.shape == shape and tensor.dtype is _DTYPES.get(dtype):
        return  # nearly always: hundreds of launches of a pass check a few tensors each
    wanted = np.dtype(dtype)
    if tensor.shape != shape or tensor.dtype != wanted:
        raise ShapeError(
            f"{name}: expected {wanted.name} {list(shape)}, "
            f"got {tensor.dtype.name} {list(tensor.shape)}"
        )


def expect_rank(name: str, tensor: Tensor, rank: int) -> None:
    """Check that a tensor whose extents define the others has as many as it should.

    Raises:
        ShapeError: it has more or fewer.
    """
    if len(tensor.shape) != rank:
        raise ShapeError(f"{name}: expected {rank} extents, got {list(tensor.shape)}")


def halves_of(name: str, rounded: Tensor | None, like: Tensor) -> Tensor:
    """The bits of rounded, for a launch; those of another tensor, left alone, where it is None.

    Raises:
        ShapeError: rounded is not float16, or not of the other's shape.
    """
    if rounded is not None:
        expect(f"{name} rounded", rounded, like.shape, np.float16)
        like = rounded
    return Tensor(like.buffer, like.offset_bytes, (like.nbytes // 2,), _DTYPES[np.uint16])


def grain(elements_per_item: int) -> int:
    """Items worth a thread of their own on the host device."""
    return max(1, ELEMENTS_PER_THREAD // max(1, elements_per_item))


def blocks(count: int, per_block: int) -> int:
    """Thread blocks of a GPU that cover count pieces of work, per_block in each."""
    return -(-count // per_block)
