"""Small, blocking transfers between host arrays and device tensors (state, results, parameters)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Stream, Tensor


def host_tensor(device: Device, values: NDArray[Any]) -> Tensor:
    """A contiguous host array as a pageable tensor, without copying."""
    buffer = device.wrap(values.reshape(-1).view(np.uint8))
    return Tensor.over(buffer, values.shape, values.dtype)


def upload(device: Device, stream: Stream, dst: Tensor, values: NDArray[Any]) -> None:
    """Copy a host array over a device tensor. Waits for the stream."""
    if dst.nbytes:
        stream.copy(dst, host_tensor(device, np.ascontiguousarray(values, dtype=dst.dtype)))
        stream.synchronize()


def download(device: Device, stream: Stream, src: Tensor) -> NDArray[Any]:
    """A host copy of a device tensor. Waits for the stream."""
    values = np.empty(src.shape, dtype=src.dtype)
    if src.nbytes:
        stream.copy(host_tensor(device, values), src)
        stream.synchronize()
    return values
