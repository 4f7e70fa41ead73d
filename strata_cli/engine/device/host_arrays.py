"""What the host device makes of tensors: arrays over their bytes, for kernels and copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Kernel, KernelArgument, Tensor
from strata_cli.engine.device.host_memory import HostBuffer
from strata_cli.errors import DeviceError, ShapeError


def resolve(argument: KernelArgument) -> Any:
    """A kernel argument as the host function gets it: tensors become arrays over their bytes."""
    if not isinstance(argument, Tensor):
        return argument
    memory = _memory_of(argument)
    return np.ndarray(argument.shape, argument.dtype, memory, argument.offset_bytes)


def _memory_of(tensor: Tensor) -> NDArray[np.uint8]:
    buffer = tensor.buffer
    if not isinstance(buffer, HostBuffer):
        raise DeviceError(f"a host stream needs a host buffer, got {type(buffer).__name__}")
    return buffer.memory()


class BodyArguments(NamedTuple):
    """What a kernel's host body is called with, and the arrays that it may reach by address."""

    values: tuple[Any, ...]
    arrays: tuple[Any, ...]


def body_arguments(kernel: Kernel, args: Sequence[KernelArgument]) -> BodyArguments:
    """The arguments of a launch as the kernel's host body takes them."""
    arrays = tuple([resolve(argument) for argument in args])
    return BodyArguments(arrays if kernel.bind is None else kernel.bind(*arrays), arrays)


def flat(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes."""
    return np.ndarray((tensor.nbytes,), np.uint8, _memory_of(tensor), tensor.offset_bytes)


def writable(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes, to be written to.

    Raises:
        DeviceError: they are read-only.
    """
    view = flat(tensor)
    if not view.flags.writeable:
        raise DeviceError(f"cannot write {tensor.nbytes} bytes into a read-only buffer")
    return view


class CopyViews(NamedTuple):
    """Bytes to write, and as many to read."""

    dst: NDArray[np.uint8]
    src: NDArray[np.uint8]


def copy_views(dst: Tensor, src: Tensor) -> CopyViews:
    """The bytes of a copy.

    Raises:
        ShapeError: of unequal numbers.
        DeviceError: the destination is read-only.
    """
    to, source = writable(dst), flat(src)
    if to.size != source.size:
        raise ShapeError(f"copy of {source.size} bytes into {to.size} bytes")
    return CopyViews(to, source)


def copy_all(copies: list[CopyViews]) -> None:
    """Copy, one after the other."""
    for dst, src in copies:
        np.copyto(dst, src)
