from __future__ import annotations

import os
import stat
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.config import StrataConfig
from strata_cli.errors import ConfigError
from strata_cli.launch.planning import Choice
from strata_cli.launch.settings_file import own_keys, settings_text, write_settings

CHOICES = (
    Choice("device", "cuda:0", "NVIDIA Made-Up 24, 23.00 GiB free"),
    Choice("max_context", 32_768, "the usual"),
    Choice("expert_cache", None, "now 4567 experts"),
    Choice("vram_bytes", 8 << 30, "as given", is_given=True),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "strata.toml"


def write(path: Path, *choices: Choice) -> Path | None:
    return write_settings(path, settings_text(path, choices))


def test_a_new_file_says_what_was_chosen_and_why(path: Path) -> None:
    assert write(path, *CHOICES) is None
    text = path.read_text("utf-8")
    assert text.startswith("# Settings of `strata serve`")
    assert 'device = "cuda:0" # launch chose cuda:0: NVIDIA Made-Up 24, 23.00 GiB free\n' in text
    assert "max_context = 32768 # launch chose 32768: the usual\n" in text
    assert 'expert_cache = "auto" # launch chose auto: now 4567 experts\n' in text
    assert 'vram_bytes = "8GiB" # as given\n' in text
    config = StrataConfig.load({"config": path}, {})
    assert (config.device, config.max_context, config.vram_bytes) == ("cuda:0", 32_768, 8 << 30)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert os.listdir(path.parent) == ["strata.toml"]


def test_what_the_user_wrote_stays(path: Path) -> None:
    path.write_text(
        "# mine\n\nseed = 7   # lucky\n"
        "max_context = 4096 # launch chose 32768: the usual\n"
        "threads = 3\n\n# the end\n",
        "utf-8",
    )
    path.chmod(0o600)
    before = path.read_bytes()
    assert own_keys(path) == {"seed", "max_context", "threads"}
    given_by_file = [
        Choice("max_context", 4096, "in the file", is_given=True),
        Choice("threads", 3, "in the file", is_given=True),
        Choice("seed", 7, "in the file", is_given=True),
    ]
    backup = write(path, *given_by_file, Choice("device", "host", "no GPU"))
    assert backup == path.with_name("strata.toml.bak")
    assert backup.read_bytes() == before
    text = path.read_text("utf-8")
    assert text.startswith(before.decode().rstrip("\n").removesuffix("\n\n# the end"))
    assert "# the end" in text
    assert 'device = "host" # launch chose host: no GPU' in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600


def test_a_later_launch_may_change_what_an_earlier_one_chose(path: Path) -> None:
    write(path, *CHOICES)
    assert own_keys(path) == {"vram_bytes"}
    write(path, Choice("max_context", 16_384, "the longest that fits"))
    text = path.read_text("utf-8")
    assert "max_context = 16384 # launch chose 16384: the longest that fits\n" in text
    assert own_keys(path) == {"vram_bytes"}


def test_a_flag_beats_the_file_and_keeps_its_comment(path: Path) -> None:
    path.write_text("seed = 7 # lucky\nthreads = 2 # launch chose 2: two\n", "utf-8")
    write(path, Choice("seed", 8, "--seed", is_given=True), Choice("threads", 4, "--threads", True))
    assert path.read_text("utf-8") == "seed = 8 # lucky\nthreads = 4 # --threads\n"


def test_the_same_again_changes_nothing(path: Path) -> None:
    write(path, *CHOICES)
    status = path.stat()
    assert write(path, *CHOICES) is None
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert not path.with_name("strata.toml.bak").exists()


def test_a_link_stays_a_link(path: Path) -> None:
    real = path.with_name("real.toml")
    real.write_text("seed = 7\n", "utf-8")
    path.symlink_to(real)
    assert write(path, Choice("threads", 2, "two")) == path.with_name("real.toml.bak")
    assert path.is_symlink()
    assert "threads = 2" in real.read_text("utf-8")


def test_what_would_be_no_settings_file_is_not_written(path: Path) -> None:
    path.write_text("seed = 7\n", "utf-8")
    with pytest.raises(ConfigError, match="unknown key sed"):
        write_settings(path, "sed = 7\n")
    assert path.read_text("utf-8") == "seed = 7\n"
    assert sorted(os.listdir(path.parent)) == ["strata.toml", "strata.toml.bak"]


@pytest.mark.parametrize("text", ["seed = = 7\n", "[broken\n", "seed = 1\nseed = 2\n"])
def test_a_broken_file_is_an_error_not_a_loss(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError):
        own_keys(path)
    with pytest.raises(ConfigError):
        settings_text(path, CHOICES)
    assert path.read_text("utf-8") == text


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        write_settings(tmp_path / "no" / "strata.toml", "")


def test_every_setting_there_is_can_be_written(path: Path) -> None:
    defaults = StrataConfig()
    names = [spec.name for spec in fields(StrataConfig)]
    write(path, *(Choice(name, getattr(defaults, name), "as it is") for name in names))
    assert StrataConfig.load({"config": path}, {}) == defaults
    assert own_keys(path) == set()


PATHS = st.text("aä\"'\\# \u2028\x7f", min_size=1).map(lambda text: Path(f"/{text}"))
VALUES = st.one_of(
    st.tuples(st.just("seed"), st.integers(0, 2**64 - 1)),
    st.tuples(st.just("watchdog_s"), st.floats(0, 1e6, allow_nan=False)),
    st.tuples(st.just("temperature"), st.sampled_from([0.0, 0.7, 1e-7, 3.0, 1e20])),
    st.tuples(st.just("vram_bytes"), st.one_of(st.just(0), st.integers(1 << 20, 1 << 50))),
    st.tuples(st.just("expert_cache"), st.one_of(st.none(), st.integers(0, 99_999))),
    st.tuples(st.just("reuse"), st.booleans()),
    st.tuples(st.just("deterministic"), st.one_of(st.none(), st.booleans())),
    st.tuples(
        st.just("model"),
        st.one_of(
            st.none(), st.text("aä\"'\\# \u2028\x7f", min_size=1).map(lambda t: Path(f"/{t}"))
        ),
    ),
)


@given(pair=VALUES, reason=st.text(max_size=20))
def test_every_value_is_read_back_as_it_was(
    pair: tuple[str, Any], reason: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, value = pair
    path = tmp_path_factory.mktemp("file") / "strata.toml"
    text = settings_text(path, [Choice(name, value, reason)])
    assert list(tomllib.loads(text)) == [name]
    write_settings(path, text)
    assert getattr(StrataConfig.load({"config": path}, {}), name) == value
    assert own_keys(path) == set()
