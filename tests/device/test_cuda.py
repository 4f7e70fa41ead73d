"""The CUDA device's own logic, against a driver that keeps accounts."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device import cuda_kernels, cuda_pinned, cuda_stream
from strata_cli.engine.device.base import (
    Call,
    Home,
    Kernel,
    KernelArgument,
    Launch,
    Pattern,
    Tensor,
    empty,
)
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.cuda_calls import host_calls
from strata_cli.engine.device.cuda_driver import check, failed, find_gpu
from strata_cli.engine.device.cuda_event import CudaGraph
from strata_cli.engine.device.cuda_memory import CudaBuffer, spans
from strata_cli.engine.device.cuda_pinned import Piece, mapped_address, register
from strata_cli.engine.device.cuda_stream import CudaStream
from strata_cli.engine.device.nvrtc import Cubin, CubinCache
from strata_cli.errors import ConfigError, DeviceError, OutOfMemory
from tests.device.fake_driver import FakeDriver, Result, fake_context, fake_gpu

MIB = 1 << 20


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def device(driver: FakeDriver, tmp_path: Path) -> Iterator[CudaDevice]:
    options = CudaOptions(vram_bytes=MIB, cache_folder=tmp_path)
    with CudaDevice(fake_gpu(driver), options) as opened:
        yield opened


def test_a_failed_call_names_call_numbers_and_result() -> None:
    with pytest.raises(DeviceError, match=r"cuFree\(7\): CUDA_ERROR_INVALID_VALUE \(1\)"):
        check("cuFree(7)", (Result.CUDA_ERROR_INVALID_VALUE,))


def test_a_call_gives_its_values() -> None:
    assert check("none", (Result.CUDA_SUCCESS,)) is None
    assert check("one", (Result.CUDA_SUCCESS, 5)) == 5
    assert check("two", (Result.CUDA_SUCCESS, 5, 6)) == (5, 6)


def test_a_lost_gpu_says_to_start_again() -> None:
    error = failed("cuStreamQuery()", Result.CUDA_ERROR_ILLEGAL_ADDRESS)
    assert "lost" in error.hint
    assert not isinstance(error, OutOfMemory)
    assert isinstance(failed("x", Result.CUDA_ERROR_OUT_OF_MEMORY), OutOfMemory)


def install(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]  # a stand-in for the real module
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_a_usable_gpu_is_described(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    install(monkeypatch, driver)
    driver.num_gpus = 2
    gpu = find_gpu(1)
    assert (gpu.ordinal, gpu.name, gpu.capability) == (1, "Fake GPU", (9, 0))
    assert (gpu.shared_bytes, gpu.num_multiprocessors) == (232_448, 132)


def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ConfigError, match="cuda-python") as caught:
        find_gpu(0)
    assert "strata-cli[cuda]" in caught.value.hint


def test_a_missing_driver_is_said(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
    def no_library(flags: int) -> tuple[Result]:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(driver, "cuInit", no_library, raising=False)
    install(monkeypatch, driver)
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        find_gpu(0)


def test_unusable_gpus_are_refused_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> None:
    install(monkeypatch, driver)
    driver.answers["cuInit"] = [Result.CUDA_ERROR_NO_DEVICE]
    with pytest.raises(ConfigError, match="CUDA_ERROR_NO_DEVICE"):
        find_gpu(0)
    with pytest.raises(ConfigError, match=r"no device cuda:1: found 1 GPU") as caught:
        find_gpu(1)
    assert "cuda:0" in caught.value.hint
    driver.capability = (6, 1)
    with pytest.raises(ConfigError, match=r"Fake GPU.*6\.1, need 7\.5"):
        find_gpu(0)
    driver.version = 12_040
    with pytest.raises(ConfigError, match=r"CUDA 12\.4, need 13\.0"):
        find_gpu(0)


def test_the_budget_is_a_hard_cap(device: CudaDevice, driver: FakeDriver) -> None:
    first = device.allocate(MIB // 2)
    with pytest.raises(OutOfMemory, match=r"need 1048576|need 1\.0 MiB"):
        device.allocate(MIB)
    assert len(driver.allocated) == 1
    assert device.memory().free_bytes == MIB // 2
    first.close()
    device.allocate(MIB)


@given(sizes=st.lists(st.integers(0, MIB // 3), max_size=12))
def test_every_byte_of_the_budget_comes_back(sizes: list[int]) -> None:
    driver = FakeDriver()
    with CudaDevice(fake_gpu(driver), CudaOptions(vram_bytes=MIB)) as device:
        buffers = []
        for size in sizes:
            try:
                buffers.append(device.allocate(size))
            except OutOfMemory:
                assert size > device.memory().free_bytes
            assert sum(driver.allocated.values()) <= MIB
        for buffer in buffers:
            buffer.close()
        assert device.memory().free_bytes == MIB
        assert not driver.allocated


def test_the_default_budget_leaves_the_reserve(driver: FakeDriver) -> None:
    driver.memory_bytes = 10 * MIB
    with CudaDevice(fake_gpu(driver), CudaOptions(vram_reserve_bytes=3 * MIB)) as device:
        assert device.memory() == (7 * MIB, 10 * MIB)
    with pytest.raises(OutOfMemory, match="leaves nothing"):
        CudaDevice(fake_gpu(driver), CudaOptions(vram_reserve_bytes=10 * MIB))
    with pytest.raises(OutOfMemory, match="more than"):
        CudaDevice(fake_gpu(driver), CudaOptions(vram_bytes=11 * MIB))
    assert len(driver.arguments("cuDevicePrimaryCtxRelease")) == 3


def test_a_refused_allocation_names_need_free_and_total(
    device: CudaDevice, driver: FakeDriver
) -> None:
    driver.answers["cuMemAlloc"] = [Result.CUDA_ERROR_OUT_OF_MEMORY]
    with pytest.raises(OutOfMemory, match=r"need .*free .*of .*cuMemAlloc\(1024\)"):
        device.allocate(1_024)
    assert device.memory().free_bytes == MIB


def test_dropped_memory_is_freed_at_the_next_allocation(
    device: CudaDevice, driver: FakeDriver
) -> None:
    empty(device, (100,))
    gc.collect()
    assert len(driver.allocated) == 1
    device.allocate(8)
    assert len(driver.allocated) == 1
    gc.collect()
    device.close()
    assert not driver.allocated


def test_closed_memory_has_no_address(device: CudaDevice) -> None:
    for buffer in (device.allocate(8), device.allocate_pinned(8)):
        buffer.close()
        with pytest.raises(DeviceError, match="of 8 bytes is closed"):
            _ = buffer.address


def test_dropped_pages_are_unlocked_at_the_next_locking(
    device: CudaDevice, driver: FakeDriver
) -> None:
    """Else they could stay locked for as long as nobody asks for memory of the device."""
    device.allocate_pinned(8)
    gc.collect()
    assert len(driver.registered) == 1
    kept = device.allocate_pinned(8)
    assert len(driver.registered) == 1
    kept.close()
    assert not driver.registered


def test_pages_are_unlocked_behind_the_copies_that_use_them(
    device: CudaDevice, driver: FakeDriver
) -> None:
    buffer = device.allocate_pinned(8)
    driver.calls.clear()
    buffer.close()
    assert driver.names()[-2:] == ["cuCtxSynchronize", "cuMemHostUnregister"]


def test_closing_the_device_frees_everything(device: CudaDevice, driver: FakeDriver) -> None:
    owners = [device.allocate(8), device.allocate_pinned(8), device.event()]
    device.stream("compute")
    device.close()
    assert owners
    assert not driver.allocated
    assert not driver.registered
    assert {"cuStreamDestroy", "cuEventDestroy"} <= set(driver.names())
    assert driver.names()[-1] == "cuDevicePrimaryCtxRelease"


def test_pinned_memory_is_registered_whole(device: CudaDevice, driver: FakeDriver) -> None:
    driver.map_host = lambda address: address + (1 << 44)
    with device.allocate_pinned(10_000) as buffer:
        assert buffer.host_bytes is not None
        host_address = buffer.host_bytes.ctypes.data
        assert driver.registered == {host_address: 12_288}
        assert buffer.address == host_address + (1 << 44)
        buffer.host_bytes[:] = 3
        kept = buffer.host_bytes
    assert not driver.registered
    assert (kept == 3).all()


def slices_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(cuda_pinned, "SLICE_BYTES", nbytes)


def test_pinned_memory_is_registered_in_slices_when_the_whole_is_refused(
    device: CudaDevice,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slices_of(monkeypatch, 8_192)
    driver.answers["cuMemHostRegister"] = [Result.CUDA_ERROR_INVALID_VALUE]
    with caplog.at_level(logging.WARNING), device.allocate_pinned(20_000) as buffer:
        assert list(driver.registered.values()) == [8_192, 8_192, 4_096]
        src = Tensor.over(buffer, (20_000,), np.uint8)
        driver.calls.clear()
        device.stream("copy").copy(
            Tensor.over(device.allocate(20_000), (19_000,), np.uint8), src.rows(1_000, 20_000)
        )
        copied = [args[2] for args in driver.arguments("cuMemcpyAsync")]
        assert copied == [7_192, 8_192, 3_616]
    assert "slices" in caplog.text
    assert not driver.registered


def test_a_refused_slice_undoes_the_others(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slices_of(monkeypatch, 4_096)
    ok, no = Result.CUDA_SUCCESS, Result.CUDA_ERROR_OUT_OF_MEMORY
    driver.answers["cuMemHostRegister"] = [no, ok, ok, no]
    with pytest.raises(OutOfMemory, match=r"need 16384 bytes, locked 8192 bytes"):
        register(fake_context(driver), np.zeros(16_384, np.uint8))
    assert not driver.registered


def test_pinned_memory_comes_from_the_driver_where_it_cannot_be_registered(
    device: CudaDevice, driver: FakeDriver
) -> None:
    driver.answers["cuMemHostRegister"] = [Result.CUDA_ERROR_NOT_SUPPORTED]
    buffer = device.allocate_pinned(5_000)
    assert buffer.host_bytes is not None
    buffer.host_bytes[:] = 1
    assert driver.arguments("cuMemHostAlloc")[0][0] == 8_192
    kept = buffer.host_bytes
    buffer.close()
    gc.collect()
    device.close()
    for name in ("cuMemFreeHost", "cuDevicePrimaryCtxRelease"):
        assert name not in driver.names()
    del kept
    gc.collect()
    assert driver.names()[-2:] == ["cuMemFreeHost", "cuDevicePrimaryCtxRelease"]


def test_scattered_slices_are_refused(driver: FakeDriver) -> None:
    context, pieces = fake_context(driver), [Piece(4_096, 4_096), Piece(8_192, 4_096)]
    assert mapped_address(context, Piece(4_096, 8_192), pieces) == 4_096
    driver.map_host = {4_096: 100, 8_192: 9_000}.__getitem__
    with pytest.raises(DeviceError, match="scattered"):
        mapped_address(context, Piece(4_096, 8_192), pieces)


@given(
    pieces=st.tuples(st.sampled_from([0, 7, 64]), st.sampled_from([0, 10, 64])),
    starts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    nbytes=st.integers(0, 300),
)
def test_spans_cover_a_copy_and_straddle_nothing(
    pieces: tuple[int, int], starts: tuple[int, int], nbytes: int
) -> None:
    context = fake_context(FakeDriver())
    buffers = [CudaBuffer(context, Home.PINNED, 1_000, read_only=False) for _ in pieces]
    for buffer, length in zip(buffers, pieces, strict=True):
        buffer.pieces_bytes = length
    done = 0
    for span in spans(buffers[0], starts[0], buffers[1], starts[1], nbytes):
        assert span.start == done
        assert span.nbytes > 0
        done += span.nbytes
        for start, length in zip(starts, pieces, strict=True):
            first, last = start + span.start, start + done - 1
            assert not length or first // length == last // length
    assert done == nbytes


def body(begin: int, end: int, /, *args: object) -> None:
    raise AssertionError("a CUDA device does not call it")


KERNEL = Kernel("work", body, body, "work.cu")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    class Build:
        def __init__(self, name: NamedTuple, *_: object) -> None:
            self.key = str(hash(name))

        def run(self, cache: CubinCache) -> Cubin:
            cubin = Cubin(b"code", {"work<3>": "_Z4workILi3EEvv"})
            cache.store(self.key, cubin)
            return cubin

    monkeypatch.setattr(cuda_kernels, "Build", Build)
    monkeypatch.setattr(cuda_kernels, "_read", lambda name: name)
    monkeypatch.setattr(cuda_kernels, "Compiler", lambda: None)


def launched_arguments(call: tuple[Any, ...], layout: str) -> tuple[Any, ...]:
    return values_at(call[9], layout)


def values_at(parameters: int, layout: str) -> tuple[Any, ...]:
    count = len(layout)
    pointers = (ctypes.c_void_p * count).from_address(parameters)
    cells = [
        ctypes.string_at(pointer or 0, struct.calcsize(code))
        for pointer, code in zip(pointers, layout, strict=True)
    ]
    return tuple(struct.unpack(code, cell)[0] for cell, code in zip(cells, layout, strict=True))


@pytest.mark.usefixtures("built")
def test_arguments_arrive_as_pointers_long_longs_and_floats(
    device: CudaDevice, driver: FakeDriver
) -> None:
    driver.parameter_bytes = [8, 8, 4, 8, 4]
    stream, x = device.stream("compute"), empty(device, (4, 4))
    launch = Launch(items=1, grid=(3, 2, 1), block=(64, 1, 1), shared_bytes=1_024)
    for count in (-5, 1 << 40):
        stream.launch(KERNEL, launch, x, count, 0.5, x.rows(1, 2), -2.0)
        call = driver.arguments("cuLaunchKernel")[-1]
        assert call[:9] == (b"work", 3, 2, 1, 64, 1, 1, 1_024, "stream")
        expected = (x.address, count, 0.5, x.address + 16, -2.0)
        assert launched_arguments(call, "QqfQf") == expected


@pytest.mark.usefixtures("built")
def test_extents_follow_the_arguments(device: CudaDevice, driver: FakeDriver) -> None:
    driver.parameter_bytes = [8, 4, 8, 8]
    x = empty(device, (4,))
    device.stream("compute").launch(KERNEL, Launch(items=1, extents=(7, 9)), x, 0.5)
    call = driver.arguments("cuLaunchKernel")[-1]
    assert launched_arguments(call, "Qfqq") == (x.address, 0.5, 7, 9)


@pytest.mark.usefixtures("built")
def test_arguments_that_do_not_fit_the_function_are_refused(
    device: CudaDevice, driver: FakeDriver
) -> None:
    stream, x = device.stream("compute"), empty(device, (4,))
    driver.parameter_bytes = [8, 4]
    for args in ([x, 1], [x], [x, 1.0, 1]):
        with pytest.raises(DeviceError, match=r"work takes parameters of \[8, 4\] bytes"):
            stream.launch(KERNEL, Launch(items=1), *args)
    stream.launch(KERNEL, Launch(items=1), x, 1.0)
    with pytest.raises(DeviceError, match="do not fit"):
        stream.launch(KERNEL, Launch(items=1), 0.5, 1.0)


@pytest.mark.usefixtures("built")
def test_a_refused_launch_names_kernel_and_shape(device: CudaDevice, driver: FakeDriver) -> None:
    driver.answers["cuLaunchKernel"] = [Result.CUDA_ERROR_INVALID_VALUE]
    launch = Launch(items=1, grid=(70_000, 70_000, 1), block=(1, 1, 1))
    with pytest.raises(DeviceError, match=r"work, grid \(70000, 70000, 1\).*INVALID_VALUE"):
        device.stream("compute").launch(KERNEL, launch)


@pytest.mark.usefixtures("built")
def test_large_shared_memory_is_asked_for_once(device: CudaDevice, driver: FakeDriver) -> None:
    stream = device.stream("compute")
    for nbytes in (1_000, 100_000, 100_000, 60_000, 200_000):
        stream.launch(KERNEL, Launch(items=1, shared_bytes=nbytes))
    percent, *asked = [args[2] for args in driver.arguments("cuFuncSetAttribute")]
    assert (percent, asked) == (cuda_kernels.SHARED_MEMORY_PERCENT, [100_000, 200_000])


@pytest.mark.usefixtures("built")
def test_blocks_that_crowd_each_other_out_get_the_most_shared_memory(
    device: CudaDevice, driver: FakeDriver
) -> None:
    stream = device.stream("compute")
    for nbytes in (10_000, 35_000, 40_000):
        stream.launch(KERNEL, Launch(items=1, shared_bytes=nbytes))
    key = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    asked = [args[1:] for args in driver.arguments("cuFuncSetAttribute")]
    assert asked == [(key, cuda_kernels.SHARED_MEMORY_PERCENT)]


@pytest.mark.usefixtures("built")
def test_a_kernel_may_leave_the_rest_to_the_cache(device: CudaDevice, driver: FakeDriver) -> None:
    stream, kernel = device.stream("compute"), dataclasses.replace(KERNEL, keeps_cache=True)
    for nbytes in (20_000, 100_000):
        stream.launch(kernel, Launch(items=1, shared_bytes=nbytes))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert [args[1:] for args in driver.arguments("cuFuncSetAttribute")] == [(most, 100_000)]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("capability", "is_early"), [((9, 0), True), ((8, 9), False)])
def test_an_early_launch_does_not_wait_where_the_gpu_can(
    driver: FakeDriver, tmp_path: Path, capability: tuple[int, int], is_early: bool
) -> None:
    driver.capability = capability
    with CudaDevice(fake_gpu(driver), CudaOptions(cache_folder=tmp_path)) as device:
        launch = Launch(items=1, grid=(2, 3, 4), block=(32, 1, 1), shared_bytes=8, early=True)
        device.stream("compute").launch(KERNEL, launch)
    calls = driver.arguments("cuLaunchKernelEx")
    assert [bool(calls), "cuLaunchKernel" in driver.names()] == [is_early, not is_early]
    if is_early:
        config = calls[0][0]
        assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (2, 3, 4)
        assert (config.blockDimX, config.sharedMemBytes, config.numAttrs) == (32, 8, 1)
        assert config.attrs[0].id == 6
        assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1


@pytest.mark.usefixtures("built")
def test_a_template_instance_is_found_by_its_symbol(device: CudaDevice, driver: FakeDriver) -> None:
    kernel = Kernel("work_3", body, body, "work.cu", function="work<3>")
    device.prepare([kernel, kernel])
    assert driver.arguments("cuModuleGetFunction") == [("module", b"_Z4workILi3EEvv")]
    device.prepare([KERNEL])
    assert driver.arguments("cuModuleGetFunction")[1] == ("module", b"work")


@pytest.mark.usefixtures("built")
def test_compiling_is_announced_once(
    device: CudaDevice, driver: FakeDriver, tmp_path: Path
) -> None:
    instances = [Kernel(f"work_{n}", body, body, "work.cu", function=f"work<{n}>") for n in "34"]
    announced: list[int] = []
    device.prepare([KERNEL], announced.append)
    device.prepare([KERNEL, *instances], announced.append)
    device.prepare([KERNEL, *instances], announced.append)
    assert announced == [1, 2]
    with CudaDevice(fake_gpu(driver), CudaOptions(cache_folder=tmp_path)) as later:
        later.prepare([KERNEL, *instances], announced.append)
    assert announced == [1, 2]


def test_a_kernel_without_a_source_is_refused(device: CudaDevice) -> None:
    with pytest.raises(DeviceError, match="no CUDA function"):
        device.stream("compute").launch(Kernel("bare", body, body), Launch(items=1))


def device_pairs(device: CudaDevice, count: int) -> list[tuple[Tensor, Tensor]]:
    size = (100,)
    return [
        (
            Tensor.over(device.allocate(100), size, np.uint8),
            Tensor.over(device.allocate_pinned(100), size, np.uint8),
        )
        for _ in range(count)
    ]


def test_many_copies_are_one_call(device: CudaDevice, driver: FakeDriver) -> None:
    pairs, stream = device_pairs(device, 3), device.stream("copy")
    stream.copy_many(pairs)
    (call,) = driver.arguments("cuMemcpyBatchAsync")
    assert call[0] == [dst.address for dst, _ in pairs]
    assert call[1] == [src.address for _, src in pairs]
    assert call[2:4] == ([100, 100, 100], 3)
    assert call[5:] == ([0], 1, "stream")


class SeenBatch(NamedTuple):
    dsts: list[int]
    srcs: list[int]
    sizes: list[int]
    stream: int


@pytest.fixture
def batches(driver: FakeDriver, device: CudaDevice) -> list[SeenBatch]:
    """What the driver got without the bindings."""
    seen: list[SeenBatch] = []

    def copy(dsts: Any, srcs: Any, sizes: Any, stream: int) -> int:
        seen.append(SeenBatch(list(dsts), list(srcs), list(sizes), stream))
        return int(driver.answers["batch"].pop()) if driver.answers["batch"] else 0

    gpu = dataclasses.replace(device._context.gpu, batch_copy=copy)
    device._context.gpu = gpu
    return seen


def test_copies_go_to_the_driver_by_their_addresses(
    device: CudaDevice, driver: FakeDriver, batches: list[SeenBatch]
) -> None:
    pairs, stream = device_pairs(device, 3), device.stream("copy")
    stream._handle = 7
    stream.copy_many(pairs)
    addresses = [[tensor.address for tensor in side] for side in zip(*pairs, strict=True)]
    assert batches == [(*addresses, [100] * 3, 7)]
    driver.answers["batch"] = [Result.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DeviceError, match=r"cuMemcpyBatchAsync\(3 copies, 300 bytes\)"):
        stream.copy_many(pairs)
    stream._handle = "stream"


@pytest.mark.parametrize("width", [100, 128])
def test_rows_that_are_neighbours_are_one_copy(
    device: CudaDevice, batches: list[SeenBatch], width: int
) -> None:
    dst = Tensor.over(device.allocate(10 * width), (10, width), np.uint8)
    src = Tensor.over(device.allocate_pinned(900), (9, 100), np.uint8)
    stream = device.stream("copy")
    stream._handle = 7
    rows = [(4, 0), (5, 1), (6, 3), (7, 4), (8, 5)]
    pieces = stream.copy_rows(dst, [to for to, _ in rows], src, [source for _, source in rows])
    starts = [(4, 0, 2), (6, 3, 3)] if width == 100 else [(*row, 1) for row in rows]
    assert pieces == len(starts)
    assert batches == [
        (
            [dst.address + to * width for to, _, _ in starts],
            [src.address + source * 100 for _, source, _ in starts],
            [count * 100 for _, _, count in starts],
            7,
        )
    ]
    stream._handle = "stream"


def test_rows_do_not_straddle_two_registered_pieces(
    device: CudaDevice, batches: list[SeenBatch]
) -> None:
    dst = Tensor.over(device.allocate(1000), (10, 100), np.uint8)
    buffer = device.allocate_pinned(1000)
    src = Tensor.over(buffer, (9, 100), np.uint8, 50)
    stream = device.stream("copy")
    stream._handle, buffer.pieces_bytes = 7, 256
    stream.copy_rows(dst, [3, 4], src, [1, 2])
    (batch,) = batches
    assert batch.sizes == [106, 94]
    assert batch.srcs == [src.address + 100, src.address + 206]
    assert batch.dsts == [dst.address + 300, dst.address + 406]
    stream._handle = "stream"


def test_copies_go_one_by_one_where_a_batch_cannot(device: CudaDevice, driver: FakeDriver) -> None:
    pairs, stream = device_pairs(device, 2), device.stream("copy")
    with stream.capture():
        stream.copy_many(pairs)
    pageable = Tensor.over(device.wrap(np.zeros(100, np.uint8)), (100,), np.uint8)
    stream.copy_many([*pairs, (pairs[0][0], pageable)])
    assert len(driver.arguments("cuMemcpyAsync")) == 5
    assert not driver.arguments("cuMemcpyBatchAsync")


@pytest.mark.usefixtures("built")
def test_nothing_starts_early_behind_two_streams(device: CudaDevice, driver: FakeDriver) -> None:
    stream, side = device.stream("compute"), device.stream("side")
    early = Launch(items=1, early=True)
    for name in ("fork", "join"):
        stream.launch(KERNEL, early)
        getattr(stream, name)(side)
        for own in (side, stream):
            own.launch(KERNEL, early)
            own.launch(KERNEL, early)
        assert driver.names().count("cuLaunchKernelEx") == 4, name
        assert driver.names().count("cuLaunchKernel") == 1, name
        driver.calls.clear()


def made(stream: CudaStream, launch: Launch, *args: KernelArgument) -> Call:
    stream.launch(KERNEL, launch, *args)
    return Call(KERNEL, launch, tuple(a.address if isinstance(a, Tensor) else a for a in args))


@pytest.mark.usefixtures("built")
def test_a_pattern_repeats_launches_with_other_tensors(
    device: CudaDevice, driver: FakeDriver
) -> None:
    driver.parameter_bytes = [8, 8, 4, 8, 8]
    x, y, z, scratch = (empty(device, (4, 4)) for _ in range(4))
    shapes = [Launch(items=1, grid=(n, 2, 1), extents=(n,), early=n > 1) for n in (1, 5)]
    nothing, stream = shapes[0]._replace(grid=(0, 1, 1)), device.stream("compute")
    calls = [
        made(stream, shapes[0], x, -3, 0.5, scratch),
        made(stream, nothing, x, 0, 0.0, scratch),
        made(stream, shapes[1], scratch, y.address, 2, y),  # a number that is one; 2 for a float
    ]
    pattern = stream.pattern(calls, addresses(x, None, y))
    assert pattern is not None
    assert pattern.num_launches == 2
    for first, second in ((z, x), (x, y)):
        driver.calls.clear()
        stream.repeat(pattern, addresses(first, None, second))
        one, two = driver.arguments("cuLaunchKernelEx")
        assert driver.names() == ["cuLaunchKernelEx"] * 2
        assert [call[0].gridDimX for call in (one, two)] == [1, 5]
        assert [getattr(call[0], "numAttrs", 0) for call in (one, two)] == [0, 1]
        assert values_at(one[2], "QqfQq") == (first.address, -3, 0.5, scratch.address, 1)
        assert values_at(two[2], "QqfQq") == (scratch.address, y.address, 2.0, second.address, 5)


@pytest.mark.usefixtures("built")
def test_a_pattern_starts_nothing_early_on_an_older_gpu(driver: FakeDriver, tmp_path: Path) -> None:
    driver.capability = (8, 9)
    options = CudaOptions(vram_bytes=MIB, cache_folder=tmp_path)
    with CudaDevice(fake_gpu(driver), options) as device:
        stream = device.stream("compute")
        pattern = stream.pattern([made(stream, Launch(items=1, early=True))], addresses())
        assert pattern is not None
        stream.repeat(pattern, addresses())
    assert not hasattr(driver.arguments("cuLaunchKernelEx")[-1][0], "numAttrs")


@pytest.mark.usefixtures("built")
def test_a_pattern_does_not_start_early_behind_two_streams(
    device: CudaDevice, driver: FakeDriver
) -> None:
    stream = device.stream("compute")
    calls = [made(stream, Launch(items=1, early=True)) for _ in range(2)]
    pattern = stream.pattern(calls, addresses())
    assert pattern is not None
    stream.join(device.stream("side"))
    driver.calls.clear()
    for early in ([0, 1], [1, 1]):
        stream.repeat(pattern, addresses())
        configs = [call[0] for call in driver.arguments("cuLaunchKernelEx")[-2:]]
        assert [getattr(config, "numAttrs", 0) for config in configs] == early


@pytest.mark.usefixtures("built")
def test_what_cannot_be_repeated_is_refused(device: CudaDevice, driver: FakeDriver) -> None:
    stream = device.stream("compute")
    calls = [made(stream, Launch(items=1))]
    assert stream.pattern([], addresses()) is None
    pattern = stream.pattern(calls, addresses(None))
    assert pattern is not None
    with pytest.raises(DeviceError, match="with 1 addresses, got 2"):
        stream.repeat(pattern, addresses(None, None))
    with pytest.raises(DeviceError, match="needs a CUDA pattern"):
        stream.repeat(cast(Pattern, object()), addresses(None))
    with stream.capture(), pytest.raises(DeviceError, match="cannot repeat"):
        stream.repeat(pattern, addresses(None))
    driver.answers["cuLaunchKernelEx"] = [Result.CUDA_ERROR_INVALID_VALUE]
    with pytest.raises(DeviceError, match=r"one of 1 repeated.*INVALID_VALUE"):
        stream.repeat(pattern, addresses(None))
    stream.close()
    with pytest.raises(DeviceError, match="is closed: cannot repeat"):
        stream.repeat(pattern, addresses(None))


def addresses(*tensors: Tensor | None) -> NDArray[np.int64]:
    return np.array([0 if tensor is None else tensor.address for tensor in tensors], np.int64)


def test_a_graph_keeps_its_buffers(device: CudaDevice, driver: FakeDriver) -> None:
    stream = device.stream("compute")
    with stream.capture() as graph:
        stream.fill(empty(device, (4,)), 0)
    gc.collect()
    device.memory()
    assert len(driver.allocated) == 1
    graph.close()
    gc.collect()
    device.memory()
    assert not driver.allocated
    assert "cuGraphExecDestroy" in driver.names()


def test_a_capture_ends_once(device: CudaDevice, driver: FakeDriver) -> None:
    """Also where it was to be dropped while its end, which an interrupt had left, was under way."""
    stream = device.stream("compute")
    with stream.capture() as graph:
        pass
    stream._drop(cast(CudaGraph, graph))
    assert driver.names().count("cuStreamEndCapture") == 1


def test_a_dropped_graph_keeps_its_host_functions_until_it_is_destroyed(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU may still be at it."""
    monkeypatch.setattr(cuda_stream, "launch_in_graph", lambda *_: (Result.CUDA_SUCCESS,))
    stream, before = device.stream("compute"), len(host_calls.pending)
    with stream.capture():
        stream.call(lambda: None)
    gc.collect()
    assert "cuGraphExecDestroy" not in driver.names()
    assert len(host_calls.pending) == before + 1
    device.memory()
    assert "cuGraphExecDestroy" in driver.names()
    assert len(host_calls.pending) == before


@pytest.mark.parametrize("call", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuMemsetD8Async"])
def test_an_interrupt_behind_a_call_ends_the_capture(
    device: CudaDevice, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    stream, is_begun = device.stream("compute"), False
    answer = driver._answer

    def count(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal is_begun
        if name in ("cuStreamBeginCapture", "cuStreamEndCapture"):
            is_begun = name == "cuStreamBeginCapture"
        result = answer(name, args)
        if name == call and not driver.arguments("interrupted"):
            driver.calls.append(("interrupted", ()))
            raise KeyboardInterrupt
        return result

    def capture() -> None:
        with stream.capture():
            stream.fill(empty(device, (4,)), 0)

    monkeypatch.setattr(driver, "_answer", count)
    with contextlib.suppress(KeyboardInterrupt):
        capture()
    assert driver.arguments("interrupted")
    assert not is_begun
    stream.synchronize()
    capture()
    assert not is_begun


def test_a_host_function_in_a_graph_is_dropped_with_it(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from strata_cli.engine.device import cuda_stream
    from strata_cli.engine.device.cuda_calls import host_calls

    monkeypatch.setattr(cuda_stream, "launch_in_graph", lambda *_: (0,))
    before, stream = len(host_calls.pending), device.stream("compute")
    stream.call(lambda: None)
    assert len(host_calls.pending) == before
    with stream.capture() as graph:
        stream.call(lambda: None)
    assert len(host_calls.pending) == before + 1
    graph.close()
    assert len(host_calls.pending) == before


def test_a_host_function_that_fails_reaches_every_stream_behind_it(device: CudaDevice) -> None:
    def fail() -> None:
        raise ValueError("planted")

    first, second, third = (device.stream(name) for name in ("first", "second", "third"))
    event, later = device.event(), device.event()
    first.record(event)
    second.wait(event)
    second.record(later)
    third.wait(later)
    first.wait(later)
    first.call(fail)
    for stream in (first, second, third):
        with pytest.raises(DeviceError, match=r"'first'.*planted") as caught:
            stream.synchronize()
        assert isinstance(caught.value.__cause__, ValueError)


def test_a_lost_gpu_does_not_hinder_closing(driver: FakeDriver, tmp_path: Path) -> None:
    device = CudaDevice(fake_gpu(driver), CudaOptions(vram_bytes=MIB, cache_folder=tmp_path))
    stream, buffer = device.stream("compute"), device.allocate(8)
    driver.answers["cuStreamQuery"] = [Result.CUDA_ERROR_ILLEGAL_ADDRESS] * 2
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        stream.synchronize()
    device.close()
    assert buffer.home is Home.DEVICE
    assert "cuStreamDestroy" in driver.names()
    assert not driver.allocated


def test_waits_ask_until_the_work_is_done(device: CudaDevice, driver: FakeDriver) -> None:
    event, stream = device.event(), device.stream("compute")
    driver.answers["cuEventQuery"] = [Result.CUDA_ERROR_NOT_READY] * 20
    assert not event.query()
    event.synchronize()
    assert len(driver.arguments("cuEventQuery")) == 21
    driver.answers["cuStreamQuery"] = [Result.CUDA_ERROR_NOT_READY] * 20
    stream.synchronize()
    assert len(driver.arguments("cuStreamQuery")) == 21


def test_buffers_of_another_device_are_refused(device: CudaDevice) -> None:
    from strata_cli.engine.device.host import HostDevice

    with HostDevice(1) as host:
        ours, theirs = empty(device, (4,)), empty(host, (4,))
        stream = device.stream("compute")
        for dst, src in ((ours, theirs), (theirs, ours)):
            with pytest.raises(DeviceError, match="HostBuffer"):
                stream.copy(dst, src)
        with pytest.raises(DeviceError, match="DeviceBuffer"):
            host.stream("compute").copy(theirs, ours)
        with pytest.raises(DeviceError, match="HostEvent"):
            stream.wait(host.event())
