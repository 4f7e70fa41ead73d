"""The survey of GPUs, against a driver that keeps accounts and a tool with set answers."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from strata_cli.engine.device import cuda_pinned, gpu_survey
from strata_cli.engine.device.cuda import CudaDevice
from strata_cli.engine.device.gpu_survey import Holder, measure_link, survey_gpus
from strata_cli.errors import OutOfMemory
from tests.device.fake_driver import FakeDriver, Result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    bindings = ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]  # a stand-in for the real module
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(gpu_survey, "LINK_BYTES", 1 << 20)
    return driver


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gpu = tmp_path / "gpus" / "0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA Fake\nIRQ:   \t\t 12\n", "utf-8")
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    (tmp_path / "version").write_text(f"{line}GCC version:  gcc version 12.2.0\n", "utf-8")
    return tmp_path


class Tool:
    """nvidia-smi, with the answers of a test."""

    def __init__(self, apps: str = "", link: str = "") -> None:
        self.apps, self.link = apps, link
        self.asked: list[Sequence[str]] = []

    def __call__(self, arguments: Sequence[str]) -> str:
        self.asked.append(arguments)
        return self.apps if "compute-apps" in arguments[1] else self.link


def test_every_gpu_is_described_with_who_uses_it(driver: FakeDriver, folder: Path) -> None:
    driver.num_gpus = 2
    driver.memory_bytes = 24 << 30
    tool = Tool("812, /usr/bin/python3, a.py, 20312\n913, game, [N/A]\n", "4, 8, 16, Enabled\n")
    survey = survey_gpus(folder, tool)
    assert (survey.driver, survey.seen, survey.problem) == ("580.65.06", ("NVIDIA Fake",), "")
    first, second = survey.gpus
    assert (first.name, first.capability, first.total_bytes) == ("Fake GPU", (9, 0), 24 << 30)
    assert first.holders == (
        Holder(812, "/usr/bin/python3, a.py", 20312 << 20),
        Holder(913, "game", 0),
    )
    assert first.drives_display is True
    assert [gpu.ordinal for gpu in survey.gpus] == [0, 1]
    assert second.problem == ""
    assert {arguments[0] for arguments in tool.asked} == {"--id=0000:1b:00.0", "--id=0000:1c:00.0"}
    assert not driver.allocated


def test_a_tool_that_is_missing_leaves_gaps(driver: FakeDriver, folder: Path) -> None:
    (gpu,) = survey_gpus(folder, Tool()).gpus
    assert (gpu.holders, gpu.drives_display) == ((), None)


def test_one_old_gpu_does_not_hide_a_usable_one(driver: FakeDriver, folder: Path) -> None:
    driver.num_gpus = 2
    answers = iter([(6, 1), (9, 0)])
    capability = driver._values["cuDeviceGetAttribute"]

    def next_capability(key: object, handle: int) -> tuple[object, ...]:
        if getattr(key, "name", "") == "major":
            driver.capability = next(answers)
        return capability(key, handle)

    driver._values["cuDeviceGetAttribute"] = next_capability
    survey = survey_gpus(folder, Tool())
    assert survey.problem == ""
    assert "compute capability 6.1" in survey.gpus[0].problem
    assert survey.gpus[1].problem == ""


@pytest.mark.parametrize(
    ("version", "num_gpus", "problem"),
    [(12_040, 1, "CUDA 12.4, need 13.0"), (13_000, 0, "lists no GPU")],
)
def test_what_keeps_all_from_use_is_said_with_what_was_seen(
    driver: FakeDriver, folder: Path, version: int, num_gpus: int, problem: str
) -> None:
    driver.version, driver.num_gpus = version, num_gpus
    survey = survey_gpus(folder, Tool())
    assert survey.gpus == ()
    assert problem in survey.problem
    assert survey.hint
    assert survey.seen == ("NVIDIA Fake",)


def test_a_gpu_in_exclusive_use_is_no_surprise(driver: FakeDriver, folder: Path) -> None:
    driver.answers["cuDevicePrimaryCtxRetain"] = [Result.CUDA_ERROR_INVALID_VALUE]
    (gpu,) = survey_gpus(folder, Tool()).gpus
    assert "cuDevicePrimaryCtxRetain(cuda:0)" in gpu.problem


def test_the_link_is_measured_and_everything_given_back(driver: FakeDriver, folder: Path) -> None:
    (gpu,) = survey_gpus(folder, Tool()).gpus
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    link = measure_link(gpu, Tool(link="5, 16, 16, Disabled\n")).link
    assert link is not None
    assert link.read_gbps == pytest.approx((1 << 20) / 1.5e6)  # every event is 1.5 ms apart
    assert (link.generation, link.width, link.most_width) == (5, 16, 16)
    assert link.locks_beyond_limit is True
    assert not driver.allocated
    assert not driver.registered
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before


def test_a_driver_that_asks_for_the_memlock_limit_is_found_out(
    driver: FakeDriver, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def refuse(*_: object) -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
        raise OutOfMemory("no")

    (gpu,) = survey_gpus(folder, Tool()).gpus
    allocate = CudaDevice.allocate_pinned

    def once(device: CudaDevice, nbytes: int) -> cuda_pinned.PinnedBuffer:
        if nbytes == gpu_survey.BEYOND_BYTES:
            refuse()
        return allocate(device, nbytes)

    monkeypatch.setattr(CudaDevice, "allocate_pinned", once)
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    link = measure_link(gpu, Tool()).link
    assert link is not None
    assert link.locks_beyond_limit is False
    assert limits == [0]
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before


@pytest.mark.gpu
def test_a_real_gpu_is_described_and_left_as_it_was() -> None:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    survey = survey_gpus()
    if not survey.gpus:
        pytest.skip(survey.problem)
    gpu = survey.gpus[0]
    assert gpu.problem == ""
    assert gpu.capability >= (7, 5)
    assert 0 < gpu.free_bytes <= gpu.total_bytes
    assert gpu.num_multiprocessors > 0
    assert os.getpid() not in {holder.pid for holder in gpu.holders}
    link = measure_link(gpu).link
    assert link is not None
    assert link.read_gbps > 0
    assert link.locks_beyond_limit is not None
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before
    again = survey_gpus().gpus[0]
    assert abs(again.free_bytes - gpu.free_bytes) < 1 << 30
