"""Streams of a CUDA device."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

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
    Pattern,
    Stream,
    Tensor,
)
from strata_cli.engine.device.cuda_calls import CallInGraph, Failure, host_calls, launch_in_graph
from strata_cli.engine.device.cuda_driver import Context, check, failed
from strata_cli.engine.device.cuda_event import CudaEvent, CudaGraph, cuda_event, is_done
from strata_cli.engine.device.cuda_kernels import Arguments, Loader
from strata_cli.engine.device.cuda_memory import CudaBuffer, spans
from strata_cli.engine.device.cuda_pattern import CudaPattern, Unpacked, cuda_pattern
from strata_cli.engine.device.cuda_waiting import wait_until
from strata_cli.engine.device.row_copies import row_runs
from strata_cli.errors import DeviceError, ShapeError

logger = logging.getLogger(__name__)

EARLY_CAPABILITY = (9, 0)  # from here on a launch may start before the one ahead of it is done
MOST_CONFIGS = 4_096  # shapes of launches that are kept
BATCH_COPY_DRIVER = 13_000  # the form of cuMemcpyBatchAsync that these bindings call


class CudaStream:
    """A CUstream, driven by one owning thread."""

    def __init__(self, name: str, context: Context, loader: Loader) -> None:
        self._name = name
        self._context = context
        self._driver = context.gpu.driver
        self._loader = loader
        self._failure = Failure(name)
        self._arguments: dict[Kernel, Arguments] = {}
        self._configs: dict[tuple[Any, ...], Any] = {}
        self._capturing: CudaGraph | None = None
        self._captures_for: CudaStream | None = None  # another, which was forked into this one
        self._sides: list[CudaStream] = []
        self._is_joined = False
        context.enter()
        flag = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._handle: Any = check("cuStreamCreate()", self._driver.cuStreamCreate(flag))

    @property
    def name(self) -> str:
        return self._name

    @property
    def shared_bytes(self) -> int:
        return self._context.gpu.shared_bytes

    @property
    def num_multiprocessors(self) -> int:
        return self._context.gpu.num_multiprocessors

    @property
    def capability(self) -> tuple[int, int]:
        return self._context.gpu.capability

    @property
    def is_closed(self) -> bool:
        return self._handle is None

    def launch(self, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        stream = self._enter("launch")
        if not (launch.items and all(launch.grid)):
            return
        args += launch.extents
        arguments = self._arguments.get(kernel)
        if arguments is None:
            arguments = Arguments(self._loader.function(kernel), args)
            self._arguments[kernel] = arguments
        function = arguments.function
        if launch.shared_bytes > function.shared_bytes:
            function.allow_shared(launch.shared_bytes)
        arguments.fill(args)
        if self._capturing is not None:
            self._capturing.kept += [a.buffer for a in args if isinstance(a, Tensor)]
        is_early = launch.early and not self._is_joined
        self._is_joined = False
        if is_early and self._context.gpu.capability >= EARLY_CAPABILITY:
            config = self._config(launch, stream, is_early=True)
            status = self._driver.cuLaunchKernelEx(config, function.handle, arguments.address, 0)[0]
        else:
            status = self._driver.cuLaunchKernel(
                function.handle,
                *launch.grid,
                *launch.block,
                launch.shared_bytes,
                stream,
                arguments.address,
                0,
            )[0]
        if status:
            raise failed(
                f"cuLaunchKernel({kernel.name}, grid {launch.grid}, block {launch.block}, "
                f"shared bytes {launch.shared_bytes})",
                status,
            )

    def _config(self, launch: Launch, stream: Any, *, is_early: bool) -> Any:
        """How a function is cut; early: it need not wait for the launch ahead of it.

        The same object for the same shape: the bindings take longer to make one than for the launch
        itself.
        """
        key = (launch.grid, launch.block, launch.shared_bytes, is_early)
        config = self._configs.get(key)
        if config is None:
            if len(self._configs) >= MOST_CONFIGS:
                self._configs.clear()
            config = self._configs[key] = self._new_config(launch, stream, is_early=is_early)
        return config

    def _new_config(self, launch: Launch, stream: Any, *, is_early: bool) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = stream
        if is_early:
            attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
            ids = driver.CUlaunchAttributeID
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            value.programmaticStreamSerializationAllowed = 1
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        return config

    def pattern(self, calls: Sequence[Call], addresses: NDArray[np.int64], /) -> Pattern | None:
        stream = self._enter("make a pattern")
        made = [call for call in calls if call.launch.items and all(call.launch.grid)]
        if not made:
            return None
        can_be_early = self._context.gpu.capability >= EARLY_CAPABILITY
        launches = [
            Unpacked(
                self._config(launch, stream, is_early=launch.early and can_be_early),
                self._arguments[kernel],
                values + launch.extents,
            )
            for kernel, launch, values in made
        ]
        alone = self._config(made[0].launch, stream, is_early=False)
        return CudaPattern(launches, alone, addresses)

    def repeat(self, pattern: Pattern, addresses: NDArray[np.int64], /) -> None:
        self._enter("repeat", in_graph=False)
        own = cuda_pattern(pattern)
        own.move(addresses)
        launches = own.packed_alone if self._is_joined else own.packed
        self._is_joined = False
        launch = self._driver.cuLaunchKernelEx
        for config, function, parameters in launches:
            status = launch(config, function, parameters, 0)[0]
            if status:
                raise failed(f"cuLaunchKernelEx(one of {own.num_launches} repeated)", status)

    def copy(self, dst: Tensor, src: Tensor) -> None:
        stream = self._enter("copy")
        to, source, nbytes = self._copy_ends(dst, src)
        to_at, from_at = dst.offset_bytes, src.offset_bytes
        for start, length in spans(source, from_at, to, to_at, nbytes):
            status = self._driver.cuMemcpyAsync(
                to.address + to_at + start, source.address + from_at + start, length, stream
            )[0]
            if status:
                raise failed(
                    f"cuMemcpyAsync({length} bytes, {source.home.value} to {to.home.value})",
                    status,
                )

    def copy_many(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        has_batch = self._context.gpu.driver_version >= BATCH_COPY_DRIVER
        homes = [tensor.buffer.home for pair in pairs for tensor in pair]
        if not has_batch or Home.PAGEABLE in homes or self._capturing is not None or len(pairs) < 2:
            for dst, src in pairs:
                self.copy(dst, src)
            return
        self._copy_batch(pairs)

    def _copy_batch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        stream = self._enter("copy")
        dsts: list[int] = []
        srcs: list[int] = []
        sizes: list[int] = []
        for dst, src in pairs:
            to, source, nbytes = self._copy_ends(dst, src)
            to_at, from_at = dst.offset_bytes, src.offset_bytes
            for start, length in spans(source, from_at, to, to_at, nbytes):
                dsts.append(to.address + to_at + start)
                srcs.append(source.address + from_at + start)
                sizes.append(length)
        self._send_batch(dsts, srcs, sizes, stream)

    def _send_batch(self, dsts: list[int], srcs: list[int], sizes: list[int], stream: Any) -> None:
        """Copies from and to addresses, together."""
        if not sizes:
            return
        call = f"cuMemcpyBatchAsync({len(sizes)} copies, {sum(sizes)} bytes)"
        batch_copy = self._context.gpu.batch_copy
        if batch_copy is not None:
            status = batch_copy(dsts, srcs, sizes, int(stream))
            if status:
                raise failed(call, self._driver.CUresult(status))
            return
        order = self._driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        attributes = self._driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = order
        pointer = self._driver.CUdeviceptr
        check(
            call,
            self._driver.cuMemcpyBatchAsync(
                [pointer(address) for address in dsts],
                [pointer(address) for address in srcs],
                sizes,
                len(sizes),
                [attributes],
                [0],
                1,
                stream,
            ),
        )

    def copy_rows(
        self, dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
    ) -> int:
        runs = row_runs(dst, dst_rows, src, src_rows)
        to, source = _writable(dst), cuda_buffer(src)
        is_plain = self._capturing is None and Home.PAGEABLE not in (to.home, source.home)
        if not is_plain or self._context.gpu.driver_version < BATCH_COPY_DRIVER:
            self.copy_many(runs.pairs(dst, src))
            return len(runs.rows)
        stream = self._enter("copy")
        to_bytes, row_bytes = dst.shape[1], src.shape[1]
        to_first, from_first = dst.address, src.address
        dsts = [to_first + row * to_bytes for row in runs.dst]
        srcs = [from_first + row * row_bytes for row in runs.src]
        sizes = [rows * row_bytes for rows in runs.rows]
        if source.pieces_bytes or to.pieces_bytes:
            dsts, srcs, sizes = _cut(to, dsts, source, srcs, sizes)
        self._send_batch(dsts, srcs, sizes, stream)
        return len(runs.rows)

    def _copy_ends(self, dst: Tensor, src: Tensor) -> tuple[CudaBuffer, CudaBuffer, int]:
        nbytes = dst.nbytes
        if nbytes != src.nbytes:
            raise ShapeError(f"copy of {src.nbytes} bytes into {nbytes} bytes")
        to, source = _writable(dst), cuda_buffer(src)
        if self._capturing is not None:
            self._capturing.kept += [to, source]
        return to, source, nbytes

    def fill(self, dst: Tensor, byte: int) -> None:
        if not 0 <= byte <= 255:
            raise ShapeError(f"fill byte {byte} is outside 0..255")
        buffer = _writable(dst)
        stream = self._enter("fill")
        if buffer.home is Home.PAGEABLE:  # the GPU cannot reach it
            self.call(partial(dst.numpy().fill, byte))
        elif dst.nbytes:
            if self._capturing is not None:
                self._capturing.kept.append(buffer)
            check(
                f"cuMemsetD8Async({dst.nbytes} bytes)",
                self._driver.cuMemsetD8Async(dst.address, byte, dst.nbytes, stream),
            )

    def call(self, function: Callable[[], None]) -> None:
        stream = self._enter("call")
        failure = self._failure
        numbers: list[int] = []
        in_graph = self._capturing is not None

        def run() -> None:
            try:
                if failure.first() is None:
                    function()
            except BaseException as error:  # noqa: BLE001  carried to the owner, who raises it
                failure.error = error
            if not in_graph:
                host_calls.pending.pop(numbers[0], None)

        number = host_calls.add(run)
        numbers.append(number)
        if self._capturing is not None:
            self._capturing.kept.append(CallInGraph(number))
            answer = launch_in_graph(self._driver, stream, number)
            check("cuLaunchHostFunc() in a graph", answer)
            return
        entry = self._driver.CUhostFn(host_calls.address)
        check("cuLaunchHostFunc()", self._driver.cuLaunchHostFunc(stream, entry, number))

    def record(self, event: Event) -> None:
        stream = self._enter("record", in_graph=False)
        own = cuda_event(event)
        status = self._driver.cuEventRecord(own.handle, stream)[0]
        if status:
            raise failed("cuEventRecord()", status)
        own.failure = self._failure

    def wait(self, event: Event) -> None:
        stream = self._enter("wait", in_graph=False)
        own = cuda_event(event)
        status = self._driver.cuStreamWaitEvent(stream, own.handle, 0)[0]
        if status:
            raise failed("cuStreamWaitEvent()", status)
        if own.failure is not None and own.failure is not self._failure:
            self._failure.inputs.add(own.failure)

    def synchronize(self) -> None:
        stream = self._enter("synchronize", in_graph=False)
        driver = self._driver
        wait_until(lambda: is_done("cuStreamQuery()", driver.cuStreamQuery(stream)[0]))
        self._failure.check()

    def fork(self, side: Stream) -> None:
        own = _cuda_stream(side)
        if self._capturing is not None:
            self._sides.append(own)  # first, so that an interrupt leaves it to the capture's end
            own._captures_for = self._captures_for or self
            own._capturing = self._capturing
        self._before(own)

    def join(self, side: Stream) -> None:
        own = _cuda_stream(side)
        own._before(self)
        if own._capturing is self._capturing:
            own._capturing = None

    def _before(self, other: CudaStream) -> None:
        """Later work of the other waits for what is enqueued here; in a capture too."""
        stream, waits = self._enter("fork or join"), other._enter("fork or join")
        event = CudaEvent(self._context, timing=False)
        check("cuEventRecord()", self._driver.cuEventRecord(event.handle, stream))
        check("cuStreamWaitEvent()", self._driver.cuStreamWaitEvent(waits, event.handle, 0))
        event.close()  # the driver keeps what is waited for
        other._is_joined = True  # its next launch waits for both streams: it cannot start early
        if self._failure is not other._failure:
            other._failure.inputs.add(self._failure)

    def capture(self) -> AbstractContextManager[Graph]:
        return _Capture(self, CudaGraph(self._context))

    def begin_capture(self, graph: CudaGraph) -> None:
        """From here on operations go into the graph."""
        stream = self._enter("capture", in_graph=False)
        # Relaxed: other threads go on allocating and copying meanwhile.
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._capturing = graph  # first, so that whatever comes between is undone
        try:
            check("cuStreamBeginCapture()", self._driver.cuStreamBeginCapture(stream, mode))
        except BaseException:
            self.drop_capture(graph)
            raise
        self._context.owners.add(graph)

    def end_capture(self, graph: CudaGraph) -> None:
        """Ends the capture and makes the graph executable."""
        self._context.shelter.run(partial(self._end, graph))
        check("cuGraphUpload()", self._driver.cuGraphUpload(graph.handle, self._handle))

    def drop_capture(self, graph: CudaGraph) -> None:
        """Ends the capture of this graph, if it is under way, without a result."""
        if self._capturing is graph:
            self._context.shelter.run(partial(self._drop, graph))

    def _end(self, graph: CudaGraph) -> None:
        self._context.enter()
        answer = self._driver.cuStreamEndCapture(self._handle)
        self._end_sides()
        self._capturing = None
        graph.instantiate(check("cuStreamEndCapture()", answer))

    def _drop(self, graph: CudaGraph) -> None:
        if self._capturing is not graph:  # what was asked for before has ended it
            return
        if self._handle is not None:
            self._context.enter()
            answer = self._driver.cuStreamEndCapture(self._handle)
            if not int(answer[0]):
                self._driver.cuGraphDestroy(answer[1])
        self._end_sides()
        self._capturing = None

    def _end_sides(self) -> None:
        """Streams that were forked into a capture are as before it."""
        while self._sides:
            self._sides.pop()._capturing = None

    def replay(self, graph: Graph) -> None:
        stream = self._enter("replay", in_graph=False)
        if not isinstance(graph, CudaGraph):
            raise DeviceError(f"a CUDA stream needs a CUDA graph, got {type(graph).__name__}")
        status = self._driver.cuGraphLaunch(graph.handle, stream)[0]
        if status:
            raise failed("cuGraphLaunch()", status)

    def close(self) -> None:
        """Waits for the work in flight, then destroys the stream. A lost GPU is no error here."""
        if self._handle is None:
            return
        stream, self._handle = self._handle, None
        self._context.enter()
        driver = self._driver
        try:
            wait_until(lambda: is_done("cuStreamQuery()", driver.cuStreamQuery(stream)[0]))
        except DeviceError as error:
            logger.debug("closing stream %s: %s", self._name, error.message)
        driver.cuStreamDestroy(stream)

    def _enter(self, what: str, *, in_graph: bool = True) -> Any:
        """The stream's handle, its context current; refuses what cannot be done now."""
        if self._handle is None:
            raise DeviceError(f"stream {self._name!r} is closed: cannot {what}")
        graph = self._capturing
        if graph is not None and graph.is_abandoned():
            (self._captures_for or self).drop_capture(graph)
        if self._capturing is not None and not in_graph:
            raise DeviceError(
                f"stream {self._name!r} is capturing a graph: cannot {what}",
                hint="a graph holds launches, copies, fills and calls; do the rest outside",
            )
        self._context.enter()
        return self._handle


class _Capture:
    """The block of a capture.

    An interrupt can come at any line, even before the first one of __exit__. Then the capture ends
    when its streams are used again: nothing refers to its block any more.
    """

    __slots__ = ("__weakref__", "_graph", "_stream")

    def __init__(self, stream: CudaStream, graph: CudaGraph) -> None:
        self._stream = stream
        self._graph = graph

    def __enter__(self) -> Graph:
        self._graph.block = weakref.ref(self)
        self._stream.begin_capture(self._graph)
        return self._graph

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._stream.end_capture(self._graph)
        else:
            self._stream.drop_capture(self._graph)


def _cuda_stream(stream: Stream) -> CudaStream:
    if not isinstance(stream, CudaStream):
        raise DeviceError(f"a CUDA stream needs a CUDA stream, got {type(stream).__name__}")
    return stream


class _Copies(NamedTuple):
    """Copies by address."""

    dsts: list[int]
    srcs: list[int]
    sizes: list[int]


def _cut(
    to: CudaBuffer, dsts: list[int], source: CudaBuffer, srcs: list[int], sizes: list[int]
) -> _Copies:
    """The copies between two buffers, none of which straddles two registered pieces."""
    cut = _Copies([], [], [])
    for dst, src, nbytes in zip(dsts, srcs, sizes, strict=True):
        for start, length in spans(source, src - source.address, to, dst - to.address, nbytes):
            cut.dsts.append(dst + start)
            cut.srcs.append(src + start)
            cut.sizes.append(length)
    return cut


def cuda_buffer(tensor: Tensor) -> CudaBuffer:
    """The tensor's buffer as this device's own.

    Raises:
        DeviceError: it belongs to another device.
    """
    if not isinstance(tensor.buffer, CudaBuffer):
        raise DeviceError(f"a CUDA stream needs a CUDA buffer, got {type(tensor.buffer).__name__}")
    return tensor.buffer


def _writable(tensor: Tensor) -> CudaBuffer:
    buffer = cuda_buffer(tensor)
    if buffer.is_read_only:
        raise DeviceError(f"cannot write {tensor.nbytes} bytes into a read-only buffer")
    return buffer
