"""Files of states, one a line: how a flag names them, and how they are opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from strata_cli.commands.opening import STDIN_FILE
from strata_cli.commands.prompt import STDIN
from strata_cli.errors import InputError, path_text


def file_of(path: Path) -> str:
    """The file that is read: no output may go there."""
    return STDIN_FILE if str(path) == STDIN else os.fspath(path)


def origin_of(path: Path) -> str:
    """What to call it in messages."""
    return "stdin" if str(path) == STDIN else path_text(path)


def open_lines(path: Path) -> BinaryIO:
    """Open the file, or stdin where it is "-".

    Raises:
        InputError: it cannot be read.
    """
    try:
        return os.fdopen(os.dup(0), "rb") if str(path) == STDIN else open(path, "rb")
    except OSError as error:
        raise InputError(
            f"cannot read {origin_of(path)}: {error.strerror}", hint="check the path"
        ) from error
