"""Limits of control groups, as a container or a service sets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_cli.engine.device import host as host_module
from strata_cli.engine.device import host_memory as host_memory_module
from strata_cli.engine.device.base import MemoryInfo
from strata_cli.engine.device.cgroup import cgroup_memory, cgroup_processors
from strata_cli.engine.device.host import usable_threads
from strata_cli.engine.device.host_memory import host_memory


def write_group(group: Path, allowed: str, used: int = 0, files: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{allowed}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\nactive_file {files}\ninactive_file {files}\n")


def look(mount: Path, own: str) -> MemoryInfo | None:
    membership = mount / "membership"
    membership.write_text(f"4:memory:/old\n{own}\n")
    return cgroup_memory(mount, membership)


def test_the_strictest_group_on_the_way_counts(tmp_path: Path) -> None:
    write_group(tmp_path, "900", used=10)
    write_group(tmp_path / "a", "1000", used=700, files=50)
    write_group(tmp_path / "a" / "b", "max", used=5)
    assert look(tmp_path, "0::/a/b") == (400, 1000)
    assert look(tmp_path, "0::/") == (890, 900)
    write_group(tmp_path / "a" / "b", "100", used=170)
    assert look(tmp_path, "0::/a/b") == (0, 100)


@pytest.mark.parametrize("own", ["0::/", "0::/a", "0::/gone/away", "1:name=systemd:/", ""])
def test_without_a_limit_there_is_none(tmp_path: Path, own: str) -> None:
    write_group(tmp_path / "a", "max")
    assert look(tmp_path, own) is None
    assert cgroup_memory(tmp_path, tmp_path / "nowhere") is None


def test_a_machine_has_no_more_than_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host_memory()
    assert 0 < whole.free_bytes <= whole.total_bytes
    small = MemoryInfo(free_bytes=5, total_bytes=10)
    monkeypatch.setattr(host_memory_module, "cgroup_memory", lambda: small)
    assert host_memory() == small
    monkeypatch.setattr(host_memory_module, "cgroup_memory", lambda: MemoryInfo(1 << 60, 1 << 60))
    assert host_memory().total_bytes == whole.total_bytes


def test_time_is_limited_by_the_strictest_group(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n")
    assert cgroup_processors(tmp_path, membership) is None
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert cgroup_processors(tmp_path, membership) is None
    (tmp_path / "a" / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "cpu.max").write_text("800000 100000\n")
    assert cgroup_processors(tmp_path, membership) == 2.5
    assert cgroup_processors(tmp_path, tmp_path / "nowhere") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (2.5, 3), (0.2, 1), (64.0, 8)])
def test_no_more_threads_than_the_container_has_time_for(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host_module, "cgroup_processors", lambda: quota)
    assert usable_threads() == expected
