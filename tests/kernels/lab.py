"""A bench for kernel wrappers: host arrays in, calls on a device's stream, host arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from strata_cli.engine.device.base import Device, Kernel, KernelArgument, Launch, Stream, Tensor
from strata_cli.engine.device.host_arrays import body_arguments
from strata_cli.engine.device.transfer import download, upload

# How far a device may be from a reference in float64, by the type it computes in.
TOLERANCE = {"float32": (2e-5, 2e-6), "float16": (4e-3, 4e-3)}  # relative, absolute


@dataclass(frozen=True)
class Lab:
    """A device and a stream of it. Tensors start skew_bytes past an aligned address."""

    device: Device
    stream: Stream
    skew_bytes: int = 0

    @property
    def product_type(self) -> str:
        """What the operands of large products are rounded to: GPUs have tensor cores."""
        return "float16" if self.device.has_async_copy else "float32"

    def empty(self, shape: Sequence[int], dtype: DTypeLike = np.float32) -> Tensor:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self.device.allocate(nbytes + self.skew_bytes + 1)
        tensor = Tensor.over(buffer, tuple(shape), dtype, self.skew_bytes)
        self.stream.fill(tensor, 0xA5)
        return tensor

    def put(self, values: NDArray[Any]) -> Tensor:
        tensor = self.empty(values.shape, values.dtype)
        upload(self.device, self.stream, tensor, values)
        return tensor

    def get(self, tensor: Tensor) -> NDArray[Any]:
        return download(self.device, self.stream, tensor)

    def skewed(self, skew_bytes: int) -> Lab:
        """The same device, every tensor that many bytes off."""
        return Lab(self.device, self.stream, skew_bytes)

    def cut(self, points: Sequence[float]) -> Lab:
        """The same host device, every launch cut at these shares of its items, last piece first."""
        return Lab(self.device, cast(Stream, _CutStream(self.stream, tuple(points))))


class _CutStream:
    """A stream whose launches run at once, on the host, in pieces that the test chose."""

    def __init__(self, stream: Stream, points: tuple[float, ...]) -> None:
        self._stream = stream
        self._points = points

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        self._stream.synchronize()
        arguments = body_arguments(kernel, args)
        inner = sorted(int(point * launch.items) for point in self._points)
        edges = [0, *inner, launch.items]
        for begin, end in reversed(list(pairwise(edges))):
            kernel.host(begin, end, *arguments.values)


def normal(seed: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    """Reproducible normal values."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32)


def assert_close(
    actual: NDArray[Any], expected: NDArray[Any], computed_in: str = "float32"
) -> None:
    relative, absolute = TOLERANCE[computed_in]
    np.testing.assert_allclose(actual, expected, rtol=relative, atol=absolute)
