"""The probes, on this machine and on folders that look like another."""

from __future__ import annotations

import os
import re
import resource
import socket
import tomllib
from pathlib import Path

import pytest

from strata_cli.engine.device.gpu_survey import GpuFacts, GpuSurvey
from strata_cli.errors import DeviceError
from strata_cli.launch import disk_probe, probing
from strata_cli.launch.disk_probe import probe_disk, read_rate
from strata_cli.launch.host_probes import (
    SERVER_PACKAGES,
    probe_memlock,
    probe_processor,
    probe_software,
)
from strata_cli.launch.machine import NO_LIMIT, Memlock
from strata_cli.launch.port_probe import probe_port
from strata_cli.launch.probing import probe_machine
from strata_cli.models import DEMO_MODEL_PATH
from tests.launch.made_up import a_gpu


def test_this_machine_can_be_looked_at() -> None:
    machine = probe_machine(DEMO_MODEL_PATH, "127.0.0.1", 0, device="host")
    assert 1 <= machine.processor.num_usable <= machine.processor.num_cores
    assert 0 < machine.memory.free_bytes <= machine.memory.total_bytes
    assert machine.disk.free_bytes > 0
    assert machine.port.problem == ""
    assert machine.gpus.gpus == ()


def test_the_link_of_the_gpu_that_would_be_used_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = (a_gpu(free_bytes=5, link=None), a_gpu(ordinal=1, link=None), a_gpu(problem="old"))
    measured: list[int] = []

    def measure(gpu: GpuFacts) -> GpuFacts:
        measured.append(gpu.ordinal)
        if gpu.ordinal == 0:
            raise DeviceError("full")
        return a_gpu(ordinal=1)

    monkeypatch.setattr(probing, "survey_gpus", lambda: GpuSurvey(gpus=gpus))
    monkeypatch.setattr(probing, "measure_link", measure)
    found = probe_machine(DEMO_MODEL_PATH, "127.0.0.1", 0).gpus.gpus
    assert [gpu.link is None for gpu in found] == [True, False, False]
    found = probe_machine(DEMO_MODEL_PATH, "127.0.0.1", 0, device="cuda:0").gpus.gpus
    assert found == gpus
    assert measured == [1, 0]
    assert probe_machine(DEMO_MODEL_PATH, "127.0.0.1", 0, device="cuda:7").gpus.gpus == gpus


def test_a_processor_is_read_from_the_kernels_list(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Made-Up 9000\nflags\t\t: fpu avx2\n\n" * 2)
    name, _, _, features = probe_processor(cpuinfo)
    assert (name, features) == ("Made-Up 9000", frozenset({"fpu", "avx2"}))
    cpuinfo.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert probe_processor(cpuinfo).features == {"fp", "asimd"}


@pytest.mark.parametrize(("mask", "is_exempt"), [("0000000000004000", True), ("0", False)])
def test_locked_memory_has_a_limit_or_a_privilege(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str, is_exempt: bool
) -> None:
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{mask}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, resource.RLIM_INFINITY))
    limit = probe_memlock(status)
    assert limit == Memlock(1 << 20, NO_LIMIT, is_exempt)
    assert limit.reachable_bytes == NO_LIMIT


def test_software_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("json", "no_such_thing", "nowhere.at_all")
    monkeypatch.setattr("strata_cli.launch.host_probes.SERVER_PACKAGES", names)
    software = probe_software(tmp_path / "systemd")
    assert software.missing == names[1:]
    assert not software.has_systemd


def test_all_that_the_servers_extra_has_is_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    extra = project["project"]["optional-dependencies"]["serve"]
    names = {re.split("[ >=;]", line)[0].replace("-", "_") for line in extra}
    assert {*SERVER_PACKAGES} | {"backports.zstd"} == names


def test_a_disk_tells_how_it_reads_and_whether_it_turns(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(bytes(disk_probe.LEAST_BYTES + 5))
    device = file.stat().st_dev
    queue = tmp_path / "sys" / "disk" / "queue"
    queue.mkdir(parents=True)
    (queue / "rotational").write_text("1\n")
    partition = queue.parent / "part1"
    partition.mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / f"{os.major(device)}:{os.minor(device)}").symlink_to(partition)
    disk = probe_disk(file, tmp_path / "dev")
    assert disk.is_rotational is True
    assert disk.read_gbps is None or disk.read_gbps > 0
    assert probe_disk(file, tmp_path / "nothing").is_rotational is None
    file.write_bytes(b"small")
    assert read_rate(file) is None


def test_a_file_system_without_direct_reads_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model"
    file.write_bytes(bytes(disk_probe.LEAST_BYTES))

    def refuse(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "open", refuse)
    assert read_rate(file) is None


def test_a_taken_port_names_its_holder_and_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = probe_port("127.0.0.1", port)
        assert found.problem == os.strerror(98)
        assert found.pid == os.getpid()
        assert found.holder.startswith(f"process {os.getpid()} (")
        assert found.free_port == 0 or found.free_port > port
    assert probe_port("127.0.0.1", port).problem == ""


def test_a_holder_that_may_not_be_known_is_left_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = probe_port("127.0.0.1", server.getsockname()[1], tmp_path)
    assert (found.pid, found.holder) == (0, "")
    assert found.problem


@pytest.mark.parametrize("host", ["203.0.113.7", "a" * 70])
def test_an_address_that_is_not_here_is_a_problem(host: str) -> None:
    found = probe_port(host, 0)
    assert found.problem
