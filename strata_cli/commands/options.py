"""Maps settings to command line options, and resolves them: the one place that reads os.environ."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from strata_cli.config import (
    LONGEST_NAME,
    StrataConfig,
    config_file,
    flag_of,
    parser_of,
    unknown_variables,
    variable_of,
)
from strata_cli.errors import ConfigError, quoted
from strata_cli.parsers import Parser, UnusableError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def in_order(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that gives a command arguments and options, in this order in its help."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def config_options(*names: str) -> Callable[[F], F]:
    """One option per named field, default None, then --log-level and --config.

    The values arrive as keyword arguments by field name, for load_config to resolve.
    """
    specs = {spec.name: spec for spec in fields(StrataConfig)}
    return in_order(
        *(_option(specs[name]) for name in (*names, "log_level")), _config_file_option()
    )


def load_config(flags: Mapping[str, Any]) -> StrataConfig:
    """Resolve a command's settings and set how much is logged.

    Warns on stderr of STRATA_* variables that are no settings.

    Args:
        flags: the keyword arguments that config_options added to the command.

    Raises:
        ConfigError: a value is wrong; the message names its flag, variable or key.
    """
    config = StrataConfig.load(flags, os.environ)
    logging.getLogger("strata_cli").setLevel(config.log_level.upper())
    for name, close in unknown_variables(os.environ).items():
        advice = f"; did you mean {close}?" if close else ""
        shown = name if len(name) <= LONGEST_NAME else quoted(name)
        logger.warning("%s is not a setting and is ignored%s", shown, advice)
    return config


def changed_config(flags: Mapping[str, Any], name: str, value: str) -> StrataConfig:
    """The settings that load_config gives, but one, which has this value as if by its flag.

    Raises:
        ConfigError: a value is wrong; the message names its flag, variable or key.
    """
    return StrataConfig.load({**flags, name: value}, os.environ)


def config_file_of(flags: Mapping[str, Any]) -> Path | None:
    """The config file that load_config reads for the same flags."""
    return config_file(flags, os.environ)


def given_settings(flags: Mapping[str, Any]) -> dict[str, str]:
    """The settings that a flag or a variable gives, by name, with what gives them."""
    specs = fields(StrataConfig)
    variables = {spec.name: variable_of(spec.name) for spec in specs}
    given = {name: text for name, text in variables.items() if text in os.environ}
    return given | {
        spec.name: flag_of(spec.name) for spec in specs if flags.get(spec.name) is not None
    }


def service_variables() -> dict[str, str]:
    """What a service manager says to this process; see server/notify.py."""
    names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    return {name: os.environ[name] for name in names if name in os.environ}


def gpu_variables() -> dict[str, str]:
    """What says to the NVIDIA driver which GPUs there are for this process, and in which order."""
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return {name: os.environ[name] for name in names if name in os.environ}


def written(parse: Parser[T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Callback of a command's own option, whose value is written, and refused, like a setting's.

    The callback gives the value that the text stands for, and raises ConfigError, which names the
    option, where it stands for none.
    """

    def convert(context: click.Context, param: click.Parameter, text: str | None) -> T | None:
        if text is None:
            return None
        origin = param.opts[-1]
        try:
            return parse(text)
        except UnusableError as error:
            raise ConfigError(
                f"{origin} {error.problem}: {quoted(text)}", hint=error.hint
            ) from None
        except ValueError:
            raise ConfigError(
                f"{origin} must be {parse.expected}, got {quoted(text)}",
                hint=f"{context.command_path} --help",
            ) from None

    return convert


def _option(spec: Field[Any]) -> Callable[[F], F]:
    parse = parser_of(spec)
    flag, note = flag_of(spec.name), f"[{parse.show(spec.default)}; {variable_of(spec.name)}]"
    help = f"{spec.metadata['help']}  {note}"
    if parse.is_switch:
        return click.option(f"{flag}/--no-{flag[2:]}", spec.name, default=None, help=help)
    return click.option(flag, spec.name, metavar=parse.metavar, default=None, help=help)


def _config_file_option() -> Callable[[F], F]:
    help = f"TOML file with settings.  [{variable_of('config')}]"
    return click.option(flag_of("config"), "config", metavar="FILE", default=None, help=help)
