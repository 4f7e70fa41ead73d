"""Blobs and the pinned arena: every matrix where its layout says, with the file's bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.device import filling
from strata_cli.engine.device.base import Device
from strata_cli.engine.device.filling import Rows, fill_rows
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.host_memory import HostBuffer, host_memory
from strata_cli.engine.experts import arena as arena_module
from strata_cli.engine.experts.arena import open_arena, pinned_counts
from strata_cli.engine.experts.blobs import (
    BlobLayout,
    BlobReader,
    arena_bytes,
    blob_layouts,
    slot_bytes,
)
from strata_cli.engine.kernels.weight import WeightLayout
from strata_cli.engine.model.quants import QuantType
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import DeviceError, OutOfMemory
from tests.experts.tiny_store import FORMS, has_expert, open_tiny


@pytest.fixture(params=list(FORMS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelFile]:
    with open_tiny(tmp_path, request.param) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "PIECE_BYTES", 5_000)
    monkeypatch.setattr(filling, "PREFETCHED_BYTES", 100)


def test_the_parts_of_a_blob_do_not_overlap_and_begin_aligned(model: ModelFile) -> None:
    for layer, layout in enumerate(blob_layouts(model)):
        gate, up, down = layout.gate, layout.up, layout.down
        assert gate.offset_bytes == 0
        assert gate.offset_bytes + gate.nbytes <= up.offset_bytes
        assert up.offset_bytes + up.nbytes <= down.offset_bytes
        assert down.offset_bytes + down.nbytes <= layout.nbytes
        assert down.offset_bytes % 256 == layout.nbytes % 256 == 0
        if not model.has_fused_gate_up(layer):
            assert up.offset_bytes % 256 == 0


def test_the_layout_has_the_shapes_and_types_of_the_file(model: ModelFile) -> None:
    spec = model.spec
    for layer, layout in enumerate(blob_layouts(model)):
        width = spec.moe_intermediate_size[layer]
        assert (layout.gate.rows, layout.gate.cols) == (width, spec.hidden_size)
        assert (layout.up.rows, layout.up.cols) == (width, spec.hidden_size)
        assert (layout.down.rows, layout.down.cols) == (spec.hidden_size, width)
        assert layout.down.qtype == model.layer_tensor(layer, "ffn_down_exps.weight").qtype


def test_layers_of_uneven_models_differ(tmp_path: Path) -> None:
    with open_tiny(tmp_path, "uneven") as model:
        layouts = blob_layouts(model)
    assert len({layout.nbytes for layout in layouts}) == 4
    assert slot_bytes(layouts) == max(layout.nbytes for layout in layouts)
    assert arena_bytes(layouts, 6) == 6 * sum(layout.nbytes for layout in layouts)


def test_the_arena_has_every_expert(model: ModelFile, device: Device) -> None:
    calls: list[tuple[int, int]] = []
    layouts = blob_layouts(model)
    with open_arena(model, layouts, device, progress=lambda *c: calls.append(c)) as arena:
        assert arena.is_pinned.all()
        assert arena.pinned_share == 1
        for layer, layout in enumerate(layouts):
            for expert in range(arena.num_experts):
                assert has_expert(model, layer, expert, arena.blob(layer, expert).numpy())
                assert arena.addresses[layer, expert] == (
                    arena.layers[layer].address + expert * layout.nbytes
                )
    done = [done for done, _ in calls]
    assert done == sorted(done)
    assert (
        calls[-1][0]
        == calls[-1][1]
        == sum(info.nbytes for name, info in model.tensors.items() if "_exps" in name)
    )


def test_a_part_of_each_layer_is_pinned(model: ModelFile, device: Device) -> None:
    layouts = blob_layouts(model)
    room = arena_bytes(layouts, 6) * 2 // 3
    with open_arena(model, layouts, device, room) as arena:
        assert arena.is_pinned.sum(axis=1).tolist() == [4, 4, 4, 4]
        assert arena.nbytes <= room
        assert (arena.addresses[:, 4:] == 0).all()
        assert has_expert(model, 2, 3, arena.blob(2, 3).numpy())


def test_nothing_may_be_pinned(model: ModelFile, device: Device) -> None:
    with open_arena(model, blob_layouts(model), device, 0) as arena:
        assert not arena.is_pinned.any()
        assert [layer.shape for layer in arena.layers] == [
            (0, layout.nbytes) for layout in blob_layouts(model)
        ]


def test_single_blobs_are_read_like_the_arena(model: ModelFile) -> None:
    reader = BlobReader(model)
    for layer, layout in enumerate(blob_layouts(model)):
        assert reader.blob_bytes(layer) == layout.nbytes
        for expert in range(6):
            blob = np.zeros(layout.nbytes, np.uint8)
            reader.read(layer, expert, blob)
            assert has_expert(model, layer, expert, blob)


@given(
    num_layers=st.integers(1, 5),
    num_experts=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    share=st.floats(0, 1.2),
)
def test_what_is_pinned_fits_the_room_and_uses_it(
    num_layers: int, num_experts: int, sizes: list[int], share: float
) -> None:
    matrix = WeightLayout(QuantType.F32, 1, 1, 0)
    layouts = [BlobLayout(matrix, matrix, matrix, 256 * n) for n in sizes[:num_layers]]
    whole = arena_bytes(layouts, num_experts)
    room = int(share * whole)
    counts = pinned_counts(layouts, num_experts, room)
    taken = sum(layout.nbytes * n for layout, n in zip(layouts, counts, strict=True))
    assert taken <= max(room, 0)
    one_more = sum(layout.nbytes for layout in layouts)
    assert taken + one_more > room or counts == [num_experts] * num_layers
    assert pinned_counts(layouts, num_experts, None) == [num_experts] * num_layers


class LockedOut(HostDevice):
    """May lock so many buffers and no more."""

    def __init__(self, most: int) -> None:
        super().__init__(1)
        self.left = most
        self.given: list[HostBuffer] = []

    def allocate_pinned(self, nbytes: int) -> HostBuffer:
        if not self.left:
            raise OutOfMemory("cannot page-lock host memory")
        self.left -= 1
        self.given.append(super().allocate_pinned(nbytes))
        return self.given[-1]


def assert_closed(buffers: list[HostBuffer]) -> None:
    for buffer in buffers:
        with pytest.raises(DeviceError, match="closed"):
            _ = buffer.address


def test_a_refused_lock_names_need_limit_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "LOCK_THREADS", 1)  # so that it is known who gets what
    with open_tiny(tmp_path) as model, LockedOut(2) as device:
        layouts = blob_layouts(model)
        with pytest.raises(OutOfMemory) as error:
            open_arena(model, layouts, device)
        need = arena_bytes(layouts, 6)
        locked = 6 * (layouts[0].nbytes + layouts[1].nbytes)
        assert f"need {need} bytes, locked {locked} bytes" in error.value.message
        assert "RLIMIT_MEMLOCK" in error.value.message
        assert "cannot page-lock host memory" in error.value.message
        assert "ulimit -l" in error.value.hint
        assert "LimitMEMLOCK=" in error.value.hint
        assert_closed(device.given)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_refused_lock_gives_back_what_other_threads_got(tmp_path: Path, most: int) -> None:
    with open_tiny(tmp_path) as model, LockedOut(most) as device:
        with pytest.raises(OutOfMemory, match="cannot page-lock"):
            open_arena(model, blob_layouts(model), device)
        assert len(device.given) <= most
        assert_closed(device.given)


class LastWaits(HostDevice):
    """Gives the fourth buffer only when something has been read into another."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_given = 0
        self.is_read = threading.Event()

    def allocate_pinned(self, nbytes: int) -> HostBuffer:
        self.num_given += 1
        if self.num_given == 4:
            assert self.is_read.wait(20), "nothing was read"
        return super().allocate_pinned(nbytes)


def test_layers_are_read_while_others_are_still_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = filling._copy_rows

    def noted(piece: Rows) -> int:
        device.is_read.set()
        return copy(piece)

    monkeypatch.setattr(filling, "_copy_rows", noted)
    with (
        open_tiny(tmp_path) as model,
        LastWaits() as device,
        open_arena(model, blob_layouts(model), device) as arena,
    ):
        assert has_expert(model, 3, 5, arena.blob(3, 5).numpy())


def test_an_interrupt_while_memory_is_locked_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(parts: Iterator[Rows], _progress: object) -> None:
        next(parts)
        raise KeyboardInterrupt

    monkeypatch.setattr(arena_module, "fill_rows", interrupted)
    with open_tiny(tmp_path) as model, LockedOut(9) as device:
        with pytest.raises(KeyboardInterrupt):
            open_arena(model, blob_layouts(model), device)
        assert device.given
        assert_closed(device.given)


def test_more_than_the_machine_has_is_refused_before_anything_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = host_memory()._replace(free_bytes=1000)
    monkeypatch.setattr(arena_module, "host_memory", lambda: memory)
    refusal = pytest.raises(OutOfMemory, match="locked 0 bytes, available 1000 bytes of")
    with open_tiny(tmp_path) as model, LockedOut(0) as device, refusal:
        open_arena(model, blob_layouts(model), device)


def test_rows_are_copied_in_pieces_whatever_their_size() -> None:
    rng = np.random.default_rng(3)
    sources = [rng.integers(0, 256, (n, w), np.uint8) for n, w in [(9, 700), (3, 9_000), (0, 5)]]
    out = [np.zeros((len(source) + 1, source.shape[1] + 7), np.uint8) for source in sources]
    done: list[int] = []
    parts = [Rows(o[:-1, 3:-4], s) for o, s in zip(out, sources, strict=True)]
    fill_rows(parts, done.append)
    assert sum(done) == sum(source.nbytes for source in sources)
    for room, source in zip(out, sources, strict=True):
        assert (room[:-1, 3:-4] == source).all()
        assert room.sum() == source.sum()


def test_a_file_that_was_cut_is_an_error_and_no_crash(tmp_path: Path, device: Device) -> None:
    with open_tiny(tmp_path, "separate", experts_count=64, hidden=96, ff=32) as model:
        os.truncate(tmp_path / "tiny.gguf", 8_192)
        with pytest.raises(DeviceError, match="cannot read"):
            open_arena(model, blob_layouts(model), device)
        reader = BlobReader(model)
        with pytest.raises(DeviceError, match="cannot read"):
            reader.read(3, 63, np.zeros(reader.blob_bytes(3), np.uint8))
