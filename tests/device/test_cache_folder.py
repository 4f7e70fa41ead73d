"""Where compiled code may be kept: only in a folder that nobody else can have written to."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strata_cli.engine.device.cache_folder import open_cache

FALLBACK = f"strata-cache-{os.geteuid()}"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, which is used where neither XDG's nor a home's can be."""
    blocked, folder = tmp_path / "file", tmp_path / "tmp"
    blocked.write_text("no folder can be made in a file")
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked / "cache"))
    monkeypatch.setenv("HOME", str(blocked / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_every_folder_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        folder, problem = open_cache("one", "two")
    finally:
        os.umask(before)
    assert (folder, problem) == (tmp_path / "cache" / "strata" / "one" / "two", "")
    assert folder is not None
    assert list(folder.iterdir()) == []
    for level in (folder, *folder.parents[:3]):
        assert permissions(level) == 0o700
    assert open_cache("one", "two").path == folder


@pytest.mark.parametrize("xdg", [None, "", "relative/cache"])
def test_without_an_absolute_xdg_folder_the_home_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdg: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert open_cache("x").path == tmp_path / ".cache" / "strata" / "x"


def test_a_relative_home_is_no_place_for_code(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(temporary)
    monkeypatch.setenv("HOME", ".")
    assert open_cache("x").path == temporary / FALLBACK / "x"


def test_without_a_home_a_private_temporary_folder_is_used(temporary: Path) -> None:
    assert open_cache("x").path == temporary / FALLBACK / "x"
    assert permissions(temporary / FALLBACK) == 0o700


def plant_link(folder: Path) -> None:
    target = folder.with_name("elsewhere")
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def plant_file(folder: Path) -> None:
    folder.write_text("")


def plant_open(mode: int) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        folder.mkdir()
        folder.chmod(mode)

    return plant


PLANTED = [
    (plant_link, "is a link"),
    (plant_file, "is not a folder"),
    (plant_open(0o777), "others may write to it (mode 0777)"),
    (plant_open(0o720), "others may write to it (mode 0720)"),
]


@pytest.mark.parametrize(("plant", "reason"), PLANTED)
@pytest.mark.parametrize("level", ["", "kernels"])
def test_a_folder_that_others_may_have_written_to_is_not_used(
    temporary: Path, plant: Callable[[Path], None], reason: str, level: str
) -> None:
    planted = temporary / FALLBACK / level
    planted.parent.mkdir(mode=0o700, exist_ok=True)
    plant(planted)
    folder, problem = open_cache("kernels")
    assert folder is None
    assert problem.endswith(f"{planted}: {reason}")
    assert problem.isprintable()


def test_a_folder_of_somebody_else_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid()
    assert open_cache("x").path is not None
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    (temporary / FALLBACK).rename(temporary / f"strata-cache-{owner + 1}")
    folder, problem = open_cache("x")
    assert folder is None
    assert problem.endswith(f"strata-cache-{owner + 1}: belongs to user {owner}")


@pytest.mark.parametrize(("mode", "is_used"), [(0o777, False), (0o1777, True), (0o775, True)])
def test_a_folder_in_which_anybody_may_rename_is_no_place(
    temporary: Path, mode: int, is_used: bool
) -> None:
    temporary.chmod(mode)
    assert (open_cache("x").path is not None) is is_used


def test_an_unsafe_cache_is_passed_over_for_a_safe_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = temporary / "shared"
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared))
    plant_open(0o777)(shared)
    assert open_cache("x").path == temporary / FALLBACK / "x"


def test_a_full_disk_is_noticed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, **_: Any) -> None: ...
        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None: ...
        def write(self, _data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", Full)
    folder, problem = open_cache("x")
    assert folder is None
    assert problem.endswith(f"{temporary / FALLBACK}: No space left on device")
