"""Compiling kernels, and the cache of what was compiled."""

from __future__ import annotations

import dataclasses
import errno
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.engine.device import nvrtc
from strata_cli.engine.device.cache_folder import CacheFolder
from strata_cli.engine.device.nvrtc import (
    Build,
    Compiler,
    Cubin,
    CubinCache,
    Unit,
    cache_key,
    read_unit,
    target,
)
from strata_cli.errors import ConfigError, DeviceError

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
KEY = "0" * 64


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        return Compiler()
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for_every_supported_gpu(
    compiler: Compiler, capability: tuple[int, int]
) -> None:
    unit = read_unit(Path(__file__).with_name("kernels.cu"))
    cubin = compiler.compile(unit, target(capability))
    assert cubin.image.startswith(b"\x7fELF")
    for name in (b"add", b"scaled_add", b"affine"):
        assert name in cubin.image


def test_hopper_and_later_compile_with_the_features_of_the_chip() -> None:
    assert [target(c) for c in CAPABILITIES] == [
        "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a",
    ]  # fmt: skip


def test_template_instances_have_symbols(compiler: Compiler) -> None:
    text = "template <int N> __global__ void twice(float *x) { x[0] = N * 2; }"
    cubin = compiler.compile(Unit("t.cu", text, instances=("twice<3>", "twice<4>")), "sm_90a")
    assert len(set(cubin.symbols.values())) == 2
    for symbol in cubin.symbols.values():
        assert symbol.encode() in cubin.image


def test_defines_and_headers_reach_the_source(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"\n')
    (tmp_path / "inner.cuh").write_text("#define TWO 2\n")
    source = tmp_path / "kernel.cu"
    source.write_text(
        '#include "outer.cuh"\n'
        'static_assert(TWO == SOME - 1, "");\n'
        'extern "C" __global__ void k(float *x) { x[0] = TWO; }\n'
    )
    unit = read_unit(source, defines=("SOME=3",))
    assert set(unit.headers) == {"outer.cuh", "inner.cuh"}
    assert compiler.compile(unit, "sm_80").image


def test_a_failed_compile_carries_the_log(compiler: Compiler) -> None:
    with pytest.raises(DeviceError) as caught:
        compiler.compile(Unit("broken.cu", "__global__ void k() { undeclared = 1; }"), "sm_80")
    for part in ("broken.cu", "sm_80", "undeclared", compiler.version):
        assert part in caught.value.message


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"absent\.cu"):
        read_unit(tmp_path / "absent.cu")


UNIT = Unit("a.cu", "text", {"h": "header"}, ("D=1",), ("f<1>",))


@pytest.mark.parametrize(
    "other",
    [
        {"name": "b.cu"},
        {"text": "text "},
        {"headers": {"h": "header2"}},
        {"headers": {"h2": "header"}},
        {"headers": {}},
        {"defines": ("D=2",)},
        {"defines": ()},
        {"defines": ("D=1", "f<1>"), "instances": ()},
        {"instances": ("f<2>",)},
    ],
)
def test_the_key_changes_with_everything_that_is_compiled(other: dict[str, object]) -> None:
    changed = dataclasses.replace(UNIT, **other)  # type: ignore[arg-type]  # fields by name
    assert cache_key(changed, "sm_80", "1") != cache_key(UNIT, "sm_80", "1")


def test_the_key_changes_with_target_and_compiler() -> None:
    keys = {cache_key(UNIT, arch, version) for arch in ("sm_80", "sm_86") for version in "12"}
    assert len(keys) == 4


cubins = st.builds(
    Cubin, st.binary(max_size=200), st.dictionaries(st.text(max_size=9), st.text(max_size=9))
)


@given(cubin=cubins)
def test_an_entry_comes_back_as_it_was_stored(
    cubin: Cubin, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache") / "deep" / "folder"
    cache = CubinCache(folder)
    assert cache.load(KEY) is None
    cache.store(KEY, cubin)
    assert cache.load(KEY) == cubin
    assert [path.name for path in folder.iterdir()] == [f"{KEY}.cubin"]


@given(data=st.data())
def test_a_damaged_entry_counts_as_absent(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = CubinCache(folder)
    cache.store(KEY, Cubin(b"machine code", {"f<1>": "_Z1f"}))
    path = folder / f"{KEY}.cubin"
    good = path.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(flipped), good[:at], good + b"\0", b""):
        path.write_bytes(bad)
        assert cache.load(KEY) is None
    path.write_bytes(good)
    assert cache.load(KEY) is not None


def load_or_compile(unit: Unit, compiler: Compiler, cache: CubinCache) -> Cubin:
    build = Build(unit, (8, 0), compiler)
    return cache.load(build.key) or build.run(cache)


def test_a_damaged_entry_is_compiled_again(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unit = Unit("k.cu", 'extern "C" __global__ void k(float *x) { x[0] = 1; }')
    cache = CubinCache(tmp_path)
    first = load_or_compile(unit, compiler, cache)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert load_or_compile(unit, compiler, cache) == first
    assert path.name in caplog.text
    caplog.clear()
    assert load_or_compile(unit, compiler, cache) == first
    assert not caplog.text


def test_a_folder_that_cannot_be_written_costs_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = CubinCache(blocked / "cache")
    with caplog.at_level(logging.WARNING):
        cache.store(KEY, Cubin(b"x", {}))
        cache.store(KEY, Cubin(b"x", {}))
    assert str(blocked) in caplog.text
    assert len(caplog.messages) == 1
    assert cache.load(KEY) is None


def test_a_full_disk_costs_one_warning_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", fill)
    cache = CubinCache(tmp_path)
    with caplog.at_level(logging.WARNING):
        cache.store(KEY, Cubin(b"x", {}))
        cache.store("other", Cubin(b"x", {}))
    assert caplog.messages == [
        f"cannot keep compiled kernels in {tmp_path}: No space left on device"
    ]
    assert list(tmp_path.iterdir()) == []


def test_without_a_folder_nothing_is_kept_and_one_line_says_why(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "open_cache", lambda *_: CacheFolder(None, "/x: is a link"))
    with caplog.at_level(logging.WARNING):
        cache = nvrtc.user_cache()
        cache.store(KEY, Cubin(b"x", {}))
        assert cache.load(KEY) is None
    assert caplog.messages == [
        "compiling kernels at every start, they cannot be kept: /x: is a link"
    ]


WRITER = """
import sys
from pathlib import Path
from strata_cli.engine.device.nvrtc import Cubin, CubinCache
cache = CubinCache(Path(sys.argv[1]))
cubin = Cubin(bytes(200_000), {"f": "g"})
for _ in range(30):
    cache.store("0" * 64, cubin)
    assert cache.load("0" * 64) == cubin
"""


def test_processes_share_the_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert writer.returncode == 0, errors.decode()
    assert [path.name for path in tmp_path.iterdir()] == [f"{KEY}.cubin"]
