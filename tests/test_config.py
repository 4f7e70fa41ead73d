from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from strata_cli.config import StrataConfig, field_names, parser_of, unknown_variables
from strata_cli.errors import ConfigError

DEFAULTS = StrataConfig()
SIZES = "auto or a size such as 800MiB, 12GiB or 24GB, from 1MiB to 1PiB"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "strata.toml"


def test_flag_beats_variable_beats_file_beats_default(config_file: Path) -> None:
    config_file.write_text("seed = 1\nthreads = 1\nprefill = 64\n")
    environ = {"STRATA_CONFIG": str(config_file), "STRATA_SEED": "2", "STRATA_THREADS": "2"}
    config = StrataConfig.load({"seed": "3", "threads": None}, environ)
    assert (config.seed, config.threads, config.prefill) == (3, 2, 64)
    assert config.max_context == DEFAULTS.max_context


def test_the_flag_names_the_file_before_the_variable_does(config_file: Path) -> None:
    config_file.write_text("seed = 7\n")
    environ = {"STRATA_CONFIG": str(config_file.with_name("absent.toml"))}
    assert StrataConfig.load({"config": str(config_file)}, environ).seed == 7


@pytest.mark.parametrize("name", field_names())
def test_every_default_has_a_spelling_that_gives_it_back(name: str) -> None:
    spec = next(spec for spec in fields(StrataConfig) if spec.name == name)
    text = parser_of(spec).show(spec.default)
    assert StrataConfig.load({name: text}, {}) == DEFAULTS


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "auto", 0),
        ("threads", "1024", 1024),
        ("max_context", "4096", 4096),
        ("model", "embedded", None),
        ("model", "a/b.gguf", Path("a/b.gguf")),
        ("device", "cuda:1", "cuda:1"),
        ("trace", "0", ""),
        ("trace", "1", "1"),
        ("trace", "./1", "./1"),
        ("trace", "a/t.jsonl", "a/t.jsonl"),
        ("prefill_dump_r", "none", None),
        ("prefill_dump_r", "r.bin", Path("r.bin")),
        ("state_hash", "1", True),
        ("state_hash", "FALSE", False),
        ("deterministic", "auto", None),
        ("deterministic", "true", True),
        ("deterministic", "0", False),
        ("temperature", "0.7", 0.7),
        ("top_p", "1", 1.0),
        ("seed", "18446744073709551615", 2**64 - 1),
        ("vram_bytes", "auto", 0),
        ("vram_bytes", "12GiB", 12 << 30),
        ("vram_bytes", "24 gb", 24 * 10**9),
        ("vram_bytes", "1.5GiB", 3 << 29),
        ("vram_bytes", "1048577", (1 << 20) + 1),
        ("vram_reserve_mib", "0", 0),
        ("expert_cache", "auto", None),
        ("expert_cache", "0", 0),
        ("prefill_routed_stream", "auto", None),
        ("prefill_routed_stream", "0", False),
        ("prefill_routed_stream_depth", "auto", 0),
        ("prefill_routed_stream_depth", "256", 256),
        ("prefill_routed_stream_ahead", "1", 1),
        ("prefill_ring", "8", 8),
        ("prefill_order", "likely", "likely"),
        ("watchdog_s", "0.5", 0.5),
    ],
)
def test_text_becomes_a_typed_value(name: str, text: str, value: Any) -> None:
    config = StrataConfig.load({}, {f"STRATA_{name.upper()}": text})
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("threads", "many", "auto or a whole number from 1 to 1024"),
        ("threads", "0", "auto or a whole number from 1 to 1024"),
        ("threads", "100000", "auto or a whole number from 1 to 1024"),
        ("threads", "99999999999", "auto or a whole number from 1 to 1024"),
        ("prefill", "-64", "auto or a whole number from 1 to 2147483647"),
        ("prefill", "0", "auto or a whole number from 1 to 2147483647"),
        ("max_context", "4k", "auto or a whole number from 1 to 2147483647"),
        ("max_context", "0", "auto or a whole number from 1 to 2147483647"),
        ("vram_bytes", "0", SIZES),
        ("vram_bytes", "1025TiB", SIZES),
        ("vram_bytes", " 1GiB", SIZES),
        ("vram_bytes", "٣GiB", SIZES),
        ("vram_reserve_mib", "1073741825", "a whole number from 0 to 1073741824"),
        ("device", "cuda", "auto, host or cuda:N"),
        ("device", "cuda:1x", "auto, host or cuda:N"),
        ("model", "", "embedded or the path of a file"),
        ("state_hash", "maybe", "0, 1, false or true"),
        ("state_hash", "", "0, 1, false or true"),
        ("deterministic", "2", "auto or 0, 1, false or true"),
        ("temperature", "nan", "a number from 0"),
        ("temperature", "inf", "a number from 0"),
        ("top_p", "1.01", "a number from 0 to 1"),
        ("temperature", "1_0", "a number from 0"),
        ("temperature", "٣", "a number from 0"),
        ("temperature", "+1", "a number from 0"),
        ("temperature", " 1", "a number from 0"),
        ("temperature", "-1", "a number from 0"),
        ("top_k", "1.5", "a whole number from 0 to 2147483647"),
        ("top_k", "-1", "a whole number from 0 to 2147483647"),
        ("seed", "1_0", "a whole number from 0 to 18446744073709551615"),
        ("seed", "٣", "a whole number from 0 to 18446744073709551615"),
        ("seed", "+1", "a whole number from 0 to 18446744073709551615"),
        ("seed", " 1", "a whole number from 0 to 18446744073709551615"),
        ("device", "cuda:٣", "auto, host or cuda:N"),
        ("seed", "18446744073709551616", "a whole number from 0 to 18446744073709551615"),
        ("expert_cache", "-1", "auto or a whole number from 0 to 2147483647"),
        ("prefill_routed_stream_depth", "257", "auto or a whole number from 1 to 256"),
        ("prefill_routed_stream_depth", "0", "auto or a whole number from 1 to 256"),
        ("prefill_ring", "513", "auto or a whole number from 1 to 512"),
        ("prefill_order", "best", "one of id, likely, foreseen"),
        ("prefill_issuer", "no", "0, 1, false or true"),
        ("log_level", "loud", "one of debug, info, warning, error"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin_and_the_expected_form(
    name: str, text: str, expected: str, config_file: Path
) -> None:
    config_file.write_text(f'{name} = "{text}"\n')
    origins: list[tuple[str, dict[str, str], dict[str, str]]] = [
        (f"--{name.replace('_', '-')}", {name: text}, {}),
        (f"STRATA_{name.upper()}", {}, {f"STRATA_{name.upper()}": text}),
        (f"{name} in {config_file}", {"config": str(config_file)}, {}),
    ]
    for origin, flags, environ in origins:
        with pytest.raises(ConfigError) as caught:
            StrataConfig.load(flags, environ)
        assert caught.value.message == f"{origin} must be {expected}, got {text!r}"
        assert "default" in caught.value.hint
        assert caught.value.exit_code == 2


def test_a_file_holds_numbers_switches_and_words(config_file: Path) -> None:
    config_file.write_text('state_hash = true\ntop_p = 0.5\nthreads = "auto"\nprefill = 192\n')
    config = StrataConfig.load({"config": str(config_file)}, {})
    assert (config.state_hash, config.top_p, config.threads, config.prefill) == (True, 0.5, 0, 192)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_contexts = 1\n", "unknown key max_contexts"),
        ("max-context = 1\n", "unknown key max-context"),
        ("[engine]\nthreads = 1\n", "unknown key engine"),
        ("threads = [1]\n", "threads in .* must be one plain value, got a list"),
        ("threads.a.b = 1\n", "threads in .* must be one plain value, got a table"),
        ("threads = 1979-05-27\n", "threads in .* must be one plain value, got a date or time"),
        ("threads = true\n", "threads in .* must be auto or a whole number from 1 to 1024"),
        ("model = true\n", "model in .* must be embedded or the path of a file, got 'True'"),
        ("threads" + ".a" * 60 + " = 1\n", "threads in .* must be one plain value, got a table"),
        ("threads" + ".a" * 30_000 + " = 1\n", "not valid TOML: line 1 has more than 64 dots"),
        ('"" = 1\n', "unknown key '' in "),
        ("threads = " + "[" * 3000 + "\n", "is not valid TOML: nested too deeply"),
        ("seed = " + "9" * 5000 + "\n", "is not valid TOML: "),
        ("seed = 0x1" + "f" * 5000 + "\n", r"'0x1f+'… \(5003 characters\)"),
        ("k" * 5000 + " = 1\n", r"unknown key 'k+'… \(5000 characters\)"),
        ("# " + "x" * (1 << 16), "has more than 65536 bytes"),
        ("threads = 1\nthreads = 2\n", "is not valid TOML"),
        ("threads\n", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(text: str, message: str, config_file: Path) -> None:
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        StrataConfig.load({"config": str(config_file)}, {})
    assert str(config_file) in caught.value.message
    assert caught.value.hint
    assert len(str(caught.value)) < 600


def test_a_file_may_begin_with_a_mark_and_have_lines_of_dots(config_file: Path) -> None:
    config_file.write_text(f"\ufeffthreads = 3\n# {'.' * 100}\n")
    assert StrataConfig.load({"config": str(config_file)}, {}).threads == 3


def test_an_unknown_key_is_answered_with_the_nearest_if_any(config_file: Path) -> None:
    config_file.write_text("max_contex = 1\n")
    with pytest.raises(ConfigError) as near:
        StrataConfig.load({"config": str(config_file)}, {})
    assert near.value.hint == "did you mean max_context?"
    config_file.write_text("zzz = 1\n")
    with pytest.raises(ConfigError) as far:
        StrataConfig.load({"config": str(config_file)}, {})
    assert far.value.hint == "docs/settings.md lists the keys"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "--config must be the path of a file, got ''"),
        ("a\0b", "--config has a NUL character, which no path can have: 'a\\x00b'"),
        ("~nosuchuser/x", "--config starts with ~, but that user has no home folder here"),
        ("x" * 256, "cannot read the config file x+…x+ \\(256 characters\\): File name too long"),
    ],
)
def test_a_config_path_that_cannot_be_is_one_error(path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StrataConfig.load({"config": path}, {})
    assert re.match(problem, caught.value.message) or caught.value.message.startswith(problem)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("~nosuchuser/x", "starts with ~, but that user has no home folder here: '~nosuchuser/x'"),
        ("a\0b", "has a NUL character, which no path can have: 'a\\x00b'"),
    ],
)
def test_a_model_path_that_cannot_be_says_why(path: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StrataConfig.load({"model": path}, {})
    assert caught.value.message == f"--model {problem}"
    assert caught.value.hint


def test_a_home_folder_is_filled_in(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    monkeypatch.setenv("HOME", str(config_file.parent))
    config_file.write_text('model = "~/m.gguf"\n')
    config = StrataConfig.load({"config": f"~/{config_file.name}"}, {})
    assert config.model == config_file.with_name("m.gguf")


def test_a_small_number_in_a_file_is_read_in_its_shortest_form(config_file: Path) -> None:
    config_file.write_text("min_p = 0.00001\ntemperature = 1e-3\ntop_k = 1_0\n")
    config = StrataConfig.load({"config": str(config_file)}, {})
    assert (config.min_p, config.temperature, config.top_k) == (1e-5, 1e-3, 10)


PATHS = (
    "model",
    "trace",
    "prefill_dump_r",
    "expert_profile",
    "expert_profile_save",
)  # whether a path can be, the file system knows


SECRETS = ("api_key",)


@pytest.mark.parametrize("name", sorted({*field_names()} - {*PATHS, *SECRETS}))
def test_a_very_long_value_is_cut_and_counted(name: str) -> None:
    with pytest.raises(ConfigError, match=r"\(5000 characters\)") as caught:
        StrataConfig.load({name: "7" * 5000}, {})
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("make", ["absent", "directory", "latin1"])
def test_a_file_that_cannot_be_read_is_a_config_error(make: str, config_file: Path) -> None:
    if make == "directory":
        config_file.mkdir()
    elif make == "latin1":
        config_file.write_bytes('model = "é"\n'.encode("latin-1"))
    with pytest.raises(ConfigError, match=str(config_file)):
        StrataConfig.load({}, {"STRATA_CONFIG": str(config_file)})
    with pytest.raises(ConfigError) as caught:
        StrataConfig.load({}, {"STRATA_CONFIG": str(config_file)})
    assert caught.value.hint


def test_unknown_variables_are_found_with_the_nearest_real_one() -> None:
    environ = {
        "STRATA_TEMPERATUR": "1",
        "STRATA_QQQQ": "1",
        "STRATA_" + "THREADS" * 2000: "1",
        "STRATA_SEED": "1",
        "STRATA_CONFIG": "f",
        "STRATA_TEST_MODEL": "m",
        "HOME": "/",
    }
    assert unknown_variables(environ) == {
        "STRATA_QQQQ": None,
        "STRATA_" + "THREADS" * 2000: None,
        "STRATA_TEMPERATUR": "STRATA_TEMPERATURE",
    }


def test_a_config_is_checked_however_it_is_made_and_never_changes() -> None:
    with pytest.raises(ConfigError, match="top_p must be a number from 0 to 1, got 2"):
        StrataConfig(top_p=2.0)
    with pytest.raises(FrozenInstanceError):
        DEFAULTS.seed = 1  # type: ignore[misc]  # that it fails is the point


@pytest.mark.parametrize("key", ["two words", "k\u00e4y", "", "7" * 5000])
def test_no_message_shows_a_secret(key: str) -> None:
    with pytest.raises(
        ConfigError, match=r"STRATA_API_KEY must be .*, got something else"
    ) as caught:
        StrataConfig.load({}, {"STRATA_API_KEY": key})
    assert not key or key not in str(caught.value)
    assert "sesame" not in repr(StrataConfig(api_key="sesame"))


def test_names_are_written_with_commas_between() -> None:
    config = StrataConfig.load({"allowed_hosts": "a.example, .b.example"}, {})
    assert config.allowed_hosts == ("a.example", ".b.example")
    assert StrataConfig.load({"allowed_hosts": "none"}, {}).allowed_hosts == ()
    for text in ("a,,b", "", "a b"):
        with pytest.raises(ConfigError, match="--allowed-hosts must be none or names"):
            StrataConfig.load({"allowed_hosts": text}, {})
