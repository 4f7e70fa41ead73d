"""Arenas: tensors side by side, filled by threads, on every device."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from strata_cli.engine.device import filling
from strata_cli.engine.device.arena import ALIGNMENT_BYTES, Arena, InPlace
from strata_cli.engine.device.base import Buffer, Device, Stream, Tensor
from strata_cli.engine.device.filling import fill
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.paper import PaperDevice
from strata_cli.engine.device.transfer import download
from strata_cli.errors import DeviceError, ShapeError
from tests.device.gates import standing_at

PIECE = 8_192


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(filling, "PREFETCHED_BYTES", 100)


def arrays_of(sizes: list[int]) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(len(sizes))
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def add_all(arena: Arena, arrays: list[NDArray[Any]]) -> list[Tensor]:
    return [arena.add(a.shape, a.dtype, lambda a=a: a) for a in arrays]  # type: ignore[misc]


def room_for(device: Device, arrays: list[NDArray[Any]], home: str) -> Buffer:
    nbytes = sum(a.nbytes + ALIGNMENT_BYTES for a in arrays) + ALIGNMENT_BYTES
    return device.allocate(nbytes) if home == "device" else device.allocate_pinned(nbytes)


def ignore(_nbytes: int) -> None:
    pass


@pytest.mark.parametrize("home", ["device", "pinned"])
def test_tensors_arrive_whole(device: Device, stream: Stream, home: str) -> None:
    rng = np.random.default_rng(1)
    lists = [rng.integers(0, 4 * PIECE, 20).tolist(), [0, 1, 0], [40 * PIECE], [PIECE] * 30, []]
    for sizes in lists:
        arrays = arrays_of(sizes)
        with room_for(device, arrays, home) as buffer:
            arena = Arena(buffer)
            tensors = add_all(arena, arrays)
            done: list[int] = []
            fill(device, arena, done.append)
            assert sum(done) == arena.used_bytes
            for tensor, array in zip(tensors, arrays, strict=True):
                assert tensor.address % ALIGNMENT_BYTES == 0
                np.testing.assert_array_equal(download(device, stream, tensor), array)


def test_a_slot_is_filled_again_only_after_its_copy(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """The first copy is held up for so long that all other pieces could have been read."""
    make_stream = device.stream

    def held_stream(name: str) -> Stream:
        stream = make_stream(name)
        stream.call(standing_at(threading.Event(), 0.2))
        return stream

    arrays = arrays_of([PIECE * 3 * filling.NUM_SLOTS])
    with room_for(device, arrays, "device") as buffer:
        arena = Arena(buffer)
        (tensor,) = add_all(arena, arrays)
        with monkeypatch.context() as patch:
            patch.setattr(device, "stream", held_stream)
            fill(device, arena, ignore)
        np.testing.assert_array_equal(download(device, device.stream("t"), tensor), arrays[0])


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 3_000), max_size=30), start=st.integers(0, 40_000),
    length=st.integers(0, 40_000),
)  # fmt: skip
def test_any_piece_is_what_lies_there(sizes: list[int], start: int, length: int) -> None:
    arrays = arrays_of(sizes)
    expected = np.zeros(200_000, np.uint8)
    with HostDevice(1) as device:
        arena = Arena(device.allocate(200_000))
        for tensor, array in zip(add_all(arena, arrays), arrays, strict=True):
            expected[tensor.offset_bytes : tensor.offset_bytes + array.size] = array
        out = np.zeros(length, np.uint8)
        arena.contents().copy_to(out, start)
    np.testing.assert_array_equal(out, expected[start : start + length])


def test_contents_of_another_size_are_refused() -> None:
    with HostDevice(1) as device:
        arena = Arena(device.allocate(1_000))
        arena.add((10,), np.uint8, lambda: np.zeros(11, np.uint8))
        with pytest.raises(ShapeError, match="11 bytes for a place of 10"):
            fill(device, arena, ignore)
        with pytest.raises(ShapeError):
            arena.add((1_000,), np.uint8, lambda: np.zeros(1_000, np.uint8))


def test_contents_are_asked_for_when_the_arena_is_filled() -> None:
    with HostDevice(1) as device:
        arena = Arena(device.allocate(1_000))
        values = np.zeros(4, np.int64)
        tensor = arena.add((4,), np.int64, lambda: values)
        values[:] = tensor.address
        fill(device, arena, ignore)
        found = download(device, device.stream("test"), tensor)
        assert found.tolist() == [tensor.address] * 4


@pytest.mark.parametrize("home", ["device", "pinned"])
def test_a_file_that_was_cut_is_an_error(tmp_path: Path, home: str) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    with path.open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    with HostDevice(1) as device, room_for(device, [data], home) as buffer:
        arena = Arena(buffer)
        arena.add(data.shape, data.dtype, lambda: data)
        path.write_bytes(b"")
        with pytest.raises(DeviceError, match=r"cannot read .* of the model file") as caught:
            fill(device, arena, ignore)
        assert "check it" in caught.value.hint


@pytest.mark.parametrize("home", ["device", "pinned"])
def test_an_interrupt_ends_the_threads(device: Device, home: str) -> None:
    arrays = arrays_of([100 * PIECE])

    def interrupt(_nbytes: int) -> None:
        raise KeyboardInterrupt

    with room_for(device, arrays, home) as buffer:
        arena = Arena(buffer)
        add_all(arena, arrays)
        with pytest.raises(KeyboardInterrupt):
            fill(device, arena, interrupt)
    device.synchronize()


def test_a_device_that_reads_host_memory_gets_the_arrays_themselves() -> None:
    data = np.arange(100, dtype=np.float32)
    with HostDevice(1) as device:
        store = InPlace(device)
        tensor = store.add((10, 10), np.float32, lambda: data)
        assert np.shares_memory(tensor.numpy(), data)
        assert store.buffers == [tensor.buffer]


def test_paper_counts_what_a_device_would_give() -> None:
    with HostDevice(1) as device:
        paper = PaperDevice(device, device.stream("test"))
        arena = Arena(paper.uncounted(paper.allocate(1_000).home))
        arena.add((3, 100), np.float32, lambda: np.empty(0))
        arena.add((1,), np.uint8, lambda: np.empty(0))
        assert arena.used_bytes == 1_280 + 1 + 256
        assert paper.device_bytes == 1_024
        paper.allocate_pinned(5)
        assert paper.pinned_bytes == 5
