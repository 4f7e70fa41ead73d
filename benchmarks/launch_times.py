"""Time of every launch of a pass, by events around it, without the host's own time in between."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import (
    Call,
    Device,
    Event,
    Kernel,
    KernelArgument,
    Launch,
    Stream,
    Tensor,
)
from strata_cli.engine.model.quants import QuantType, row_bytes

GROUP = 64  # launches that are enqueued while the stream stands still, then run back to back
PATIENCE_S = 20.0
SEVERAL = "matmul_several"
SLICES = "matmul_many_slices"
PAIRS = ("grouped_pair", "grouped_swiglu")  # of two matrices of each expert


class Row(NamedTuple):
    """All launches of one kernel in a pass: how many, how long, and the bytes they must move."""

    kernel: str
    launches: int
    us: float
    nbytes: int

    @property
    def gbps(self) -> float:
        return self.nbytes / self.us / 1e3 if self.us else 0.0


class TimedStream:
    """Passes everything on to a stream; times its launches.

    A group of launches is enqueued behind a host function that waits, so that the time between two
    events is a kernel's own (and about a microsecond of the event), not the enqueueing's.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._gate: threading.Event | None = None
        self._in_group = 0
        self._last: Event | None = None
        self._times: list[tuple[str, int, Event, Event]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        if self._gate is None:
            self._open_group()
        assert self._last is not None
        self._stream.launch(kernel, launch, *args)
        event = self._mark()
        self._times.append((label(kernel, args), bytes_moved(kernel, args), self._last, event))
        self._last = event
        self._in_group += 1
        if self._in_group == GROUP:
            self._run_group()

    def pattern(self, _calls: Sequence[Call], _addresses: NDArray[np.int64], /) -> None:
        """None: each launch is to be timed."""

    def rows(self) -> list[Row]:
        """By kernel, the longest first. Waits for the stream."""
        self._run_group()
        self._stream.synchronize()
        launches: dict[str, int] = defaultdict(int)
        us: dict[str, float] = defaultdict(float)
        nbytes: dict[str, int] = defaultdict(int)
        for name, moved, start, stop in self._times:
            launches[name] += 1
            us[name] += stop.elapsed_ms(start) * 1e3
            nbytes[name] += moved
        rows = [Row(name, launches[name], us[name], nbytes[name]) for name in us]
        return sorted(rows, key=lambda row: -row.us)

    def _mark(self) -> Event:
        event = self._device.event(timing=True)
        self._stream.record(event)
        return event

    def _open_group(self) -> None:
        gate = self._gate = threading.Event()

        def stand() -> None:
            gate.wait(PATIENCE_S)

        self._stream.call(stand)
        self._last = self._mark()
        self._in_group = 0

    def _run_group(self) -> None:
        if self._gate is not None:
            self._gate.set()
            self._gate = None


class Product(NamedTuple):
    """What a launch of a product multiplies with: rows of each matrix, and their columns.

    Attributes:
        qtype: None where they are of several types.
    """

    qtype: QuantType | None
    rows: tuple[int, ...]
    cols: int


def product(kernel: Kernel, args: tuple[KernelArgument, ...]) -> Product | None:
    """The matrices of a dense or grouped product; None for other kernels."""
    name = kernel.name.removeprefix("gated_").removeprefix("normed_").partition("<")[0]
    numbers = [a for a in args if isinstance(a, int)]
    if name == SEVERAL:  # x, then weights and outputs in turn
        return Product(
            None, tuple(out.shape[1] for out in operands(kernel, args)[2::2]), numbers[1]
        )
    if name == SLICES:
        kind = kernel.name.partition("<")[2].partition(",")[0]
        return Product(QuantType[kind], (numbers[1],), numbers[2])
    if name.startswith(("matmul", "few")):
        qtype, _, rows, cols = numbers[:4]
        return Product(QuantType(qtype), (rows,) * (2 if name == "matmul_swiglu" else 1), cols)
    if name.startswith("grouped"):
        qtype, rows, cols = numbers[:3]
        return Product(QuantType(qtype), (rows,) * (2 if name in PAIRS else 1), cols)
    return None


def operands(kernel: Kernel, args: tuple[KernelArgument, ...]) -> list[Tensor]:
    """The tensors that a launch uses: where several products were filled up, only their own."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    name, _, parameters = kernel.name.partition("<")
    return tensors[: 1 + 2 * int(parameters.partition(",")[0])] if name == SEVERAL else tensors


def label(kernel: Kernel, args: tuple[KernelArgument, ...]) -> str:
    matrices = product(kernel, args)
    if matrices is None:
        return kernel.name
    return f"{kernel.name} {'+'.join(map(str, matrices.rows))}x{matrices.cols}"


def bytes_moved(kernel: Kernel, args: tuple[KernelArgument, ...]) -> int:
    """Bytes of the tensors, and of the matrices that a grouped product finds by address."""
    tensors = operands(kernel, args)
    nbytes = sum(tensor.nbytes for tensor in tensors)
    matrices = product(kernel, args)
    if matrices is not None and "grouped" in kernel.name and matrices.qtype is not None:
        starts = next(t for t in reversed(tensors) if t.dtype == np.int32)
        used = min(tensors[-1].shape[0], starts.shape[0] - 1)  # the last: a row for each pair
        nbytes += used * sum(matrices.rows) * row_bytes(matrices.qtype, matrices.cols)
    return nbytes
