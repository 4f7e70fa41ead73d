"""Launches of a CUDA stream whose arguments are packed already: some addresses change, no more."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Pattern
from strata_cli.engine.device.cuda_kernels import CELL_BYTES, Arguments
from strata_cli.errors import DeviceError


class Packed(NamedTuple):
    """What the driver's cuLaunchKernelEx takes.

    Attributes:
        config: CUlaunchConfig.
        function: CUfunction.
        parameters: address of the addresses of its parameters.
    """

    config: Any
    function: Any
    parameters: int


class Unpacked(NamedTuple):
    """What was launched before, and is to be packed.

    Attributes:
        config: CUlaunchConfig.
        arguments: of the kernel on the stream.
        values: that were launched, extents included.
    """

    config: Any
    arguments: Arguments
    values: tuple[int | float, ...]


class CudaPattern:
    """Packed launches, in order. All parameters lie in one array of cells.

    The driver reads it during the calls, so the stream's one thread uses it again and again.

    Args:
        launches: at least one.
        alone: the first one's config where it must wait for all that is ahead of it.
        addresses: see Stream.pattern().

    Attributes:
        packed: the launches.
        packed_alone: the same, where the first one must wait.
    """

    def __init__(
        self, launches: Sequence[Unpacked], alone: Any, addresses: NDArray[np.int64]
    ) -> None:
        place_of = {address: place for place, address in enumerate(addresses.tolist()) if address}
        cells: list[int] = []
        firsts: list[int] = []
        moved: list[tuple[int, int]] = []
        for launch in launches:
            firsts.append(len(cells))
            for kind, value in zip(launch.arguments.kinds, launch.values, strict=True):
                if kind == "Q" and value in place_of:
                    moved.append((len(cells), place_of[int(value)]))
                cells.append(_float_bits(value) if kind == "f" else int(value))
        self._cells = np.array([*cells, 0], np.int64)  # never without any
        self._moved_cells, self._places = np.array(moved, np.intp).reshape(-1, 2).T.copy()
        self._num_addresses = addresses.size
        offsets = CELL_BYTES * np.arange(self._cells.size, dtype=np.int64)
        self._pointers = self._cells.ctypes.data + offsets
        start = self._pointers.ctypes.data
        self.packed = [
            Packed(launch.config, launch.arguments.function.handle, start + CELL_BYTES * first)
            for launch, first in zip(launches, firsts, strict=True)
        ]
        self.packed_alone = [self.packed[0]._replace(config=alone), *self.packed[1:]]

    @property
    def num_launches(self) -> int:
        return len(self.packed)

    def move(self, addresses: NDArray[np.int64]) -> None:
        """For the launches that follow: let the tensors that may be replaced begin elsewhere.

        Raises:
            DeviceError: they are not as many as the pattern was made with.
        """
        if addresses.size != self._num_addresses:
            raise DeviceError(
                f"a pattern of launches with {self._num_addresses} addresses, got {addresses.size}"
            )
        self._cells[self._moved_cells] = addresses[self._places]


def _float_bits(value: float) -> int:
    """A parameter of four bytes, and four that nobody reads."""
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def cuda_pattern(pattern: Pattern) -> CudaPattern:
    """The pattern as this device's own.

    Raises:
        DeviceError: it belongs to another device.
    """
    if not isinstance(pattern, CudaPattern):
        raise DeviceError(f"a CUDA stream needs a CUDA pattern, got {type(pattern).__name__}")
    return pattern
