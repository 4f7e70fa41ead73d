"""Buffers, copies between every pair of homes, and what happens after close, on every device."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device, Home, Stream, Tensor, empty
from strata_cli.engine.device.transfer import download, host_tensor, upload
from strata_cli.errors import DeviceError, OutOfMemory, ShapeError
from tests.device.gates import held
from tests.device.kernels import add, affine


def tensor_at(device: Device, home: Home, size: int) -> Tensor:
    if home is Home.DEVICE:
        return Tensor.over(device.allocate(size), (size,), np.uint8)
    if home is Home.PINNED:
        return Tensor.over(device.allocate_pinned(size), (size,), np.uint8)
    return host_tensor(device, np.zeros(size, np.uint8))


@pytest.mark.parametrize("src_home", Home)
@pytest.mark.parametrize("dst_home", Home)
def test_copies_go_between_all_homes(
    device: Device, stream: Stream, src_home: Home, dst_home: Home
) -> None:
    size = 100_003
    src, dst = tensor_at(device, src_home, size), tensor_at(device, dst_home, size)
    values = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    upload(device, stream, src, values)
    stream.fill(dst, 0xEE)
    stream.copy(dst.rows(11, size), src.rows(0, size - 11))
    got = download(device, stream, dst)
    assert (got[:11] == 0xEE).all()
    np.testing.assert_array_equal(got[11:], values[: size - 11])


@pytest.mark.parametrize("src_home", Home)
def test_copies_can_be_enqueued_together(device: Device, stream: Stream, src_home: Home) -> None:
    sizes = [1, 4_096, 3, 70_000, 0, 17]
    values = np.random.default_rng(3).integers(0, 256, sum(sizes), np.uint8)
    src, dst = tensor_at(device, src_home, sum(sizes)), tensor_at(device, Home.DEVICE, sum(sizes))
    upload(device, stream, src, values)
    edges = np.cumsum([0, *sizes])
    rows = list(pairwise(edges.tolist()))
    stream.copy_many([(dst.rows(a, b), src.rows(a, b)) for a, b in reversed(rows)])
    np.testing.assert_array_equal(download(device, stream, dst), values)
    stream.copy_many([])
    with pytest.raises(ShapeError, match="4096"):
        stream.copy_many([(dst.rows(0, 1), src.rows(0, 1)), (dst.rows(1, 2), src.rows(1, 4_097))])


@pytest.mark.parametrize("src_home", Home)
@pytest.mark.parametrize("width", [40, 48])
def test_rows_are_copied_into_rows(
    device: Device, stream: Stream, src_home: Home, width: int
) -> None:
    values = np.random.default_rng(4).integers(0, 256, (9, 40), np.uint8)
    src = tensor_at(device, src_home, values.size).reshape(9, 40)
    dst = tensor_at(device, Home.DEVICE, 7 * width).reshape(7, width)
    upload(device, stream, src, values)
    stream.fill(dst, 0xEE)
    pieces = stream.copy_rows(dst, [5, 1, 2, 3, 0], src, [0, 4, 5, 6, 8])
    expected = np.full((7, width), 0xEE, np.uint8)
    expected[[5, 1, 2, 3, 0], :40] = values[[0, 4, 5, 6, 8]]
    np.testing.assert_array_equal(download(device, stream, dst), expected)
    assert pieces == (3 if width == 40 else 5)
    assert stream.copy_rows(dst, [], src, []) == 0
    assert stream.copy_rows(dst, [6], src, [8]) == 1
    expected[6, :40] = values[8]
    np.testing.assert_array_equal(download(device, stream, dst), expected)


def test_rows_that_are_not_there_are_not_copied(device: Device, stream: Stream) -> None:
    src, dst = (tensor_at(device, Home.DEVICE, 12).reshape(*shape) for shape in ((3, 4), (2, 6)))
    for to, source in (([2], [0]), ([0], [3]), ([-1], [0]), ([0], [-1])):
        with pytest.raises(ShapeError, match=r"rows .* of 3 to .* of 2"):
            stream.copy_rows(dst, to, src, source)
    for rows in (([0, 1], [0]), ([0], [0, 1])):
        with pytest.raises(ShapeError, match="do not fit"):
            stream.copy_rows(dst, rows[0], src, rows[1])
    with pytest.raises(ShapeError, match="1 rows of 6 bytes do not fit 1 of 4"):
        stream.copy_rows(src, [0], dst, [0])


@pytest.mark.parametrize("home", Home)
def test_fill_writes_every_byte(device: Device, stream: Stream, home: Home) -> None:
    x = tensor_at(device, home, 1_000)
    stream.fill(x, 0)
    stream.fill(x.rows(1, 999), 255)
    got = download(device, stream, x)
    assert (got[[0, 999]] == 0).all()
    assert (got[1:999] == 255).all()


def test_copy_of_another_length_is_refused(device: Device, stream: Stream) -> None:
    with pytest.raises(ShapeError, match="40"):
        stream.copy(empty(device, (10,)), empty(device, (11,)))


def test_empty_tensors_are_copied_without_complaint(device: Device, stream: Stream) -> None:
    x = empty(device, (0, 5))
    stream.copy(x, empty(device, (5, 0)))
    stream.fill(x, 1)
    stream.synchronize()


def test_homes_say_what_the_host_can_see(device: Device) -> None:
    assert device.allocate(8).host_bytes is None
    pinned = device.allocate_pinned(8)
    assert pinned.home is Home.PINNED
    assert pinned.host_bytes is not None
    assert pinned.host_bytes.flags.writeable
    data = np.arange(8, dtype=np.uint8)
    wrapped = device.wrap(data)
    assert wrapped.home is Home.PAGEABLE
    assert wrapped.host_bytes is not None
    assert np.shares_memory(wrapped.host_bytes, data)
    with pytest.raises(DeviceError, match="host view"):
        empty(device, (4,)).numpy()


def test_a_pinned_source_is_read_when_the_copy_runs(device: Device, stream: Stream) -> None:
    values = np.zeros(1_000, np.uint8)
    pinned = Tensor.over(device.allocate_pinned(1_000), (1_000,), np.uint8)
    dst = Tensor.over(device.allocate(1_000), (1_000,), np.uint8)
    with held(device, stream):
        stream.copy(dst, pinned)
        pinned.numpy()[:] = 9
    np.testing.assert_array_equal(download(device, stream, dst), values + 9)


def test_device_memory_is_aligned_for_any_type(device: Device) -> None:
    for nbytes in (1, 3, 4_097, 5 << 20):
        assert device.allocate(nbytes).address % 256 == 0
        assert device.allocate_pinned(nbytes).address % 256 == 0


def test_resident_bytes_are_read_by_kernels_and_written_by_nobody(
    device: Device, stream: Stream
) -> None:
    data = np.arange(100, dtype=np.float32)
    data.flags.writeable = False
    x = Tensor.over(device.resident(data.view(np.uint8)), (100,), np.float32)
    out = empty(device, (100,))
    add(stream, x, x, out)
    np.testing.assert_array_equal(download(device, stream, out), data * 2)
    with pytest.raises(DeviceError, match="read-only"):
        stream.copy(x, out)
    with pytest.raises(DeviceError, match="read-only"):
        stream.fill(x, 0)


def test_kernels_work_in_pinned_memory(device: Device, stream: Stream) -> None:
    x, y, out = (Tensor.over(device.allocate_pinned(4_000), (1_000,), np.float32) for _ in range(3))
    x.numpy()[:] = np.arange(1_000)
    y.numpy()[:] = 0.5
    add(stream, x, y, out)
    stream.synchronize()
    np.testing.assert_array_equal(out.numpy(), np.arange(1_000, dtype=np.float32) + 0.5)


def test_buffers_need_flat_bytes(device: Device) -> None:
    square: NDArray[np.uint8] = np.zeros((4, 4), np.uint8)
    for data in (square, square.reshape(-1)[::2]):
        with pytest.raises(DeviceError, match="uint8"):
            device.wrap(data)


def test_windows_outside_their_buffer_are_refused(device: Device) -> None:
    with device.allocate(100) as buffer:
        Tensor.over(buffer, (25,), np.float32)
        for shape, offset in (((26,), 0), ((25,), 4), ((1,), -4)):
            with pytest.raises(ShapeError, match="100 bytes"):
                Tensor.over(buffer, shape, np.float32, offset)


def test_memory_too_large_names_need_and_limit(device: Device) -> None:
    total = device.memory().total_bytes
    assert 0 < device.memory().free_bytes <= total
    for allocate in (device.allocate, device.allocate_pinned):
        with pytest.raises(OutOfMemory, match=r"need .*GiB.*GiB"):
            allocate(1 << 50)
    with pytest.raises(DeviceError, match="-1"):
        device.allocate(-1)
    device.allocate(1 << 20).close()


def test_a_closed_buffer_is_refused(device: Device, stream: Stream) -> None:
    x, y = empty(device, (4,), np.int64), empty(device, (4,), np.int64)
    x.buffer.close()
    x.buffer.close()
    uses: list[Callable[[], object]] = [
        lambda: x.address,
        lambda: x.buffer.host_bytes,
        lambda: stream.copy(x, y),
        lambda: stream.copy(y, x),
        lambda: stream.fill(x, 0),
        lambda: affine(stream, x, 1, 1),
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="closed"):
            use()
    stream.synchronize()


def test_a_buffer_closed_behind_enqueued_work_is_still_read(device: Device, stream: Stream) -> None:
    src, dst = empty(device, (1_000,), np.int64), empty(device, (1_000,), np.int64)
    upload(device, stream, src, np.arange(1_000))
    with held(device, stream) as gate:
        stream.copy(dst, src)
        gate.set()
        src.buffer.close()
    np.testing.assert_array_equal(download(device, stream, dst), np.arange(1_000))


def test_a_closed_stream_is_refused(device: Device, stream: Stream) -> None:
    x, event = empty(device, (4,), np.int64), device.event()
    stream.close()
    stream.close()
    uses: list[Callable[[], object]] = [
        lambda: affine(stream, x, 1, 1),
        lambda: stream.copy(x, x),
        lambda: stream.fill(x, 0),
        lambda: stream.call(lambda: None),
        lambda: stream.record(event),
        lambda: stream.capture().__enter__(),
        stream.synchronize,
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="closed"):
            use()
    device.synchronize()


def test_a_closed_event_is_refused(device: Device, stream: Stream) -> None:
    event = device.event()
    stream.record(event)
    event.close()
    event.close()
    uses: list[Callable[[], object]] = [
        event.query,
        event.synchronize,
        lambda: stream.record(event),
        lambda: stream.wait(event),
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="closed"):
            use()


def test_a_closed_device_closes_what_it_made(device: Device, stream: Stream) -> None:
    x, pinned = empty(device, (4,)), device.allocate_pinned(64)
    device.close()
    device.close()
    uses: list[Callable[[], object]] = [
        lambda: device.allocate(1),
        lambda: device.stream("late"),
        device.event,
        device.synchronize,
        stream.synchronize,
        lambda: x.address,
        lambda: pinned.host_bytes,
    ]
    for use in uses:
        with pytest.raises(DeviceError, match="closed"):
            use()


def test_closing_with_work_in_flight_ends(device: Device, stream: Stream) -> None:
    x, other, event = empty(device, (4,), np.int64), device.stream("copy"), device.event()
    for _ in range(200):
        affine(stream, x, 1, 1)
    stream.record(event)
    other.wait(event)
    affine(other, x, 1, 1)
    device.close()


def test_devices_can_be_opened_again(device: Device) -> None:
    name = device.name
    device.close()
    with open_device(name) as again:
        again.stream("compute").synchronize()
