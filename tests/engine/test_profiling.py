"""The expert profile: measured once, kept, and what the cache then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine import profiling
from strata_cli.engine.device.cache_folder import CacheFolder
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.profile import even_profile, load_profile, model_key
from strata_cli.engine.model.tensors import load_model_file
from strata_cli.engine.profiling import find_profile
from strata_cli.errors import ConfigError
from tests.engine.streams import CONTEXT, NUM_EXPERTS, NUM_LAYERS, store_of, write_streamed_model

NUM_SLOTS = 45


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_streamed_model(tmp_path_factory.mktemp("profiled") / "m.gguf", fused=False)


def open_profiled(model: Path, profile: Path | None, **more: Any) -> Engine:
    options: dict[str, Any] = {"device": "host", "threads": 2, "expert_cache": NUM_SLOTS} | more
    return Engine.open(EngineOptions(model=model, expert_profile=profile, **options))


def test_a_named_profile_is_measured_once_and_fills_the_cache(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "use.npz"
    with open_profiled(model, path) as engine:
        first = store_of(engine).cache.pair_in.copy()
    written = path.read_bytes()
    with load_model_file(model) as opened:
        profile = load_profile(path, opened)
    assert profile.use.sum(axis=1).tolist() == [3 * CONTEXT] * NUM_LAYERS  # top_k of each token
    assert first.tolist() == profile.ranking()[:NUM_SLOTS].tolist()
    with open_profiled(model, path) as engine:
        assert (store_of(engine).cache.pair_in == first).all()
    assert path.read_bytes() == written


def test_without_one_the_host_holds_experts_of_every_layer_alike(model: Path) -> None:
    with open_profiled(model, None) as engine:
        is_resident = store_of(engine).cache.is_resident
        assert is_resident.sum(axis=1).tolist() == [12, 11, 11, 11]
        assert is_resident[:, :11].all()


def test_where_all_experts_are_resident_nothing_is_measured(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "use.npz"
    open_profiled(model, path, expert_cache=NUM_EXPERTS * NUM_LAYERS).close()
    open_profiled(model, path, expert_cache=None).close()
    assert not path.exists()


def test_what_earlier_runs_saved_is_kept_where_no_expert_is_cached_now(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "use.npz"
    with open_profiled(model, path) as engine, load_model_file(model) as opened:
        before = load_profile(path, opened).use
        assert engine.residency_counts is not None
    more = {"expert_cache": None, "profile_save": path}
    with open_profiled(model, path, **more) as engine, engine.sequence() as sequence:
        sequence.prefill([5, 6, 7])
        sequence.step(8)
    with load_model_file(model) as opened:
        after = load_profile(path, opened).use
    assert (after >= before).all()
    assert (after - before).sum(axis=1).tolist() == [3] * NUM_LAYERS  # top_k of the step


def test_a_file_that_is_no_profile_of_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "use.npz"
    path.write_bytes(b"no profile")
    with pytest.raises(ConfigError, match=r"use\.npz is damaged"):
        open_profiled(model, path)


def test_a_profile_that_cannot_be_kept_is_used_all_the_same(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_profiled(model, tmp_path / "no folder" / "use.npz") as engine:
        assert len(set(store_of(engine).cache.is_resident.sum(axis=1).tolist())) > 1
    assert "cannot be written" in caplog.text


def test_the_programs_own_profile_is_kept_by_model_and_mended(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(profiling, "open_cache", lambda *_: CacheFolder(tmp_path))
    with load_model_file(model) as opened:
        path = tmp_path / f"{model_key(opened)}.npz"
        known = find_profile(opened, None, keeps_own=True)
        assert known.target == path
        assert np.array_equal(known.profile.use, even_profile(opened).use)
        assert find_profile(opened, None, keeps_own=False).target is None
        path.write_bytes(b"cut off")
        assert find_profile(opened, None, keeps_own=True).target == path
        assert "measuring the use of experts again" in caplog.text
        monkeypatch.setattr(profiling, "open_cache", lambda *_: CacheFolder(None, "no home"))
        assert find_profile(opened, None, keeps_own=True).target is None
        assert "cannot be kept: no home" in caplog.text
