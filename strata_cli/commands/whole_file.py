"""Small result files: written whole or not at all."""

from __future__ import annotations

from strata_cli.commands.logits_file import LogitsFile


def save_whole(place: LogitsFile, data: bytes) -> None:
    """Write a file; a regular one changes when all is written, or stays as it was.

    Args:
        place: from check_logits_file().
        data: all of it.

    Raises:
        StrataError: it cannot be written.
    """
    place.save_by(lambda file: file.write(data))
