"""StrataConfig: every setting of a run, and how it is read from flags, variables and a file.

A field's name is its flag, its variable and its key: ``max_context`` is ``--max-context``,
``STRATA_MAX_CONTEXT`` and ``max_context = ...`` in the config file. The table grows with the
engine: a setting that changes nothing has no field. Imports nothing heavy, so help stays instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, cast

from strata_cli.errors import ConfigError, path_text, quoted
from strata_cli.parsers import (
    LARGEST_BYTES,
    Parser,
    UnusableError,
    auto_or_boolean,
    auto_or_bytes,
    auto_or_count,
    auto_or_depth,
    auto_or_few_slots,
    auto_or_gib,
    auto_or_path,
    auto_or_ring,
    auto_or_share,
    auto_or_slots,
    auto_or_threads,
    boolean,
    byte_size,
    choice,
    device_name,
    embedded_or_path,
    file_path,
    none_or_names,
    none_or_path,
    none_or_secret,
    number,
    text,
    trace_target,
    whole_number,
)
from strata_cli.toml_file import read_toml

T = TypeVar("T")

PREFIX = "STRATA_"
TEST_PREFIX = "STRATA_TEST_"  # what the tests are told, not the engine

HIDDEN = "something else"  # stands for a secret in messages
LONGEST_NAME = 64  # a name is not compared with the real ones beyond that


def setting(default: T, help: str, *, parse: Parser[T]) -> T:
    """A field of StrataConfig that keeps its help and its parser in the metadata."""
    return field(default=default, repr=not parse.is_secret, metadata={"help": help, "parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class StrataConfig:
    """Everything that shapes a run; built once, in commands/.

    Raises:
        ConfigError: a value is out of range.
    """

    model: Path | None = setting(
        None,
        "Model file (GGUF); of a split model, any shard.",
        parse=embedded_or_path,
    )
    device: str = setting(
        "auto", "Device that computes; auto is the fastest that can be used.", parse=device_name
    )
    threads: int = setting(
        0,
        "Threads that compute on the host; auto is one per core.",
        parse=auto_or_threads,
    )
    vram_bytes: int = setting(
        0,
        "Device memory that may be used on a GPU; auto is what is free, less the reserve.",
        parse=auto_or_bytes,
    )
    vram_reserve_mib: int = setting(
        700,
        "Free device memory that auto leaves to others, in MiB; 0 leaves none.",
        parse=whole_number(0, LARGEST_BYTES >> 20),
    )
    max_context: int = setting(
        0,
        "Context in tokens, prompt and answer together; auto is the model's own.",
        parse=auto_or_count,
    )
    prefill: int = setting(
        0,
        "Prompt chunk in tokens; changes speed and memory, never the result.",
        parse=auto_or_count,
    )
    expert_cache: int | None = setting(
        None,
        "Experts held in device memory where not all fit; auto is as many as do. "
        "A number makes the cache also where all would fit, and on the host.",
        parse=auto_or_slots,
    )
    arena_pin_gib: float | None = setting(
        None,
        "GiB of experts copied into page-locked memory where not all fit the device; the others "
        "are read from the file when needed. auto copies all.",
        parse=auto_or_gib,
    )
    mmap_experts: bool = setting(
        False,
        "Copy no expert into memory, whatever --arena-pin-gib says: for machines short of RAM.",
        parse=boolean,
    )
    stager_ring: int = setting(
        16,
        "Buffers of one expert each, in page-locked memory, that others come through.",
        parse=whole_number(2, 256),
    )
    stager_threads: int = setting(
        4,
        "Threads that read experts from the file into these buffers.",
        parse=whole_number(1, 64),
    )
    expert_profile: Path | None = setting(
        None,
        "File that ranks the experts by use, for the cache; measured and made if not there. "
        "auto keeps one per model, on GPUs.",
        parse=auto_or_path,
    )
    expert_profile_save: Path | None = setting(
        None,
        "File for the profile with what this run adds to it, for --expert-profile of later runs.",
        parse=none_or_path,
    )
    expert_profile_save_every: float = setting(
        10.0,
        "Minutes between two saves of that file; 0 saves it at the end alone.",
        parse=number(0),
    )
    adapt_every: int = setting(
        4,
        "Steps between two rounds in which cached experts follow what steps use; 0 keeps them.",
        parse=whole_number(0),
    )
    adapt_swaps: int | None = setting(
        None,
        "Most experts that a round brings to the cache; auto suits the link, 0 brings none.",
        parse=auto_or_slots,
    )
    adapt_decay: float = setting(
        0.7,
        "What the use that was counted before a round still counts after it.",
        parse=number(0, 1),
    )
    lookahead: int | None = setting(
        None,
        "Experts that a step may bring to the GPU for its next layer, before that is routed, while "
        "the link has nothing else to do; auto is some, 0 none.",
        parse=auto_or_few_slots,
    )
    route_tail_skip: int = setting(
        0,
        "Rank, from 0, from which on steps leave out experts that are not in the cache; "
        "0 leaves out none. Never in canonical reads.",
        parse=whole_number(0),
    )
    pcie_frac: float | None = setting(
        1.0,
        "Share of the experts that a step does not find in the cache which the GPU reads over its "
        "link; processors compute the others. auto balances both, where that turns out to pay. "
        "Always 1 in canonical reads.",
        parse=auto_or_share,
    )
    pool_workers: int = setting(
        0,
        "Threads that compute them; auto is five eighths of the processors.",
        parse=auto_or_threads,
    )
    prefill_stream_min: int = setting(
        512,
        "Tokens of a prompt chunk from which on any expert may be copied ahead of its routing, in "
        "shorter ones those that are foreseen.",
        parse=whole_number(0),
    )
    prefill_ring: int = setting(
        0,
        "Slots that a prompt streams experts through; up to 8 take routed experts alone.",
        parse=auto_or_ring,
    )
    ring_bytes: bool = setting(
        True, "Size an automatic ring by its bytes, else by its slots.", parse=boolean
    )
    prefill_issuer: bool = setting(
        True,
        "Let a thread of its own issue a prompt's copies, else the one that computes.",
        parse=boolean,
    )
    prefill_routed_stream: bool | None = setting(
        None,
        "Do not copy experts that the routing has shown to be unneeded; auto is on.",
        parse=auto_or_boolean,
    )
    prefill_routed_stream_depth: int = setting(
        0,
        "Copies of a routed stream that may be queued; auto is what the link needs.",
        parse=auto_or_depth,
    )
    prefill_routed_stream_ahead: int = setting(
        0,
        "Copies that may be queued when one joins them that may turn out to be unneeded; auto is a "
        "few, or the depth where that is set.",
        parse=auto_or_depth,
    )
    prefill_order: str = setting(
        "foreseen",
        "Order in which a layer's experts are copied: by id; likely ones first, as earlier chunks "
        "used them; or, in chunks of up to 3,071 tokens, as the router of the layer foretells.",
        parse=choice("id", "likely", "foreseen"),
    )
    prefill_keep: int = setting(
        0,
        "Slots for a long prompt's most used experts between its chunks; 0 keeps none.",
        parse=whole_number(0),
    )
    prefill_cpu_share: float | None = setting(
        0.0,
        "Share of a short prompt's experts outside device memory that the host computes; auto is "
        "what pays. On a GPU plain reads then vary in bits; canonical ones have no part in it.",
        parse=auto_or_share,
    )
    watchdog_s: float = setting(
        60.0,
        "Seconds without any progress of a stream of experts that end the run; 0 waits on.",
        parse=number(0),
    )
    deterministic: bool | None = setting(
        None,
        "Canonical read; auto is on whenever one token's log-probabilities are read.",
        parse=auto_or_boolean,
    )
    reuse: bool = setting(
        True,
        "Read once what prompts have in common; changes speed, never the result.",
        parse=boolean,
    )
    prompt_cache: int = setting(
        6,
        "Checkpoints of a conversation that prompts can resume from; 0 keeps none.",
        parse=whole_number(0),
    )
    prompt_cache_mib: int = setting(
        1024,
        "Host memory for these checkpoints, in MiB; 0 sets no bound.",
        parse=whole_number(0, LARGEST_BYTES >> 20),
    )
    prompt_cache_every: int = setting(
        16_384,
        "Tokens from one checkpoint of a long prompt to the next; 0 leaves none on the way.",
        parse=whole_number(0),
    )
    prompt_cache_root: int = setting(
        2048,
        "Position of the checkpoint that no other takes the place of; 0: there is none.",
        parse=whole_number(0),
    )
    conversation_cache_mib: int = setting(
        0,
        "Host memory for conversations that made room for others, in MiB; 0 keeps none.",
        parse=whole_number(0, LARGEST_BYTES >> 20),
    )
    temperature: float = setting(
        0.0, "Sampling temperature; 0 takes the most likely token.", parse=number(0)
    )
    top_k: int = setting(
        0, "Sample among the K most likely tokens; 0 keeps all.", parse=whole_number(0)
    )
    top_p: float = setting(
        1.0,
        "Sample among the most likely tokens that hold this share; 0 keeps the likeliest alone.",
        parse=number(0, 1),
    )
    min_p: float = setting(
        0.0,
        "Drop tokens below this share of the most likely one; 0 drops none.",
        parse=number(0, 1),
    )
    seed: int = setting(
        0,
        "Seed of the sampler: the same seed gives the same text. 0 is one like any other, "
        "but to a server: there it is another for each request.",
        parse=whole_number(0, 2**64 - 1),
    )
    host: str = setting(
        "127.0.0.1",
        "Address that the server listens on; other than this machine's own ask for a key.",
        parse=text,
    )
    port: int = setting(
        8080, "Port that the server listens on; 0 is any free one.", parse=whole_number(0, 65_535)
    )
    api_key: str | None = setting(
        None,
        "Key that every request must carry. A flag can be read by other users: better a variable.",
        parse=none_or_secret,
    )
    allow_no_key: bool = setting(
        False, "Let other machines use the server without a key.", parse=boolean
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Further names of the server in requests without a key: exact, .suffix or *.",
        parse=none_or_names,
    )
    trusted_origins: tuple[str, ...] = setting(
        (),
        "Web pages that may send requests without a key, such as https://name:port.",
        parse=none_or_names,
    )
    cors_origins: tuple[str, ...] = setting(
        (), "Web pages that may also read the answers of /v1; * is all.", parse=none_or_names
    )
    parallel: int = setting(
        1,
        "Requests that the engine works on at once, each with memory for a context of its own.",
        parse=whole_number(1, 1024),
    )
    engine_silence_s: float = setting(
        300.0,
        "Seconds with work and without any progress after which the engine is started anew.",
        parse=number(1),
    )
    max_queue: int = setting(
        128,
        "Requests that may wait; those beyond are answered 503.",
        parse=whole_number(0, 1_000_000),
    )
    max_body_bytes: int = setting(
        32 << 20, "Largest body of a request that is read.", parse=byte_size(1 << 10)
    )
    max_messages: int = setting(2048, "Messages of one chat that are read.", parse=whole_number(1))
    max_prompts: int = setting(
        2048, "Prompts of one completion request that are read.", parse=whole_number(1)
    )
    body_timeout_s: float = setting(
        30.0, "Seconds for the body of a request to arrive.", parse=number(0.1)
    )
    request_timeout_s: float = setting(
        3600.0, "Seconds for an answer, waiting included; 0 sets no bound.", parse=number(0)
    )
    lazy_load: bool = setting(
        False, "Let the first request load the model, not the server's start.", parse=boolean
    )
    idle_unload_s: float = setting(
        0.0,
        "Seconds without a request after which the server gives the model's memory back; "
        "0 keeps it. The next request loads it again.",
        parse=number(0),
    )
    state_hash: bool = setting(
        False, "Report the hash of every part of the sequence's state.", parse=boolean
    )
    trace: str = setting(
        "",
        "Write what the run does as JSON lines (docs/trace.md): to stderr or to a file.",
        parse=trace_target,
    )
    prefill_dump_r: Path | None = setting(
        None,
        "File for the residual streams of every 64th prompt token, to compare runs bit by bit.",
        parse=none_or_path,
    )
    progress: bool | None = setting(
        None,
        "Progress bar on stderr; auto shows it on a terminal.",
        parse=auto_or_boolean,
    )
    log_level: str = setting(
        "warning",
        "Least urgent log lines to show.",
        parse=choice("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            parse, value = parser_of(spec), getattr(self, spec.name)
            if not parse.accepts(value):
                shown = HIDDEN if parse.is_secret else repr(value)
                raise ConfigError(f"{spec.name} must be {parse.expected}, got {shown}")

    @classmethod
    def load(cls, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Self:
        """Resolve every field: flag, then STRATA_* variable, then config file, then default.

        Args:
            flags: command line values by field name; None means not given. "config" may name
                the config file, over STRATA_CONFIG.
            environ: the process environment.

        Raises:
            ConfigError: a value does not parse or is out of range, or the config file cannot be
                read or has an unknown key.
        """
        file = config_file(flags, environ)
        table = {} if file is None else read_config_file(file)
        values = {}
        for spec in fields(cls):
            given = _find(spec.name, flags, environ, table)
            if given is not None:
                values[spec.name] = _parse(given, spec)
        return cls(**values)


class Given(NamedTuple):
    """A value as somebody wrote it, and where: a flag, a variable, or a key of a file."""

    origin: str
    value: Any


def flag_of(name: str) -> str:
    """The command line spelling of a field's name."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment spelling of a field's name."""
    return PREFIX + name.upper()


def parser_of(spec: Field[Any]) -> Parser[Any]:
    """How the field's value is written."""
    return cast(Parser[Any], spec.metadata["parse"])


def check_value(name: str, value: str, origin: str) -> None:
    """Refuse a value that a field does not take.

    Args:
        name: of the field.
        value: as a user wrote it.
        origin: where, for the message.

    Raises:
        ConfigError: it does not parse or is out of range.
    """
    spec = next(spec for spec in fields(StrataConfig) if spec.name == name)
    _parse(Given(origin, value), spec)


def field_names() -> tuple[str, ...]:
    """Every setting, in the order in which the documentation shows them."""
    return tuple(spec.name for spec in fields(StrataConfig))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that looks most like the given one, if any does."""
    if len(name) > LONGEST_NAME:
        return None
    matches = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """STRATA_* variables that name no setting, each with the nearest real one."""
    names = ("config", *field_names())
    known = {variable_of(name) for name in names}
    unknown = [
        variable
        for variable in sorted(environ)
        if variable.startswith(PREFIX)
        and variable not in known
        and not variable.startswith(TEST_PREFIX)
    ]
    # Compared without the prefix, which would make every two names look alike.
    close = {variable: nearest(variable[len(PREFIX) :].lower(), names) for variable in unknown}
    return {variable: name and variable_of(name) for variable, name in close.items()}


def config_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """The config file that --config or STRATA_CONFIG names.

    Raises:
        ConfigError: that is no path.
    """
    given = _find("config", flags, environ, {})
    return None if given is None else _config_path(given)


def read_config_file(path: Path) -> dict[str, Given]:
    """The settings of a TOML file, by field name.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a key that is no setting.
    """
    table = read_toml(path)
    for key, value in table.items():
        if key not in field_names():
            raise _unknown_key(key, path)
        if not isinstance(value, str | int | float):
            kinds = {"dict": "a table", "list": "a list"}
            found = kinds.get(type(value).__name__, "a date or time")
            raise ConfigError(
                f"{key} in {path_text(path)} must be one plain value, got {found}",
                hint=f"write it as one line: {key} = ..., with text in quotes",
            )
    return {key: Given(f"{key} in {path_text(path)}", value) for key, value in table.items()}


def _unknown_key(key: str, path: Path) -> ConfigError:
    close = nearest(key, field_names())
    hint = f"did you mean {close}?" if close else "docs/settings.md lists the keys"
    is_plain = key.isprintable() and 0 < len(key) <= LONGEST_NAME
    shown = key if is_plain else quoted(key)
    return ConfigError(f"unknown key {shown} in {path_text(path)}", hint=hint)


def _config_path(given: Given) -> Path:
    text = _as_text(given.value)
    try:
        return file_path(text)
    except UnusableError as error:
        raise _unusable(given, error) from None
    except ValueError:
        raise ConfigError(
            f"{given.origin} must be {file_path.expected}, got {quoted(text)}",
            hint="give the path of a TOML file, or leave it out",
        ) from None


def _find(
    name: str, flags: Mapping[str, Any], environ: Mapping[str, str], table: Mapping[str, Given]
) -> Given | None:
    if flags.get(name) is not None:
        return Given(flag_of(name), flags[name])
    if variable_of(name) in environ:
        return Given(variable_of(name), environ[variable_of(name)])
    return table.get(name)


def _parse(given: Given, spec: Field[Any]) -> Any:
    parse, value = parser_of(spec), _as_text(given.value)
    try:
        if isinstance(given.value, bool) and not parse.is_switch:
            raise ValueError("a boolean for a setting that is no switch")
        return parse(value)
    except UnusableError as error:
        raise _unusable(given, error) from None
    except ValueError as error:
        raise ConfigError(
            f"{given.origin} must be {parse.expected}, "
            f"got {HIDDEN if parse.is_secret else quoted(value)}",
            hint=f"leave it out for the default, {parse.show(spec.default)}",
        ) from error


def _unusable(given: Given, error: UnusableError) -> ConfigError:
    return ConfigError(
        f"{given.origin} {error.problem}: {quoted(_as_text(given.value))}", hint=error.hint
    )


def _as_text(value: Any) -> str:
    """TOML and switches bring typed values; as text they go through the same parser."""
    if isinstance(value, int) and value.bit_length() > 256:
        return hex(value)  # Python refuses to write very large numbers in decimal
    return str(value)
