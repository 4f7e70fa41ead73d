"""From settings to an engine's options."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from strata_cli.commands import opening
from strata_cli.commands.main import run, strata
from strata_cli.config import StrataConfig
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.experts.stager import StagerSize
from strata_cli.engine.prefill.prompt_stream import StreamRules
from strata_cli.errors import ConfigError


class Opened(Exception):  # noqa: N818  not an error
    """What would have been opened."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__()
        self.options = options


def options_of(monkeypatch: pytest.MonkeyPatch, **environ: str) -> EngineOptions:
    def note(options: EngineOptions, *_: Any, **__: Any) -> None:
        raise Opened(options)

    monkeypatch.setattr(Engine, "open", note)
    config = StrataConfig.load({}, {f"STRATA_{name.upper()}": environ[name] for name in environ})
    with pytest.raises(Opened) as opened, opening.open_engine(config, will_chat=False, inputs={}):
        pass
    return opened.value.options


def test_without_settings_everything_is_as_the_engine_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = options_of(monkeypatch)
    assert options.streaming == StreamRules()
    assert (options.expert_cache, options.expert_profile) == (None, None)
    assert options.adapt == AdaptRules()
    assert (options.profile_save, options.profile_save_every_s) == (None, 600)


@pytest.mark.parametrize(
    ("name", "text", "path", "value"),
    [
        ("prefill_stream_min", "77", "ring.stream_min", 77),
        ("prefill_ring", "40", "ring.slots", 40),
        ("ring_bytes", "0", "ring.budget_bytes", 0),
        ("prefill_issuer", "0", "stream.has_thread", False),
        ("prefill_routed_stream", "0", "stream.skips_unrouted", False),
        ("prefill_routed_stream", "auto", "stream.skips_unrouted", True),
        ("prefill_routed_stream_depth", "auto", "stream.depth", 0),
        ("prefill_routed_stream_depth", "3", "stream.depth", 3),
        ("prefill_routed_stream_ahead", "auto", "stream.ahead", 0),
        ("prefill_routed_stream_ahead", "3", "stream.ahead", 3),
        ("prefill_order", "likely", "foresees", False),
        ("prefill_order", "foreseen", "foresees", True),
        ("prefill_keep", "12", "kept_slots", 12),
        ("prefill_cpu_share", "auto", "cpu_share", None),
        ("prefill_cpu_share", "0.25", "cpu_share", 0.25),
        ("threads", "3", "cpu_threads", 3),
        ("watchdog_s", "1.5", "stream.watchdog_s", 1.5),
    ],
)
def test_each_setting_of_streams_reaches_them_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, path: str, value: Any
) -> None:
    actual = _flat(options_of(monkeypatch, **{name: text}).streaming)
    assert actual.pop(path) == value
    expected = _flat(StreamRules())
    del expected[path]
    assert actual == expected


def test_cache_and_profile_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(monkeypatch, expert_cache="0", expert_profile="use.npz")
    assert options.expert_cache == 0
    assert options.expert_profile == Path("use.npz")


@pytest.mark.parametrize(
    ("environ", "nbytes"),
    [
        ({}, None),
        ({"arena_pin_gib": "1.5"}, 3 << 29),
        ({"arena_pin_gib": "0"}, 0),
        ({"mmap_experts": "1"}, 0),
        ({"mmap_experts": "1", "arena_pin_gib": "2"}, 0),
        ({"arena_pin_gib": "1048576"}, 1 << 50),
    ],
)
def test_the_pinned_part_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], nbytes: int | None
) -> None:
    assert options_of(monkeypatch, **environ).pinned_bytes == nbytes


def test_the_stager_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(monkeypatch).stager == StagerSize()
    options = options_of(monkeypatch, stager_ring="3", stager_threads="9")
    assert options.stager == StagerSize(num_buffers=3, num_threads=9)


def test_the_adaptive_tier_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(monkeypatch, adapt_every="7", adapt_swaps="9", adapt_decay="0.5")
    assert options.adapt == AdaptRules(every=7, swaps=9, decay=0.5)


def test_how_far_steps_look_ahead_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(monkeypatch).ahead_slots is None
    assert options_of(monkeypatch, lookahead="3").ahead_slots == 3


def test_the_tail_skip_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(monkeypatch, route_tail_skip="7").tail_skip == 7


def test_the_share_of_the_link_reaches_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(monkeypatch, pcie_frac="auto", pool_workers="3")
    assert (options.link_share, options.pool_threads) == (None, 3)
    assert options_of(monkeypatch, pcie_frac="0.25").link_share == 0.25
    assert options_of(monkeypatch).link_share == 1


def test_the_learned_profile_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, minutes = os.fspath(tmp_path / "use.npz"), "0.5"
    options = options_of(monkeypatch, expert_profile_save=file, expert_profile_save_every=minutes)
    assert options.profile_save == Path(file)
    assert options.profile_save_every_s == 30


def test_a_profile_may_be_saved_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "use.npz"
    file.write_bytes(b"x")
    config = StrataConfig.load(
        {}, {"STRATA_EXPERT_PROFILE": str(file), "STRATA_EXPERT_PROFILE_SAVE": str(file)}
    )
    inputs = {opening.PROFILE_INPUT: str(file)}
    with (
        pytest.raises(ConfigError, match="damaged"),
        opening.open_engine(
            dataclasses.replace(config, expert_cache=4), will_chat=False, inputs=inputs
        ),
    ):
        pass


def test_a_profile_is_not_saved_over_the_model(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"x")
    config = StrataConfig(model=model, expert_profile_save=model)
    with (
        pytest.raises(ConfigError, match="is the model, which this would overwrite"),
        opening.open_engine(config, will_chat=False, inputs={}),
    ):
        pass


def _flat(rules: Any, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(rules):
        value = getattr(rules, spec.name)
        if dataclasses.is_dataclass(value):
            values |= _flat(value, f"{spec.name}.")
        else:
            values[prefix + spec.name] = value
    return values


@pytest.mark.parametrize("command", ["read", "trace"])
@pytest.mark.parametrize("variable", ["STRATA_TRACE", "STRATA_PREFILL_DUMP_R"])
def test_nothing_that_the_run_reads_is_written_over(
    command: str,
    variable: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = {"config file": "threads = 1\n", "prompt's file": "hello", "expert profile": "x"}
    paths = {what: tmp_path / what for what in texts}
    for what, path in paths.items():
        path.write_text(texts[what])
    args = [command, "--raw", "--device", "host", "--config", str(paths["config file"])]
    args += ["--file", str(paths["prompt's file"])]
    args += ["--expert-profile", str(paths["expert profile"])]
    for what, path in paths.items():
        monkeypatch.setenv(variable, str(path))
        assert run(strata, args) == 2
        assert f"{path} is the {what}, which this would overwrite" in capsys.readouterr().err
        assert path.read_text() == texts[what]
