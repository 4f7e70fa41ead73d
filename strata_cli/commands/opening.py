"""From settings to an engine: what every command that runs a model opens the same way."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import click

from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import PromptSource
from strata_cli.commands.result_file import check_distinct, check_result_file
from strata_cli.config import StrataConfig, flag_of
from strata_cli.engine.decode.sampling import Sampler
from strata_cli.engine.effects import check_effects
from strata_cli.engine.engine import Engine
from strata_cli.engine.from_settings import engine_options
from strata_cli.engine.model.shards import files_of_model
from strata_cli.engine.trace import STDERR, Sink, Trace, open_trace
from strata_cli.errors import ConfigError
from strata_cli.models import DEMO_MODEL_PATH

ENGINE_SETTINGS = (
    "model",
    "device",
    "threads",
    "vram_bytes",
    "vram_reserve_mib",
    "max_context",
    "prefill",
    "expert_cache",
    "arena_pin_gib",
    "mmap_experts",
    "expert_profile",
    "expert_profile_save",
    "expert_profile_save_every",
    "adapt_every",
    "adapt_swaps",
    "adapt_decay",
    "lookahead",
    "pcie_frac",
    "pool_workers",
)
STDIN_FILE = "/dev/stdin"
NO_FILES: Mapping[str, str] = {}
PROFILE_SAVE = "--expert-profile-save"
PROFILE_INPUT = "expert profile"  # which a run may go on from and save again
SAMPLING_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed")


def model_files(config: StrataConfig) -> dict[str, str]:
    """The files of the model that the settings name, by what they are."""
    model = config.model or DEMO_MODEL_PATH
    shards = {f"model's shard {path.name}": os.fspath(path) for path in files_of_model(model)}
    return {"model": os.fspath(model), **shards}


def input_files(
    config: StrataConfig, source: PromptSource, config_file: Path | None
) -> dict[str, str]:
    """Every file that a run reads, by what it is: no output may go there."""
    files = {
        "config file": config_file,
        PROFILE_INPUT: config.expert_profile,
        "prompt's file": source.file,
        "tokens' file": source.tokens_file,
        "prompt on stdin": STDIN_FILE if source.is_from_stdin() else None,
    }
    named = {what: os.fspath(path) for what, path in files.items() if path is not None}
    return model_files(config) | named


@contextmanager
def open_engine(
    config: StrataConfig,
    *,
    will_chat: bool,
    inputs: Mapping[str, str],
    outputs: Mapping[str, str] = NO_FILES,
    sinks: tuple[Sink, ...] = (),
    num_sequences: int = 1,
) -> Iterator[Engine]:
    """The model that the settings name, loaded; closed with its trace when the block ends.

    Shows progress on stderr.

    Args:
        config: the settings.
        will_chat: the prompt goes through the chat template.
        inputs: see input_files().
        outputs: files that the command writes itself, by the flags that name them.
        sinks: get every event of the trace, besides where the settings send it.
        num_sequences: that will be there at once.

    Raises:
        StrataError: see Engine.open; or the trace or the residual dump cannot be written.
    """
    _check_outputs(config, {**model_files(config), **inputs}, outputs)
    with (
        open_trace(config.trace, *sinks) as trace,
        _open(config, trace, will_chat=will_chat, num_sequences=num_sequences) as engine,
    ):
        yield engine


def sampler_of(config: StrataConfig) -> Sampler:
    """How tokens are chosen."""
    return Sampler(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
    )


def check_sampling(config: StrataConfig, max_tokens: int) -> None:
    """Refuse flags of the sampler where it has nothing to choose.

    Raises:
        ConfigError: one of them would have no effect.
    """
    if max_tokens and config.temperature:
        return
    given = given_flags()
    names = [spec for spec in fields(StrataConfig) if spec.name in SAMPLING_SETTINGS]
    idle = [
        flag_of(spec.name)
        for spec in names
        if spec.name in given and getattr(config, spec.name) != spec.default
    ]
    if idle:
        why = "the temperature is 0" if max_tokens else "no token is generated"
        way = "--temperature, such as 0.8" if max_tokens else "--max-tokens"
        raise ConfigError(
            f"{' and '.join(idle)} would have no effect: {why}", hint=f"add {way}, or leave it out"
        )


def _open(config: StrataConfig, trace: Trace, *, will_chat: bool, num_sequences: int) -> Engine:
    options = engine_options(config, will_chat=will_chat, num_sequences=num_sequences, trace=trace)
    with (
        progress_bar("loading", "B", config.progress, scale=True) as loading,
        progress_bar("compiling", "kernel", config.progress) as compiling,
    ):
        return Engine.open(
            options,
            loading,
            notice=_notice,
            compiling=compiling,
            planned=lambda places: check_effects(config, places, given_flags()),
        )


def given_flags() -> frozenset[str]:
    """The settings that the command that runs was given as flags."""
    command = click.get_current_context(silent=True)
    given = {} if command is None else command.params
    return frozenset(name for name, value in given.items() if value is not None)


def _check_outputs(
    config: StrataConfig, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> None:
    """Refuse to write over what the run reads, to one file twice, or where nothing can be."""
    own: dict[str, str] = {}
    if config.trace not in ("", STDERR):
        own["STRATA_TRACE"] = config.trace
    if config.prefill_dump_r is not None:
        own["STRATA_PREFILL_DUMP_R"] = os.fspath(config.prefill_dump_r)
    if config.expert_profile_save is not None:
        own[PROFILE_SAVE] = os.fspath(config.expert_profile_save)
    for flag, path in own.items():
        is_read_before = flag == PROFILE_SAVE
        others = {
            what: p for what, p in inputs.items() if not is_read_before or what != PROFILE_INPUT
        }
        check_result_file(flag, path, others)
    check_distinct({**own, **outputs})


def _notice(text: str) -> None:
    click.echo(f"strata: {text}", err=True)
