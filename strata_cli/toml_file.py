"""The config file as TOML: a small one, read within bounded memory."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from strata_cli.errors import ConfigError, path_text

LARGEST_FILE_BYTES = 1 << 16
MOST_DOTS = 64  # in one line: the parser's memory grows with the square of a dotted key's parts


def read_toml(path: Path) -> dict[str, Any]:
    """What the file says.

    Raises:
        ConfigError: it cannot be read, is larger than settings are, or is not TOML.
    """
    shown = path_text(path)
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {shown}: {error.strerror}",
            hint="check the path that --config or STRATA_CONFIG gives",
        ) from error
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigError(
            f"the config file {shown} has more than {LARGEST_FILE_BYTES} bytes",
            hint="it holds settings alone, one a line, such as: threads = 4",
        )
    try:
        text = data.decode("utf-8-sig")  # editors of some systems put a mark in front
        _check_dots(text, shown)
        return tomllib.loads(text)
    except RecursionError:
        raise _not_toml(shown, "nested too deeply") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise _not_toml(shown, _cut(str(error))) from error


def _check_dots(text: str, shown: str) -> None:
    for index, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("#") and line.count(".") > MOST_DOTS:
            raise _not_toml(shown, f"line {index} has more than {MOST_DOTS} dots")


def _not_toml(shown: str, problem: str) -> ConfigError:
    return ConfigError(
        f"the config file {shown} is not valid TOML: {problem}",
        hint='settings stand one a line, such as: threads = 4, or device = "host"',
    )


def _cut(problem: str) -> str:
    return problem if len(problem) <= 200 else f"{problem[:200]}…"
