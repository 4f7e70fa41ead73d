"""What `strata trace` is asked for: a run, a trace that is there, or arms that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import click

from strata_cli.commands import trace_arms
from strata_cli.commands.opening import ENGINE_SETTINGS, SAMPLING_SETTINGS
from strata_cli.commands.options import in_order, written
from strata_cli.commands.prompt import PromptSource
from strata_cli.config import StrataConfig, flag_of
from strata_cli.errors import ConfigError
from strata_cli.parsers import file_path, new_file_path, whole_number

IDENTITY_TOKENS = 64  # generated, where nothing else is asked for
_FILE, _NEW_FILE = written(file_path), written(new_file_path)

# The flags of TraceFlags.
trace_options = in_order(
    click.option(
        "--from",
        "trace_file",
        callback=_FILE,
        metavar="FILE",
        help="Show a trace that STRATA_TRACE wrote; - is stdin.",
    ),
    click.option(
        "--perfetto",
        callback=_NEW_FILE,
        metavar="FILE",
        help="Save the trace for Perfetto, chrome://tracing.",
    ),
    click.option("--layers", "every_layer", is_flag=True, help="Show the layers of every chunk."),
    click.option(
        "--warm-up", is_flag=True, help="Read the prompt once before, so that kernels are compiled."
    ),
    click.option(
        "--ab",
        metavar="SWITCH[=OFF,ON]",
        callback=lambda _context, _param, text: (
            None if text is None else trace_arms.parse_switch(text)
        ),
        help="Time a setting, off and on, in mirrored pairs of fresh engines.",
    ),
    click.option(
        "--identity",
        is_flag=True,
        help="Compare bits of SWITCH off, by default, on, and off again, instead of times.",
    ),
    click.option(
        "--repeat",
        callback=written(whole_number(1)),
        metavar="N",
        help="Timed reads of each arm, after one that warms up; their median counts.  [1]",
    ),
    click.option(
        "--reuse",
        callback=written(whole_number(0)),
        metavar="N",
        help="Read the first N tokens of the prompt before, untimed and not shown.  [0]",
    ),
    click.option(
        "--max-tokens",
        callback=written(whole_number(0)),
        metavar="N",
        help="Generate up to N tokens in each arm.  [0; 64 with --identity]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """As they were given.

    Attributes:
        trace_file: a trace to show instead of a run's.
        perfetto: file for the trace.
        every_layer: of each chunk is shown.
        warm_up: the prompt is read once before.
        ab: the setting in which arms differ.
        identity: arms are compared in bits, not timed.
        repeat: timed reads of an arm.
        reuse: tokens that are read before.
        max_tokens: generated in each arm.
    """

    trace_file: Path | None
    perfetto: str | None
    every_layer: bool
    warm_up: bool
    ab: trace_arms.Switch | None
    identity: bool
    repeat: int | None
    reuse: int | None
    max_tokens: int | None

    @classmethod
    def taken_from(cls, flags: dict[str, Any]) -> Self:
        """Take the keyword arguments that trace_options added to the command out of all."""
        return cls(**{field.name: flags.pop(field.name) for field in fields(cls)})

    def check(
        self, source: PromptSource, config: StrataConfig, settings: Mapping[str, Any]
    ) -> None:
        """Refuse flags that contradict each other, or would do nothing.

        Args:
            source: what the command line says about the prompt.
            config: all settings.
            settings: those that were given as flags.

        Raises:
            ConfigError: naming the flags.
        """
        self._check_modes(source)
        arms_alone = {"--repeat": self.repeat, "--max-tokens": self.max_tokens}
        runs_alone = {"--reuse": self.reuse, "--warm-up": self.warm_up or None}
        of_engine = {flag_of(name): settings[name] for name in ENGINE_SETTINGS}
        of_sampler = {flag_of(name): settings[name] for name in SAMPLING_SETTINGS}
        if self.trace_file is not None:
            all_alone = arms_alone | runs_alone | of_engine
            _refuse(all_alone, "has no effect on a trace that --from shows")
        if self.ab is None:
            _refuse(arms_alone | of_sampler, "has no effect without --ab")
        else:
            _refuse({"--layers": self.every_layer or None}, "has no effect with --ab")
            warm_up = {"--warm-up": self.warm_up or None}
            _refuse(warm_up, "has no effect with --ab, where each arm warms up")
            trace_arms.check_files(config, self.ab, identity=self.identity)
        if self.identity:
            _refuse({"--repeat": self.repeat}, "has no effect with --identity")

    @property
    def generated_tokens(self) -> int:
        """Most tokens that an arm generates."""
        if self.max_tokens is not None:
            return self.max_tokens
        return IDENTITY_TOKENS if self.identity else 0

    def _check_modes(self, source: PromptSource) -> None:
        given = (source.text, source.file, source.tokens, source.tokens_file)
        has_prompt = any(item is not None for item in given)
        if self.trace_file is not None and (has_prompt or self.ab is not None):
            other = "--ab" if self.ab is not None else "a prompt"
            raise ConfigError(
                f"--from and {other} cannot be used together",
                hint="--from shows a run that is over",
            )
        if self.identity and self.ab is None:
            raise ConfigError("--identity needs --ab", hint="--ab SWITCH names what to compare")
        if self.perfetto is not None and self.ab is not None:
            raise ConfigError(
                "--perfetto and --ab cannot be used together", hint="trace each setting by itself"
            )


def _refuse(given: Mapping[str, object], why: str) -> None:
    for flag, value in given.items():
        if value is not None:
            raise ConfigError(f"{flag} {why}", hint="leave it out")
