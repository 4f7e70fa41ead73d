"""The device protocols: what prefill, decode and the expert stream may ask of any device.

Two devices implement them: ``host`` (worker threads, numpy memory, numba kernels) and CUDA. Code
above this room never asks which one it has; where it matters it asks ``device.has_async_copy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from strata_cli.errors import DeviceError, ShapeError


class Home(Enum):
    """Where a buffer's bytes live."""

    DEVICE = "device"  # the device's own memory; the host must copy to look at it
    PINNED = "pinned"  # page-locked host memory that the device can copy from and to directly
    PAGEABLE = "pageable"  # ordinary host memory, for example a memory-mapped file


class MemoryInfo(NamedTuple):
    """Device memory in bytes."""

    free_bytes: int
    total_bytes: int


class Buffer(Protocol):
    """A block of memory with one owner. Closing twice is safe; using it afterwards is an error."""

    @property
    def home(self) -> Home: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int:
        """Address that kernels of this device use for byte 0."""
        ...

    @property
    def host_bytes(self) -> NDArray[np.uint8] | None:
        """The bytes as a host array, or None for device memory (copy it to look at it)."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Tensor:
    """A typed, C-contiguous window into a buffer. Owns nothing.

    Attributes:
        buffer: the memory it looks into.
        offset_bytes: first byte of the window.
        shape: extents, outermost first.
        dtype: element type.
    """

    buffer: Buffer
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def over(
        cls, buffer: Buffer, shape: tuple[int, ...], dtype: DTypeLike, offset_bytes: int = 0
    ) -> Tensor:
        """Window of the given shape starting at offset_bytes.

        Raises:
            ShapeError: the window does not lie inside the buffer.
        """
        tensor = cls(buffer, offset_bytes, tuple(map(int, shape)), np.dtype(dtype))
        if offset_bytes < 0 or offset_bytes + tensor.nbytes > buffer.nbytes:
            raise ShapeError(
                f"window of {tensor.nbytes} bytes at {offset_bytes} does not fit a buffer "
                f"of {buffer.nbytes} bytes"
            )
        return tensor

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        return self.buffer.address + self.offset_bytes

    def reshape(self, *shape: int) -> Tensor:
        """The same elements with other extents (no -1)."""
        if math.prod(shape) != self.size:
            raise ShapeError(f"cannot view {self.shape} as {shape}")
        return Tensor(self.buffer, self.offset_bytes, shape, self.dtype)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop of the outermost axis."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise ShapeError(f"rows {start}..{stop} of a tensor with {self.shape[0]} rows")
        rest = self.shape[1:]
        first = self.offset_bytes + start * self.dtype.itemsize * math.prod(rest)
        return Tensor(self.buffer, first, (stop - start, *rest), self.dtype)

    def numpy(self) -> NDArray[Any]:
        """Zero-copy host array of a pinned or pageable tensor.

        Raises:
            DeviceError: the bytes live in device memory.
        """
        data = self.buffer.host_bytes
        if data is None:
            raise DeviceError("device memory has no host view; copy it to a pinned buffer first")
        window = data[self.offset_bytes : self.offset_bytes + self.nbytes]
        return window.view(self.dtype).reshape(self.shape)


KernelArgument: TypeAlias = Tensor | int | float


class HostFunction(Protocol):
    """A kernel's body on the host device.

    Computes the independent items ``begin <= i < end``. Tensors arrive as numpy arrays. Calls for
    disjoint ranges may run at the same time on several threads, so an item may only write what
    belongs to it, and its result may not depend on how the range was cut. Should release the GIL.
    """

    def __call__(self, begin: int, end: int, /, *args: Any) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """One kernel: the same operation for every device, and its plain numpy statement.

    A launch passes the CUDA function its arguments in order: a pointer for each Tensor, a
    ``long long`` for each int, a ``float`` for each float; then the launch's extents.

    Attributes:
        name: unique; for messages, and the CUDA function where ``function`` is empty.
        host: body on the host device.
        reference: the operation in plain numpy; tests compare every device against it.
        source: file name, inside the kernels room, that holds the CUDA function; "" if none yet.
        function: the CUDA function (extern "C"), or a template instance: "matmul<Q4_K, 2>".
        defines: macros that the source is compiled with, "NAME" or "NAME=VALUE".
        bind: makes what the host body takes, such as addresses, out of the launch's arguments; once
            for each launch or recording, however often and in how many pieces it then runs. The
            arguments' arrays live as long. None where the body takes the arguments themselves.
        keeps_cache: whether memory near the processors serves it better as a cache than as room
            for several blocks that share some of it.
    """

    name: str
    host: HostFunction
    reference: Callable[..., Any]
    source: str = ""
    function: str = ""
    defines: tuple[str, ...] = ()
    bind: Callable[..., tuple[Any, ...]] | None = None
    keeps_cache: bool = False


class Launch(NamedTuple):
    """How one call of a kernel is cut into pieces. A tuple: a pass makes hundreds.

    Attributes:
        items: independent items on the host device; 0 on any device: nothing is done.
        grain: smallest number of items worth a thread of its own on the host device: about 50 us
            of work, since waking a thread costs 30 us.
        grid: thread blocks on a GPU; none: nothing is done there.
        block: threads per block on a GPU.
        shared_bytes: dynamic shared memory on a GPU.
        extents: sizes that a CUDA function, which gets bare pointers, takes after the arguments,
            each a ``long long``. The host's arrays carry theirs.
        early: on a GPU that can, the function starts before the launch ahead of it is done. It must
            itself wait for that (``griddepcontrol.wait``) before it reads or writes anything that
            other launches write or read.
    """

    items: int
    grain: int = 1
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    extents: tuple[int, ...] = ()
    early: bool = False


class Call(NamedTuple):
    """One launch that was made; values are its arguments, of each tensor its address."""

    kernel: Kernel
    launch: Launch
    values: tuple[int | float, ...]


class Pattern(Protocol):
    """Launches that were packed once, to be repeated with other tensors: Stream.pattern()."""

    @property
    def num_launches(self) -> int: ...


class Event(Protocol):
    """A point in a stream's work. May be recorded again; the latest record counts."""

    def query(self) -> bool:
        """True when the recorded work is done; raises the stream's error if it failed.

        An event never recorded counts as done.
        """
        ...

    def synchronize(self) -> None:
        """Blocks until the recorded work is done; raises the stream's error if it failed."""
        ...

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds between two completed events made with timing.

        Raises:
            DeviceError: either was made without timing or is not complete.
        """
        ...

    def close(self) -> None: ...


class Graph(Protocol):
    """Recorded launches and copies, replayed with one call. Addresses are fixed when recorded."""

    def close(self) -> None: ...


class Stream(Protocol):
    """Work that runs in order, behind the caller's back.

    Each stream has one owning thread that enqueues. A failed operation is sticky: later work of the
    stream is dropped, and synchronize() or an event's synchronize() raises it.
    """

    @property
    def name(self) -> str: ...
    @property
    def shared_bytes(self) -> int:
        """Most dynamic shared memory of a thread block; 0 on a device without thread blocks."""
        ...

    @property
    def num_multiprocessors(self) -> int:
        """How many the GPU has; 0 on a device without thread blocks."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, (major, minor); (0, 0) on a device without thread blocks."""
        ...

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None: ...
    def pattern(self, calls: Sequence[Call], addresses: NDArray[np.int64], /) -> Pattern | None:
        """What repeat() needs to make calls that were made once again, and sooner.

        Args:
            calls: in order, made on this stream.
            addresses: [n], where tensors begin that a repetition may replace; 0: none. A tensor of
                the calls that begins at none of them stays the same.

        Returns:
            None where a repetition would not be any sooner.
        """
        ...

    def repeat(self, pattern: Pattern, addresses: NDArray[np.int64], /) -> None:
        """Makes the calls of a pattern of this stream.

        Args:
            pattern: holds on to no memory: all of its tensors must still be there.
            addresses: [n], where those begin that take the places of the ones it was made with.
        """
        ...

    def copy(self, dst: Tensor, src: Tensor) -> None:
        """Enqueues a copy of src's bytes over dst, in any direction between homes.

        Pageable sources are read when the copy runs: keep them unchanged until then. A copy from
        or to pageable memory may make the caller wait for the stream's earlier work.

        Raises:
            ShapeError: the byte counts differ.
        """
        ...

    def copy_many(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Enqueues the copies (dst, src) together, in no order among themselves.

        Cheaper than one by one. They must not overlap.

        Raises:
            ShapeError: the byte counts of a pair differ.
        """
        ...

    def copy_rows(
        self, dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
    ) -> int:
        """Enqueues the copies of some rows together, in no order among themselves.

        Cheaper than copy_many(). Neighbours in both matrices go as one, where no gap is between.

        Args:
            dst: uint8 [R, W].
            dst_rows: where each row goes, to its first bytes; all different.
            src: uint8 [S, w], w <= W.
            src_rows: what goes there.

        Returns:
            in how many pieces.

        Raises:
            ShapeError: a row of src does not fit one of dst, a matrix has no such row, or there
                are not as many of one as of the other.
        """
        ...

    def fill(self, dst: Tensor, byte: int) -> None: ...
    def call(self, function: Callable[[], None]) -> None:
        """Enqueues a host function; it must not call the device.

        It runs when the stream's earlier work is done, and later work waits for it. Host functions
        of different streams may run one after the other, in any order, from a single thread (a
        GPU's driver does so): one must not wait for another stream, nor take long.
        """
        ...

    def record(self, event: Event) -> None: ...
    def wait(self, event: Event) -> None:
        """Later work of this stream waits for the event's latest record (not the caller)."""
        ...

    def synchronize(self) -> None: ...
    def fork(self, side: Stream) -> None:
        """Later work of side waits for what is enqueued here so far, and may run beside the rest.

        In a capture of this stream side's work is recorded too, until join(), which must come
        before the capture ends. May be called again before that: side then waits for more.
        """
        ...

    def join(self, side: Stream) -> None:
        """Later work of this stream waits for what is enqueued on side so far."""
        ...

    def capture(self) -> AbstractContextManager[Graph]:
        """Inside the block, this stream's launches, copies, fills and calls are recorded, not run.

        Raises:
            DeviceError: anything else is asked of the stream inside the block.
        """
        ...

    def replay(self, graph: Graph) -> None: ...
    def close(self) -> None:
        """Ends the stream. Work that has not begun may be dropped: synchronize first if it matters.

        Events recorded behind dropped work raise when asked.
        """
        ...


class Device(Protocol):
    """A place that holds memory and runs kernels. Closing frees what is still open."""

    @property
    def name(self) -> str: ...
    @property
    def has_async_copy(self) -> bool:
        """True when copies run beside kernels on a link of their own."""
        ...

    @property
    def has_own_memory(self) -> bool:
        """True when kernels read host memory slower than the device's, so that weights move."""
        ...

    def memory(self) -> MemoryInfo: ...
    def allocate(self, nbytes: int) -> Buffer:
        """Device memory, contents undefined.

        Raises:
            OutOfMemory: with need, free and total bytes.
        """
        ...

    def allocate_pinned(self, nbytes: int) -> Buffer:
        """Page-locked host memory, contents undefined.

        Raises:
            OutOfMemory: with need and the limit that was hit.
        """
        ...

    def wrap(self, data: NDArray[np.uint8]) -> Buffer:
        """Pageable host bytes (for example a memory map) as a buffer, without copying."""
        ...

    def resident(self, data: NDArray[np.uint8]) -> Buffer:
        """The bytes, read-only, where kernels read them at full speed.

        A copy in device memory, or, where kernels read host memory just as well, the bytes
        themselves.
        """
        ...

    def prepare(
        self, kernels: Iterable[Kernel], compiling: Callable[[int], None] | None = None
    ) -> None:
        """Compiles and loads kernels ahead of their first launch, several at once.

        Args:
            kernels: what will be launched.
            compiling: called first with the number of sources to compile, if there are any: those
                that an earlier run did not leave in the cache.
        """
        ...

    def stream(self, name: str) -> Stream: ...
    def event(self, *, timing: bool = False) -> Event: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


def empty(device: Device, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Tensor:
    """A tensor over a device buffer of its own, contents undefined."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    return Tensor.over(device.allocate(max(nbytes, 1)), shape, dtype)
