"""A device that only takes notes: what would be allocated, and which kernels would be launched.

Whatever sizes itself by what a model needs runs the real code on paper first, so the two cannot
disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import (
    Call,
    Event,
    Graph,
    Home,
    Kernel,
    KernelArgument,
    Launch,
    MemoryInfo,
    Pattern,
    Stream,
    Tensor,
)
from strata_cli.engine.device.row_copies import row_runs

GRANULE_BYTES = 512  # what a GPU's memory is handed out in
_SPACING = 1 << 40  # between buffers, so that every window of one is aligned as on a real device


class DeviceFacts(Protocol):
    """What a paper device tells of the one that it stands in for; see Device."""

    @property
    def name(self) -> str: ...
    @property
    def has_async_copy(self) -> bool: ...
    def memory(self) -> MemoryInfo: ...


class StreamFacts(Protocol):
    """What a paper stream tells of the one that it stands in for; see Stream."""

    @property
    def shared_bytes(self) -> int: ...
    @property
    def num_multiprocessors(self) -> int: ...
    @property
    def capability(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedGpu:
    """A GPU that is known by description alone, for a paper device and its streams.

    Attributes:
        name: as in cuda:N.
        free_bytes, total_bytes: of its memory; free for this use.
        shared_bytes: most dynamic shared memory of a thread block.
        num_multiprocessors: how many it has.
        capability: compute capability.
    """

    name: str
    free_bytes: int
    total_bytes: int
    shared_bytes: int
    num_multiprocessors: int
    capability: tuple[int, int]

    @property
    def has_async_copy(self) -> bool:
        return True

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self.free_bytes, self.total_bytes)


class PaperBuffer:
    """A size and an address that nothing lies behind."""

    def __init__(self, home: Home, nbytes: int, address: int) -> None:
        self.home = home
        self.nbytes = nbytes
        self.address = address

    @property
    def host_bytes(self) -> NDArray[np.uint8] | None:
        return None

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PaperDevice:
    """Stands in for a device with memory of its own.

    Args:
        device: whose name and memory it tells.
        stream: of that device; kernels are chosen as they would be there.

    Attributes:
        device_bytes: allocated so far; what is closed still counts.
        pinned_bytes: the same of page-locked host memory.
        kernels: launched so far, each once, in order.
    """

    def __init__(self, device: DeviceFacts, stream: StreamFacts) -> None:
        self._device = device
        self._stream = stream
        self._next_address = _SPACING
        self.device_bytes = 0
        self.pinned_bytes = 0
        self.kernels: dict[Kernel, None] = {}

    @property
    def name(self) -> str:
        return self._device.name

    @property
    def has_async_copy(self) -> bool:
        return self._device.has_async_copy

    @property
    def has_own_memory(self) -> bool:
        return True

    def memory(self) -> MemoryInfo:
        return self._device.memory()

    def allocate(self, nbytes: int) -> PaperBuffer:
        self.device_bytes += -(-max(nbytes, 1) // GRANULE_BYTES) * GRANULE_BYTES
        return self.uncounted(Home.DEVICE)

    def allocate_pinned(self, nbytes: int) -> PaperBuffer:
        self.pinned_bytes += nbytes
        return self.uncounted(Home.PINNED)

    def uncounted(self, home: Home) -> PaperBuffer:
        """A buffer without end, for finding out how much of it will be used."""
        self._next_address += _SPACING
        return PaperBuffer(home, _SPACING, self._next_address)

    def wrap(self, data: NDArray[np.uint8]) -> PaperBuffer:
        return self.uncounted(Home.PAGEABLE)

    def resident(self, data: NDArray[np.uint8]) -> PaperBuffer:
        return self.allocate(data.size)

    def prepare(
        self, kernels: Iterable[Kernel], compiling: Callable[[int], None] | None = None
    ) -> None:
        self.kernels.update(dict.fromkeys(kernels))

    def stream(self, name: str) -> PaperStream:
        return PaperStream(name, self._stream, self.kernels)

    def event(self, *, timing: bool = False) -> PaperEvent:
        return PaperEvent()

    def synchronize(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class PaperEvent:
    """A point that is always reached."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing runs."""

    def elapsed_ms(self, start: Event) -> float:
        return 0.0

    def close(self) -> None:
        """Nothing to give back."""


class PaperGraph:
    """Nothing, recorded."""

    def close(self) -> None:
        """Nothing to give back."""


class PaperStream:
    """Notes the kernels of launches, and does nothing else."""

    def __init__(self, name: str, like: StreamFacts, kernels: dict[Kernel, None]) -> None:
        self._name = name
        self._like = like
        self._kernels = kernels

    @property
    def name(self) -> str:
        return self._name

    @property
    def shared_bytes(self) -> int:
        return self._like.shared_bytes

    @property
    def num_multiprocessors(self) -> int:
        return self._like.num_multiprocessors

    @property
    def capability(self) -> tuple[int, int]:
        return self._like.capability

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        if launch.items:
            self._kernels[kernel] = None

    def pattern(self, calls: Sequence[Call], addresses: NDArray[np.int64], /) -> Pattern | None:
        """None: every launch is to be noted."""
        return None

    def repeat(self, pattern: Pattern, addresses: NDArray[np.int64], /) -> None:
        """There is nothing to repeat."""

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Nothing is there to copy."""

    def copy_many(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Nothing is there to copy."""

    def copy_rows(
        self, dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
    ) -> int:
        """Nothing is there to copy."""
        return len(row_runs(dst, dst_rows, src, src_rows).rows)

    def fill(self, dst: Tensor, byte: int) -> None:
        """Nothing is there to fill."""

    def call(self, function: Callable[[], None]) -> None:
        """Does not call it."""

    def record(self, event: Event) -> None:
        """Every point is reached."""

    def wait(self, event: Event) -> None:
        """Every point is reached."""

    def synchronize(self) -> None:
        """Nothing runs."""

    def fork(self, side: Stream) -> None:
        """Every point is reached."""

    def join(self, side: Stream) -> None:
        """Every point is reached."""

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        yield PaperGraph()

    def replay(self, graph: Graph) -> None:
        """Its kernels were noted when it was captured."""

    def close(self) -> None:
        """Nothing to give back."""
