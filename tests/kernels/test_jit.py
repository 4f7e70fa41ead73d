"""The cache of compiled host kernels: what cannot be kept costs a warning, never the result."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import numba
import pytest
from numba.core import caching

from strata_cli.engine.device.cache_folder import CacheFolder
from strata_cli.engine.kernels import jit

C_SIGNATURE = numba.int64(numba.int64)


def double(x: int) -> int:
    return 2 * x


def triple(x: int) -> int:
    return 3 * x


def call_jit(function: Callable[[int], int]) -> int:
    return jit.nogil_jit(function)(7)


def call_c(function: Callable[[int], int]) -> int:
    return int(jit.c_function(C_SIGNATURE, function).ctypes(7))


WAYS = pytest.mark.parametrize("call", [call_jit, call_c])


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(jit, "_CACHE", CacheFolder(folder))
    monkeypatch.setattr(jit, "_COMPLETE", folder / "complete")
    monkeypatch.setattr(jit, "_keeper", jit._Keeper(""))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(folder))
    return folder


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.nb?"))


@WAYS
def test_what_was_compiled_is_found_again(folder: Path, call: Callable[..., int]) -> None:
    assert call(double) == 14
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")}
    assert len(before) == 2
    assert call(double) == 14
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.nb?")} == before
    assert jit.is_cold()
    jit.keep_as_complete()
    assert not jit.is_cold()
    assert not jit.why_uncached()


@WAYS
@pytest.mark.parametrize("step", ["_save_index", "_save_data"])
def test_a_full_disk_costs_one_warning(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: Callable[..., int],
    step: str,
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, step, fill)
    assert (call(double), call(triple), call(double)) == (14, 21, 14)
    problem = f"{folder}: No space left on device"
    assert caplog.messages == [f"compiled kernels cannot be kept for later starts: {problem}"]
    assert jit.why_uncached() == problem
    jit.keep_as_complete()
    assert jit.is_cold()
    assert not (folder / "complete").exists()


@WAYS
def test_without_a_place_numba_looks_for_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., int]
) -> None:
    monkeypatch.setattr(jit, "_keeper", jit._Keeper("/x: is a link"))
    monkeypatch.setattr(caching.FunctionCache, "__init__", None)  # nobody may make one
    assert call(double) == 14
    assert jit.is_cold()
    assert files(folder) == []


@WAYS
def test_a_folder_that_went_away_costs_one_warning(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: Callable[..., int],
) -> None:
    folder.rmdir()
    folder.write_text("now a file")
    only = [caching.UserProvidedCacheLocator]  # as where the package is read-only, too
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", only)
    assert (call(double), call(triple)) == (14, 21)
    assert len(caplog.messages) == 1
    assert str(folder) in caplog.text


@WAYS
@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_a_damaged_file_is_compiled_again_and_mended(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    call: Callable[..., int],
    suffix: str,
    share: float,
) -> None:
    assert call(double) == 14
    (path,) = folder.rglob(f"*.{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with caplog.at_level(logging.WARNING):
        assert call(double) == 14
    assert len(caplog.messages) == 1
    assert "damaged kernels in" in caplog.text
    caplog.clear()
    assert (call(double), call(double)) == (14, 14)
    assert caplog.messages == []
    assert not jit.why_uncached()


@WAYS
def test_an_entry_that_cannot_be_read_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., int]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    assert call(double) == 14
    monkeypatch.setattr(caching.IndexDataCacheFile, "load", refuse)
    assert call(double) == 14
