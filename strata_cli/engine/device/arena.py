"""Many read-only tensors in one block of memory: places first, contents later, all at once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from strata_cli.engine.device.base import Buffer, Device, Tensor
from strata_cli.errors import DeviceError, ShapeError

ALIGNMENT_BYTES = 256
TAIL_BYTES = 256  # kernels load whole words, also where the last one reaches past a tensor

Contents: TypeAlias = Callable[[], NDArray[Any]]


class Store(Protocol):
    """Where read-only tensors get their places."""

    @property
    def buffers(self) -> list[Buffer]:
        """Memory to close when the tensors are no longer needed."""
        ...

    def add(self, shape: tuple[int, ...], dtype: DTypeLike, contents: Contents) -> Tensor:
        """A place for a tensor.

        Args:
            shape: extents.
            dtype: element type.
            contents: gives the elements, in any shape; called when they are needed, if at all.
        """
        ...


class InPlace:
    """Tensors where their arrays are: for a device whose kernels read host memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.buffers: list[Buffer] = []

    def add(self, shape: tuple[int, ...], dtype: DTypeLike, contents: Contents) -> Tensor:
        buffer = self._device.resident(_flat_bytes(contents()))
        self.buffers.append(buffer)
        return Tensor.over(buffer, shape, dtype)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor's bytes in an arena, from start."""

    start: int
    nbytes: int
    contents: Contents


class Arena:
    """Tensors side by side in one buffer, each at an aligned place; filled afterwards.

    Attributes:
        buffer: the memory; the arena does not own it.
        buffers: the same, as a Store.
        used_bytes: up to the end of the last tensor, and what kernels may read behind it.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.buffers = [buffer]
        self.used_bytes = 0
        self._end = 0
        self._parts: list[_Part] = []

    def add(self, shape: tuple[int, ...], dtype: DTypeLike, contents: Contents) -> Tensor:
        tensor = Tensor.over(self.buffer, shape, dtype, self._end)
        if tensor.nbytes:
            self._parts.append(_Part(self._end, tensor.nbytes, contents))
        end = self._end + tensor.nbytes
        self.used_bytes = end + TAIL_BYTES
        self._end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tensor

    def contents(self) -> ArenaContents:
        """What belongs into the buffer.

        Raises:
            ShapeError: a tensor's contents have not as many bytes as its place.
        """
        sources = []
        for part in self._parts:
            source = _flat_bytes(part.contents())
            if source.size != part.nbytes:
                raise ShapeError(f"{source.size} bytes for a place of {part.nbytes} bytes")
            sources.append(source)
        return ArenaContents([part.start for part in self._parts], sources)


class ArenaContents:
    """The bytes of an arena, to be copied piece by piece, by any number of threads at once."""

    def __init__(self, starts: list[int], sources: list[NDArray[np.uint8]]) -> None:
        self._starts = starts
        self._sources = sources

    def copy_to(
        self,
        out: NDArray[np.uint8],
        start: int,
        before: Callable[[NDArray[np.uint8]], None] = lambda _source: None,
    ) -> None:
        """Copy the arena's bytes from start on over out. Bytes between tensors stay as they are.

        Args:
            out: uint8 [nbytes].
            start: first byte of the arena.
            before: called with every stretch of source bytes that is about to be read.
        """
        stop = start + out.size
        index = max(bisect_right(self._starts, start) - 1, 0)
        for at in range(index, len(self._starts)):
            first = self._starts[at]
            if first >= stop:
                break
            source = self._sources[at]
            begin, end = max(start, first), min(stop, first + source.size)
            if begin < end:
                stretch = source[begin - first : end - first]
                before(stretch)
                np.copyto(out[begin - start : end - start], stretch)


def _flat_bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    if not values.flags.c_contiguous:
        raise DeviceError(f"contents must be contiguous, got {values.dtype} {values.shape}")
    return values.reshape(-1).view(np.uint8)
