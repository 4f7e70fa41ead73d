"""From settings to an engine's options."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from strata_cli.commands import opening
from strata_cli.commands.main import run, strata
from strata_cli.config import StrataConfig
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.prefill.prompt_stream import StreamRules


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
        ("prefill_order", "likely", "is_likely", True),
        ("prefill_keep", "12", "kept_slots", 12),
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
