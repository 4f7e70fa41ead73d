"""Experts computed by the host's processor, from where they lie in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Event, Tensor, empty
from strata_cli.engine.device.host import HostDevice, usable_threads
from strata_cli.engine.experts.blobs import BlobLayout
from strata_cli.engine.experts.cpu_share import MOST_PAIRS
from strata_cli.engine.kernels.grouped_matmul import grouped_matmul
from strata_cli.engine.kernels.matmul_several import Experts, grouped_matmul_pair
from strata_cli.engine.kernels.moe import swiglu
from strata_cli.engine.kernels.weight import WeightLayout

SPARE_THREADS = 2  # for the threads that enqueue and that issue copies
FLOAT_BYTES = 4


class HostTask(NamedTuple):
    """Experts of one layer and their pairs.

    Attributes:
        layer: of the model.
        experts: ids, [n]; all are in the arena.
        ranks: of them, ascending, [n].
        starts: of each expert's pairs among all of the layer, [n].
        counts: of them, at least 1, [n]; MOST_PAIRS in all at most.
    """

    layer: int
    experts: NDArray[np.int64]
    ranks: NDArray[np.int64]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]

    @property
    def num_pairs(self) -> int:
        """Of all the experts."""
        return int(self.counts.sum())


class HostPool:
    """Threads that compute experts by the host's kernels. Used from one thread; a context manager.

    One task at a time: start(), then the event, then the outputs.

    Args:
        device: allocates memory that its copies reach.
        layouts: of each layer's blobs.
        blobs: per layer, those in the arena, uint8 [n, blob_bytes].
        num_threads: 0: all processors but those that the copies need.

    Attributes:
        done: behind the last task.
        out: outputs of its pairs, one expert's behind the other's, float32 [MOST_PAIRS, D], pinned.

    Raises:
        OutOfMemory: there is no room for the outputs.
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[BlobLayout],
        blobs: Sequence[Tensor],
        num_threads: int = 0,
    ) -> None:
        self._device = device
        self._layouts = layouts
        self._blob_bytes = [tensor.shape[1] for tensor in blobs]
        # The pages stay where they are; these arrays also keep them mapped.
        self._blobs = [tensor.numpy() for tensor in blobs]
        width = layouts[0].gate.cols
        with ExitStack() as resources:
            threads = num_threads or max(usable_threads() - SPARE_THREADS, 1)
            self._host = resources.enter_context(HostDevice(threads))
            self._stream = self._host.stream("host experts")
            self._begun: Event = self._host.event(timing=True)
            self.done: Event = self._host.event(timing=True)
            most_rows = max(layout.gate.rows for layout in layouts)
            self._gate = empty(self._host, (MOST_PAIRS * most_rows,))
            self._up = empty(self._host, (MOST_PAIRS * most_rows,))
            room = resources.enter_context(device.allocate_pinned(MOST_PAIRS * width * FLOAT_BYTES))
            self.out = Tensor.over(room, (MOST_PAIRS, width), np.float32)
            self._resources = resources.pop_all()
        self._inputs: Buffer | None = None
        self._num_inputs = (0, 0)

    def warm_up(self) -> None:
        """Compile the kernels, or bring them from the cache: a first task must not pay for it."""
        compiled: set[tuple[WeightLayout, ...]] = set()
        for layer, layout in enumerate(self._layouts):
            matrices = (layout.gate, layout.up, layout.down)
            if matrices in compiled or not self._blobs[layer].size:
                continue
            compiled.add(matrices)
            for room in self.inputs(1, 1):
                room.numpy().fill(0)
            one, first = np.ones(1, np.int32), np.zeros(1, np.int64)
            self.start(HostTask(layer, first, first, np.zeros(1, np.int32), one))
            self.wait()

    @property
    def took_us(self) -> float:
        """How long the last task took, once it is done, in microseconds."""
        return self.done.elapsed_ms(self._begun) * 1e3

    def inputs(self, num_tokens: int, num_pairs: int) -> tuple[Tensor, Tensor]:
        """Pinned rooms for x, float32 [T, D], and row_of, int32 [P], of all pairs of a layer.

        The next task reads what is there. No task may be under way.
        """
        nbytes = (num_tokens * self.out.shape[1] + num_pairs) * FLOAT_BYTES
        if self._inputs is None or self._inputs.nbytes < nbytes:
            if self._inputs is not None:
                self._inputs.close()
            self._inputs = None
            self._inputs = self._device.allocate_pinned(nbytes)
        self._num_inputs = (num_tokens, num_pairs)
        x = Tensor.over(self._inputs, (num_tokens, self.out.shape[1]), np.float32)
        return x, Tensor.over(self._inputs, (num_pairs,), np.int32, x.nbytes)

    def start(self, task: HostTask) -> None:
        """Begin to compute; what inputs() gave is filled. Does not block."""
        assert self._inputs is not None
        layout, stream, num_pairs = self._layouts[task.layer], self._stream, task.num_pairs
        x, row_of = (self._seen(tensor) for tensor in self.inputs(*self._num_inputs))
        places = np.concatenate(
            [np.arange(s, s + n) for s, n in zip(task.starts, task.counts, strict=True)]
        )
        rows = self._wrap(row_of.numpy()[places])
        first_pairs = self._wrap(np.concatenate([[0], np.cumsum(task.counts)]).astype(np.int32))
        blobs = self._blobs[task.layer]
        address: int = blobs.__array_interface__["data"][0]
        table = self._wrap(address + task.experts * self._blob_bytes[task.layer])
        gate, up = (
            room.rows(0, num_pairs * layout.gate.rows).reshape(num_pairs, layout.gate.rows)
            for room in (self._gate, self._up)
        )
        out = self._seen(self.out.rows(0, num_pairs))
        stream.record(self._begun)
        both = Experts(table, layout.gate, gate), Experts(table, layout.up, up)
        grouped_matmul_pair(stream, x, *both, rows, first_pairs)
        swiglu(stream, gate, up, gate)
        in_order = self._wrap(np.arange(num_pairs, dtype=np.int32))
        grouped_matmul(stream, gate, table, layout.down, in_order, first_pairs, out)
        stream.record(self.done)

    def wait(self) -> None:
        """Blocks until no task is under way.

        Raises:
            DeviceError: one has failed.
        """
        self._stream.synchronize()

    def close(self) -> None:
        """End the threads and give the memory back. Safe to call twice."""
        self._resources.close()
        if self._inputs is not None:
            self._inputs.close()
            self._inputs = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _seen(self, tensor: Tensor) -> Tensor:
        """Memory of the other device, as the host's kernels take it."""
        return self._wrap(tensor.numpy())

    def _wrap(self, values: NDArray[np.generic]) -> Tensor:
        data = values.reshape(-1).view(np.uint8)
        return Tensor.over(self._host.wrap(data), values.shape, values.dtype)
