"""Small result files: written whole or not at all."""

from __future__ import annotations

import os

from strata_cli.commands.interrupts import interrupts
from strata_cli.commands.logits_file import LogitsFile
from strata_cli.errors import StrataError, path_text


def save_whole(place: LogitsFile, data: bytes) -> None:
    """Write a file; a regular one changes when all is written, or stays as it was.

    Args:
        place: from check_logits_file().
        data: all of it.

    Raises:
        StrataError: it cannot be written.
    """
    try:
        if place.target is None:
            with open(place.path, "wb") as file:
                file.write(data)
        else:
            _replace(place.target, data)
    except OSError as error:
        raise StrataError(
            f"cannot write {path_text(place.path)}: {error.strerror}",
            hint="check the folder and its space",
        ) from error


def _replace(target: str, data: bytes) -> None:
    temporary = os.path.join(os.path.dirname(target), f".strata-{os.urandom(8).hex()}.tmp")
    with interrupts.temporary_file(temporary):
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, target)
