"""Kernels for the contract tests, each with a host body, a reference and a CUDA function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Kernel, Launch, Stream, Tensor, empty

SOURCE = str(Path(__file__).with_name("kernels.cu"))


def _add_host(begin: int, end: int, x: Any, y: Any, out: Any, n: int) -> None:
    np.add(x[begin:end], y[begin:end], out=out[begin:end])


def _add_reference(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float32]:
    return x + y


def _scaled_host(begin: int, end: int, alpha: float, x: Any, y: Any, out: Any, n: int) -> None:
    out[begin:end] = np.float32(alpha) * x[begin:end] + y[begin:end]


def _scaled_reference(
    alpha: float, x: NDArray[np.float32], y: NDArray[np.float32]
) -> NDArray[np.float32]:
    return np.float32(alpha) * x + y


def _affine_host(begin: int, end: int, x: Any, factor: int, term: int, n: int) -> None:
    x[begin:end] *= factor
    x[begin:end] += term


def _affine_reference(x: NDArray[np.int64], factor: int, term: int) -> NDArray[np.int64]:
    return x * factor + term


ADD = Kernel("add", _add_host, _add_reference, SOURCE)
SCALED_ADD = Kernel("scaled_add", _scaled_host, _scaled_reference, SOURCE)
AFFINE = Kernel("affine", _affine_host, _affine_reference, SOURCE)


def one_thread_each(items: int, grain: int = 1) -> Launch:
    return Launch(items=items, grain=grain, grid=(-(-items // 128), 1, 1), block=(128, 1, 1))


def add(stream: Stream, x: Tensor, y: Tensor, out: Tensor) -> None:
    stream.launch(ADD, one_thread_each(out.size), x, y, out, out.size)


def affine(stream: Stream, x: Tensor, factor: int, term: int) -> None:
    """x = x * factor + term: two such calls give another result in the other order."""
    stream.launch(AFFINE, one_thread_each(x.size), x, factor, term, x.size)


def touch_all(device: Device, stream: Stream) -> None:
    """Launch every kernel above on one item."""
    x, y = empty(device, (1,)), empty(device, (1,), np.int64)
    stream.fill(x, 0)
    stream.fill(y, 0)
    add(stream, x, x, x)
    stream.launch(SCALED_ADD, one_thread_each(1), 1.0, x, x, x, 1)
    affine(stream, y, 1, 0)
