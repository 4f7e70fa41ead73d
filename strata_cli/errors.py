"""Every error a user may see: a message, a hint, and the exit code it ends the command with."""

from __future__ import annotations

from pathlib import Path

LONGEST_VALUE, LONGEST_PATH = 60, 200


class StrataError(Exception):
    """Something went wrong that the user can understand and act on.

    Attributes:
        message: what failed, with the numbers and their units.
        hint: what to try; empty when nothing sensible can be suggested.
        exit_code: 1 for a failed run, 2 for a bad setting or bad input.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  try: {self.hint}" if self.hint else self.message


class ConfigError(StrataError):
    """A setting, flag or environment variable has a wrong value."""

    exit_code = 2


class InputError(StrataError):
    """What the user gave to read (prompt, token ids, file) cannot be used."""

    exit_code = 2


class ModelError(StrataError):
    """A model file is missing, damaged, or describes something unsupported."""

    exit_code = 2


class DeviceError(StrataError):
    """A device call failed; the message names the call and its numbers."""


class OutOfMemory(DeviceError):  # noqa: N818 - the field's word for it
    """A device or host allocation does not fit; the message has need, free and total."""


class ShapeError(StrataError):
    """An array handed to a kernel has the wrong shape or dtype."""


class Cancelled(StrataError):  # noqa: N818 - an end that was asked for, not a fault
    """Another thread asked for the end of a read, see engine/cancelling.py."""


class StateError(StrataError):
    """A sequence or snapshot cannot be used the way it was asked to be."""


def quoted(text: str) -> str:
    """What somebody wrote, quoted for a message on one line; a long one is cut and counted."""
    if len(text) <= LONGEST_VALUE:
        return repr(text)
    return f"{text[: LONGEST_VALUE - 20]!r}… ({len(text)} characters)"


def path_text(path: Path | str) -> str:
    """A path for a message: as it is, quoted where it would not print, cut where it is long."""
    text = str(path)
    shown = text if text.isprintable() else repr(text)
    if len(shown) <= LONGEST_PATH:
        return shown
    half = LONGEST_PATH // 2
    return f"{shown[:half]}…{shown[-half:]} ({len(text)} characters)"


class StallError(StrataError):
    """Nothing moved for the watchdog's time; the message says who waited for what."""
