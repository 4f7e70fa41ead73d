"""Where snapshots lie: whole as long as somebody holds them, and used again afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Buffer, Device, Tensor, empty
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.transfer import download, upload
from strata_cli.engine.forward.snapshots import MOST_UNUSED, Group, SnapshotRoom
from strata_cli.errors import OutOfMemory

SHAPES = ((3, 5), (0, 4), (70,))
GROUPS = [Group(layer, 1) for layer in range(len(SHAPES))]
LATE_S = 0.005  # so late that nobody who does not wait finds it


def dawdle() -> None:
    threading.Event().wait(LATE_S)


class Scene:
    """A room, and tensors to copy."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream("scene")
        self.room = SnapshotRoom(device, self.stream)
        self.tensors = [empty(device, shape, np.float32) for shape in SHAPES]

    def set(self, value: float) -> None:
        for tensor in self.tensors:
            upload(self.device, self.stream, tensor, np.full(tensor.shape, value, np.float32))

    def values(self) -> list[float]:
        """Of all tensors, each once, as the stream finds them."""
        found = [download(self.device, self.stream, tensor) for tensor in self.tensors]
        return sorted({value for each in found for value in each.reshape(-1).tolist()})


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """On a host that copies beside its kernels."""
    monkeypatch.setattr(HostDevice, "has_async_copy", property(lambda _: True))
    with open_device("host") as device:
        yield Scene(device)


@pytest.fixture
def scene(device_name: str) -> Iterator[Scene]:
    with open_device(device_name) as device:
        yield Scene(device)


def test_copies_keep_what_they_were(scene: Scene) -> None:
    held = []
    for value in range(4):
        scene.set(value)
        held.append(scene.room.copy(scene.tensors))
    for value, (parts, _) in enumerate(held):
        assert [part.shape for part in parts] == list(SHAPES)
        assert all((part == value).all() for part in parts)


def test_memory_is_used_again(scene: Scene) -> None:
    scene.set(1)
    parts, lease = scene.room.copy(scene.tensors)
    address = parts[0].ctypes.data
    del parts, lease
    scene.set(2)
    parts, lease = scene.room.copy(scene.tensors)
    assert parts[0].ctypes.data == address
    assert (parts[0] == 2).all()
    larger = [*scene.tensors, empty(scene.device, (900,), np.float32)]
    del parts, lease
    assert scene.room.copy(larger)[0][3].size == 900


def test_not_much_is_kept_unused(scene: Scene) -> None:
    held = [scene.room.copy(scene.tensors) for _ in range(MOST_UNUSED + 3)]
    held.clear()
    last = scene.room.copy(scene.tensors)
    assert len(scene.room._unused) == MOST_UNUSED
    scene.room.close()
    assert not scene.room._unused
    assert last[0][0].size
    del last
    assert not scene.room._unused


def test_a_lease_that_ends_asks_nothing_of_the_device(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage is collected at any time, also while a stream is recorded: that would spoil it."""
    held = [scene.room.copy(scene.tensors) for _ in range(MOST_UNUSED + 3)]
    closed: list[Buffer] = []
    with monkeypatch.context() as patch:
        patch.setattr(type(held[0][1].buffer), "close", lambda buffer: closed.append(buffer))
        with scene.stream.capture() as graph:
            held.clear()
            assert not closed
        scene.room.copy(scene.tensors)
        assert len(closed) == 2
    graph.close()


def test_ordinary_memory_serves_where_no_more_can_be_locked(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_nbytes: int) -> Tensor:
        raise OutOfMemory("planted")

    monkeypatch.setattr(scene.device, "allocate_pinned", refuse)
    scene.set(3)
    parts, _lease = scene.room.copy(scene.tensors)
    assert all((part == 3).all() for part in parts)


def test_nobody_need_wait_for_copies_out_and_back(scene: Scene) -> None:
    scene.set(4)
    parts, lease = scene.room.copy(scene.tensors, waits=False)
    scene.set(5)
    scene.room.put_back(scene.tensors, parts, lease)
    del parts, lease  # the room holds the block for as long as the copies need it
    again, _lease = scene.room.copy(scene.tensors)
    assert all((part == 4).all() for part in again)


def test_a_block_stays_while_copies_use_it(scene: Scene) -> None:
    held = [scene.room.copy(scene.tensors, waits=False) for _ in range(MOST_UNUSED + 2)]
    held.clear()
    scene.stream.synchronize()
    scene.room.copy(scene.tensors, waits=False)
    assert len(scene.room._under_way) == 1
    scene.room.close()
    assert not scene.room._under_way
    assert not scene.room._unused


def test_each_block_has_an_event_of_its_own(scene: Scene) -> None:
    """Else one stream's would tell of another's copies."""
    for _ in range(2):
        held = [scene.room.copy(scene.tensors, waits=False) for _ in range(3)]
        events = [id(event) for event, _ in scene.room._under_way]
        assert len(set(events)) == len(events) >= 1
        scene.stream.synchronize()
        del held
    scene.room.close()


def test_a_block_stays_while_it_is_put_back(scene: Scene) -> None:
    """Also where the end of its lease comes first: locked memory must not go before."""
    parts, lease = scene.room.copy(scene.tensors)
    scene.room.put_back(scene.tensors, parts, lease)
    del parts, lease
    assert len(scene.room._under_way) == 1
    assert not scene.room._unused
    scene.room.close()


def test_a_block_stays_while_what_did_not_arrive_is_settled(beside: Scene) -> None:
    parts, lease = beside.room.copy(beside.tensors)
    beside.room.put_back(beside.tensors, parts, lease, GROUPS)
    del parts, lease
    assert not beside.room._under_way
    beside.room.settle()
    assert len(beside.room._under_way) == 1
    assert not beside.room._unused
    beside.room.close()


def test_what_arrives_comes_behind_all_that_was_asked_of_the_tensors(beside: Scene) -> None:
    """A copy out that is under way finds what was there before."""
    room = beside.room
    beside.set(1)
    old = room.copy(beside.tensors)
    beside.set(2)
    beside.stream.call(dawdle)
    parts, _lease = room.copy(beside.tensors, waits=False)
    room.put_back(beside.tensors, *old, GROUPS)
    for layer in range(len(GROUPS)):
        room.wait_for(layer)
    assert beside.values() == [1]
    assert all((part == 2).all() for part in parts)


@pytest.mark.parametrize("layers", range(len(GROUPS) + 1))
def test_nothing_arrives_behind_a_settlement(
    beside: Scene, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    """However many layers have waited for theirs."""
    room = beside.room
    beside.set(1)
    old = room.copy(beside.tensors)
    room.put_back(beside.tensors, *old, GROUPS)
    room.wait_for(1)  # makes the stream
    room.settle()
    side = room._side
    assert side is not None
    copy_many = side.copy_many

    def copy_late(pairs: list[tuple[Tensor, Tensor]]) -> None:
        side.call(dawdle)
        copy_many(pairs)

    monkeypatch.setattr(side, "copy_many", copy_late)
    room.put_back(beside.tensors, *old, GROUPS)
    for layer in range(layers):
        room.wait_for(layer)
    room.settle()
    beside.set(2)
    side.synchronize()
    assert beside.values() == [2]


def test_a_room_that_closes_waits_first_and_forgets_what_did_not_arrive(
    beside: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, seen = beside.room, list[tuple[str, bool]]()
    old = room.copy(beside.tensors)
    room.put_back(beside.tensors, *old, GROUPS)
    room.wait_for(1)  # makes the stream
    room.settle()
    room.put_back(beside.tensors, *old, GROUPS)
    with monkeypatch.context() as patch:
        for name, stream in (("close", room._side), ("synchronize", beside.stream)):
            see = partial(lambda name: seen.append((name, bool(room._under_way))), name)
            patch.setattr(stream, name, see)
        room.close()
    assert seen == [("close", True), ("synchronize", True)]
    assert not room._under_way
    assert room._waiting is None
