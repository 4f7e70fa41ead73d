"""Expert profiles: rankings, learning, and files that may be anything."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from strata_cli.engine.experts.profile import (
    ExpertProfile,
    even_profile,
    load_profile,
    model_key,
    save_profile,
)
from strata_cli.engine.model.tensors import ModelFile, load_model_file
from strata_cli.errors import ConfigError, ShapeError
from tests.experts.tiny_store import open_tiny


def some_profile(model: ModelFile) -> ExpertProfile:
    use = np.random.default_rng(2).integers(0, 50, (4, 6))
    return even_profile(model).plus(use)


USES = arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.integers(0, 3))


@given(use=USES)
def test_a_ranking_has_every_pair_once_and_falls_in_use(use: NDArray[np.int64]) -> None:
    ranking = ExpertProfile("", use.astype(np.float64)).ranking()
    assert sorted(ranking.tolist()) == list(range(use.size))
    assert (np.diff(use.reshape(-1)[ranking]) <= 0).all()


@given(num_layers=st.integers(1, 6), num_experts=st.integers(1, 9), count=st.integers(0, 60))
def test_pairs_of_equal_use_take_turns_between_layers(
    num_layers: int, num_experts: int, count: int
) -> None:
    ranking = ExpertProfile("", np.ones((num_layers, num_experts))).ranking()
    of_layer = np.bincount(ranking[:count] // num_experts, minlength=num_layers)
    assert of_layer.max() - of_layer.min() <= 1


def test_learning_adds(model: ModelFile) -> None:
    use = np.arange(24).reshape(4, 6)
    once = even_profile(model).plus(use)
    assert (once.use == use).all()
    assert (once.plus(use).use == 2 * use).all()
    assert once.scores.dtype == np.float32
    with pytest.raises(ShapeError, match=r"\[6, 4\]"):
        once.plus(use.T)


def test_a_saved_profile_comes_back(model: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "use.profile"
    for profile in (some_profile(model), even_profile(model)):
        save_profile(path, profile)
        loaded = load_profile(path, model)
        assert loaded.key == profile.key == model_key(model)
        assert (loaded.use == profile.use).all()
    assert os.listdir(tmp_path) == ["use.profile"]


def test_a_save_that_is_cut_off_leaves_the_old_file(
    model: ModelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "use.profile"
    save_profile(path, even_profile(model))

    def half(_data: bytes, file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("strata_cli.engine.experts.profile._put", half)
        with pytest.raises(KeyboardInterrupt):
            save_profile(path, some_profile(model))
    assert os.listdir(tmp_path) == ["use.profile"]
    assert (load_profile(path, model).use == 0).all()


def test_a_link_stays_one_and_what_it_names_is_written(model: ModelFile, tmp_path: Path) -> None:
    target, link = tmp_path / "use.profile", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target.name)
    save_profile(link, some_profile(model))
    assert link.is_symlink()
    assert (load_profile(target, model).use == some_profile(model).use).all()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_pipe_stays_one_and_gets_the_profile(model: ModelFile, tmp_path: Path) -> None:
    pipe, copy = tmp_path / "pipe", tmp_path / "copy"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        save_profile(pipe, some_profile(model))
        copy.write_bytes(os.read(reader, 1 << 16))
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["copy", "pipe"]
    assert (load_profile(copy, model).use == some_profile(model).use).all()


def test_a_folder_that_is_not_there_is_named(model: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        save_profile(tmp_path / "nowhere" / "use.profile", even_profile(model))


def test_the_key_tells_models_apart_but_not_places(tmp_path: Path) -> None:
    keys = []
    for index, dims in enumerate([{}, {"seed": 2}, {"experts_count": 8}, {"ff": 32}]):
        folder = tmp_path / str(index)
        folder.mkdir()
        with open_tiny(folder, "separate", **dims) as model:
            keys.append(model_key(model))
    assert len(set(keys)) == 4
    shutil.copy(tmp_path / "0" / "tiny.gguf", tmp_path / "moved.gguf")
    with load_model_file(tmp_path / "moved.gguf") as moved:
        assert model_key(moved) == keys[0]


def test_a_profile_of_another_model_is_refused(model: ModelFile, tmp_path: Path) -> None:
    with open_tiny(tmp_path, "fused") as other:
        save_profile(tmp_path / "use.profile", even_profile(other))
    with pytest.raises(ConfigError, match="belongs to another model") as error:
        load_profile(tmp_path / "use.profile", model)
    assert error.value.exit_code == 2
    assert "--expert-profile" in error.value.hint


def save_as(path: Path, model: ModelFile, **arrays: Any) -> None:
    values: dict[str, Any] = {"version": 1, "key": model_key(model), "use": np.zeros((4, 6))}
    with path.open("wb") as file:
        np.savez(file, **{**values, **arrays})


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"use": np.zeros((6, 4))}, r"float64 \[6, 4\], expected float64 \[4, 6\]"),
        ({"use": np.zeros((4, 6), np.float32)}, "float32"),
        ({"use": np.zeros(24)}, r"\[24\]"),
        ({"use": np.full((4, 6), np.nan)}, "no counts"),
        ({"use": np.full((4, 6), -1.0)}, "no counts"),
        ({"use": np.full((4, 6), np.inf)}, "no counts"),
        ({"use": np.full((4, 6), 1e300)}, "no counts"),
        ({"use": np.full((4, 6), None)}, "damaged"),
        ({"version": 2}, "version"),
        ({"version": np.arange(3)}, "version"),
        ({"key": np.arange(3)}, "another model"),
        ({"more": np.zeros(100_000)}, "more than"),
    ],
)
def test_what_is_no_profile_of_this_model_is_refused(
    model: ModelFile, tmp_path: Path, arrays: dict[str, Any], message: str
) -> None:
    path = tmp_path / "use.profile"
    save_as(path, model, **arrays)
    with pytest.raises(ConfigError, match=message):
        load_profile(path, model)


def test_a_file_without_the_numbers_is_refused(model: ModelFile, tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        np.savez(file, version=1)
    with pytest.raises(ConfigError, match="damaged"):
        load_profile(tmp_path / "x", model)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1125899906842624,), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,), }",
        "{'descr': ('<f8',), 'fortran_order': False, 'shape': (4, 6), }",
        "{{}: '<f8', 'fortran_order': False, 'shape': (4, 6), }",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4, 6), ",
    ],
)
def test_an_array_that_numpy_cannot_make_is_refused(
    model: ModelFile, tmp_path: Path, header: str
) -> None:
    path = tmp_path / "use.profile"
    save_as(path, model)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["use.npy"] = (
        b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(4 * 6 * 8)
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(ConfigError, match="damaged"):
        load_profile(path, model)


def test_a_damaged_compression_is_refused(model: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "use.profile"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name in ("version", "key", "use"):
            archive.writestr(f"{name}.npy", bytes(200))
    data = path.read_bytes()
    start = data.index(b"version.npy") + len("version.npy")
    path.write_bytes(data[: start + 4] + b"\xff" * 9 + data[start + 13 :])
    with pytest.raises(ConfigError, match="damaged"):
        load_profile(path, model)


def test_a_damaged_directory_of_the_archive_is_refused(model: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "use.profile"
    save_profile(path, some_profile(model))
    whole = path.read_bytes()
    start = whole.index(b"PK\x01\x02")
    for place in range(start, len(whole)):
        for value in (1, 0x61, 0xFF):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ value]) + whole[place + 1 :])
            with suppress(ConfigError):
                load_profile(path, model)


def test_a_pipe_is_refused_at_once(model: ModelFile, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        load_profile(tmp_path / "pipe", model)


def test_every_half_written_file_is_refused(model: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "use.profile"
    save_profile(path, some_profile(model))
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError):
            load_profile(path, model)


@given(at=st.floats(0, 0.999), byte=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless(
    model: ModelFile, tmp_path_factory: pytest.TempPathFactory, at: float, byte: int
) -> None:
    path = tmp_path_factory.mktemp("m") / "use.profile"
    save_profile(path, some_profile(model))
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] = byte
    path.write_bytes(data)
    try:
        loaded = load_profile(path, model)
    except ConfigError:
        return
    assert (loaded.use == some_profile(model).use).all()


@pytest.mark.parametrize("content", [b"", b"PK", b"{}", b"PK\x05\x06" + bytes(18), bytes(5_000)])
def test_other_files_are_refused(model: ModelFile, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError):
        load_profile(tmp_path / "x", model)


def test_places_that_cannot_be_read_are_named(model: ModelFile, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_profile(tmp_path / "x", model)
    with pytest.raises(ConfigError, match="directory"):
        load_profile(tmp_path, model)
