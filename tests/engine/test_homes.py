"""Where weights lie: no bit depends on it, and what does not fit says so before it is loaded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine import opening, profiling
from strata_cli.engine.device.base import Device, Kernel, MemoryInfo
from strata_cli.engine.device.cache_folder import CacheFolder
from strata_cli.engine.device.host import HostDevice
from strata_cli.engine.device.host_memory import HostBuffer
from strata_cli.engine.device.host_stream import HostStream
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.outline import Needs, Outline, Sizes
from strata_cli.engine.forward.placing import Placement
from strata_cli.engine.forward.planning import Homes, TableHome, Wishes, plan_model
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.errors import DeviceError, OutOfMemory
from tests.engine.readings import TEXT, Reading, assert_same, open_engine, read_in_parts

SIZES = Sizes(context_tokens=300, chunk_tokens=64)
DEFAULT_PLACEMENT = Placement()
MAPPED_TABLE = Placement(is_table_mapped=True)
CACHED = Placement(ExpertHome.CACHED, is_table_mapped=True)


@pytest.fixture(scope="module")
def host_reading(model: Path) -> Reading:
    """Every token of TEXT, read on the host."""
    with open_engine(model, device="host") as engine:
        return read_in_parts(engine, [TEXT])


@pytest.mark.parametrize("table", [TableHome.DEVICE, TableHome.MAPPED])
@pytest.mark.parametrize("experts", ExpertHome)
def test_no_bit_depends_on_where_weights_lie(
    model: Path, device_name: str, whole: Reading, experts: ExpertHome, table: TableHome
) -> None:
    homes = Homes(experts=experts, ngram_table=table)
    with open_engine(model, device=device_name, homes=homes) as engine:
        assert_same(read_in_parts(engine, [TEXT]), whole)
        with engine.sequence() as sequence:
            logits = np.stack([sequence.step(token) for token in TEXT[:20]])
            assert np.array_equal(logits, whole.logits[:20])


class OwnMemory(HostDevice):
    """A host that claims to be a device with memory of its own, and keeps accounts.

    Attributes:
        free_bytes: what it says it has free.
        given: every buffer of its own memory.
        pinned_bytes: the sizes of page-locked buffers, in order.
        prepared: kernels made ready ahead.
        launched: kernels launched.
    """

    def __init__(self, free_bytes: int = 1 << 30) -> None:
        super().__init__(1)
        self.free_bytes = free_bytes
        self.given: list[HostBuffer] = []
        self.pinned_bytes: list[int] = []
        self.prepared: set[Kernel] = set()
        self.launched: set[Kernel] = set()

    @property
    def has_own_memory(self) -> bool:
        return True

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self.free_bytes, 1 << 31)

    def allocate(self, nbytes: int) -> HostBuffer:
        self.given.append(super().allocate(nbytes))
        return self.given[-1]

    def allocate_pinned(self, nbytes: int) -> HostBuffer:
        self.pinned_bytes.append(nbytes)
        return super().allocate_pinned(nbytes)

    def prepare(
        self, kernels: Iterable[Kernel], compiling: Callable[[int], None] | None = None
    ) -> None:
        self.prepared.update(kernels)
        if compiling is not None:
            compiling(len(self.prepared))

    def stream(self, name: str) -> HostStream:
        stream = super().stream(name)
        launch = stream.launch

        def noted(kernel: Kernel, *args: Any) -> None:
            self.launched.add(kernel)
            launch(kernel, *args)

        stream.launch = noted  # type: ignore[assignment, method-assign]  # a note before every launch
        return stream


@pytest.fixture
def device() -> Iterator[OwnMemory]:
    with OwnMemory() as device:
        yield device


def needs_of(path: Path, device: Device, placement: Placement = DEFAULT_PLACEMENT) -> Needs:
    with load_model_file(path) as model:
        return Outline(model, device, device.stream("outline"), SIZES, placement).needs


@contextmanager
def opened_on(
    monkeypatch: pytest.MonkeyPatch, path: Path, device: OwnMemory, **more: Any
) -> Iterator[Engine]:
    monkeypatch.setattr(opening, "open_device", lambda *_, **__: device)
    options = EngineOptions(
        model=path, prefill=SIZES.chunk_tokens, max_context=SIZES.context_tokens
    )
    with Engine.open(options, **more) as engine:
        yield engine


def test_weights_are_copied_to_a_device_with_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory, host_reading: Reading
) -> None:
    total = needs_of(model, device).weights
    progress: list[tuple[int, int]] = []
    notices: list[str] = []
    more = {"progress": lambda *done: progress.append(done), "notice": notices.append}
    with opened_on(monkeypatch, model, device, **more) as engine:
        assert_same(read_in_parts(engine, [TEXT]), host_reading)
    assert progress[-1] == (total, total)
    assert progress == sorted(progress)
    assert any("kernels for" in notice for notice in notices)


def test_the_outline_is_what_is_allocated(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory
) -> None:
    needs = needs_of(model, device)
    assert not device.given
    with opened_on(monkeypatch, model, device) as engine:
        of_engine = [buffer.nbytes for buffer in device.given]
        assert of_engine == [needs.weights, pytest.approx(needs.workspace, abs=20_000)]
        with engine.sequence():
            of_state = [-(-buffer.nbytes // 512) * 512 for buffer in device.given[2:]]
            assert sum(of_state) == needs.state


def test_every_kernel_of_a_pass_was_prepared(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory
) -> None:
    with opened_on(monkeypatch, model, device) as engine, engine.sequence() as sequence:
        device.launched.clear()
        for length in (1, 2, 31, 33, 64, 100):
            sequence.prefill(TEXT[:length], logits="all")
            sequence.reset()
        sequence.step(5)
        assert device.launched
        assert device.launched <= device.prepared


def test_what_does_not_fit_is_told_part_by_part_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory
) -> None:
    device.free_bytes = needs_of(model, device, CACHED).device - 1
    parts = "need .* weights .* expert cache .* context of 300 .* chunks of 64 .* free .* of 2"
    with (
        pytest.raises(OutOfMemory, match=parts.replace(" ", r"[\s(]+")) as caught,
        opened_on(monkeypatch, model, device),
    ):
        pass
    assert "--max-context" in caught.value.hint
    assert not device.given
    assert not device.pinned_bytes


def test_contexts_that_do_not_fit_the_host_together_are_told_before_one_is_used(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """Each by itself would be given: memory is only taken when it is written to."""

    def open_with(free_bytes: int, **more: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(HostDevice, "memory", lambda _: MemoryInfo(free_bytes, 1 << 40))
            options = EngineOptions(model=model, device="host", max_context=300)
            Engine.open(replace(options, compile_ahead=False, **more)).close()

    with HostDevice() as host, load_model_file(model) as file:
        one, three = (
            plan_model(file, host, host.stream("x"), Wishes(300, num_sequences=count))
            for count in (1, 3)
        )
    assert one.host_bytes < three.host_bytes
    open_with(one.host_bytes)
    with pytest.raises(OutOfMemory, match="3 contexts of 300 tokens") as caught:
        open_with(three.host_bytes - 1, num_sequences=3)
    assert "--parallel, --max-context" in caught.value.hint
    with pytest.raises(OutOfMemory, match=r"besides the file \(experts "):
        open_with(one.host_bytes, expert_cache=4)


def test_the_table_is_mapped_when_it_does_not_fit_beside_the_rest(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: Path,
    device: OwnMemory,
    host_reading: Reading,
) -> None:
    caplog.set_level(logging.INFO)
    mapped = needs_of(model, device, MAPPED_TABLE)
    device.free_bytes = needs_of(model, device).device - 1
    with opened_on(monkeypatch, model, device) as engine:
        assert device.pinned_bytes[0] == mapped.mapped > 0
        assert device.given[0].nbytes == mapped.weights
        assert_same(read_in_parts(engine, [TEXT]), host_reading)
    assert "n-gram table stays in host memory" in caplog.text


def test_experts_are_cached_when_they_do_not_fit_beside_the_rest(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory, host_reading: Reading
) -> None:
    monkeypatch.setattr(profiling, "open_cache", lambda *_: CacheFolder(None, "a test"))
    device.free_bytes = needs_of(model, device, MAPPED_TABLE).device - 1
    with opened_on(monkeypatch, model, device) as engine:
        assert engine._streamer is not None
        assert_same(read_in_parts(engine, [TEXT]), host_reading)
        assert sum(buffer.nbytes for buffer in device.given) <= device.free_bytes


def test_host_memory_too_small_for_the_mapped_weights_is_told(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory
) -> None:
    def refuse(nbytes: int) -> HostBuffer:
        raise OutOfMemory(f"need {nbytes}")

    monkeypatch.setattr(device, "allocate_pinned", refuse)
    device.free_bytes = needs_of(model, device).device - 1
    with (
        pytest.raises(OutOfMemory, match="stay in host memory do not fit there: need") as caught,
        opened_on(monkeypatch, model, device),
    ):
        pass
    assert "--vram-bytes" in caught.value.hint
    assert not device.given


def test_an_interrupted_load_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch, model: Path, device: OwnMemory
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with (
        pytest.raises(KeyboardInterrupt),
        opened_on(monkeypatch, model, device, progress=interrupt),
    ):
        pass
    assert device.given
    for buffer in device.given:
        with pytest.raises(DeviceError, match="closed"):
            _ = buffer.address
    assert set(threading.enumerate()) <= before


def test_chunks_grow_with_the_memory(model: Path, device: OwnMemory) -> None:
    """The least memory holds the model with its table mapped and the smallest chunk."""
    with load_model_file(model) as opened:
        stream = device.stream("outline")
        small = Outline(opened, device, stream, Sizes(1_000, 512), MAPPED_TABLE).needs.device
        chunks, mapped = [], []
        for factor in (1, 2, 4, 16, 1_024):
            device.free_bytes = small * factor
            plan = plan_model(opened, device, stream, Wishes(1_000))
            chunks.append(plan.sizes.chunk_tokens)
            mapped.append(plan.placement.is_table_mapped)
        assert chunks == sorted(chunks)
        assert (chunks[0], chunks[-1]) == (512, 1_000)
        assert (mapped[0], mapped[-1]) == (True, False)
        assert plan_model(opened, device, stream, Wishes(100)).sizes == Sizes(100, 100)
        assert plan_model(opened, device, stream, Wishes(1_000, 70)).sizes == Sizes(1_000, 70)
