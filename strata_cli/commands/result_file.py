"""Files for results: refused before the model runs, and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from strata_cli.commands.interrupts import interrupts
from strata_cli.errors import ConfigError, InputError, StrataError, path_text
from strata_cli.output_files import Write, create, replace_file, temporary_path, write_in_place


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A place that a result can be written to.

    Attributes:
        path: as the user wrote it.
        target: the regular file, there or not yet, that is replaced, links followed; None for a
            device or a pipe, which is written as it is.
    """

    path: str
    target: str | None

    def save(self, data: bytes) -> None:
        """Write the file. A regular one changes when all is written, or stays as it was.

        Raises:
            StrataError: it cannot be written.
        """
        self._save_by(lambda file: file.write(data))

    def save_logits(self, logits: NDArray[np.float32]) -> None:
        """The same as a .npy file.

        Raises:
            StrataError: it cannot be written.
        """
        self._save_by(partial(_write, logits))

    def _save_by(self, write: Write) -> None:
        try:
            if self.target is None:
                write_in_place(self.path, write)
            else:
                replace_file(self.target, write, interrupts.temporary_file)
        except OSError as error:
            raise StrataError(
                f"cannot write {path_text(self.path)}: {error.strerror}",
                hint="check the folder and its space",
            ) from error


def check_result_file(flag: str, path: str, inputs: Mapping[str, str]) -> ResultFile:
    """Find out whether a result can be written to a path, without changing what is there.

    Args:
        flag: that named the path, for messages.
        path: as the user wrote it.
        inputs: files that this run reads, by what they are.

    Raises:
        InputError: nothing can be written there.
        ConfigError: it is where results go, or one of the inputs.
    """
    if path == "-":
        raise InputError(
            f"{flag} needs a file; - is none, and stdout is where the result goes",
            hint="name a file, or write ./- for one of that name",
        )
    try:
        status = _status(path)
        if status is not None:
            _check_other_uses(flag, path, status, inputs)
        return ResultFile(path, _target(path, status))
    except OSError as error:
        raise InputError(
            f"{flag}: cannot write {path_text(path)}: {error.strerror}",
            hint="name a file in a folder of yours",
        ) from error


def check_distinct(outputs: Mapping[str, str]) -> None:
    """Refuse one regular file for two things that a run writes.

    Args:
        outputs: paths by the flags or variables that name them.

    Raises:
        ConfigError: two are the same.
    """
    for (one, path), (other, other_path) in itertools.combinations(outputs.items(), 2):
        if _is_same_file(path, other_path):
            raise ConfigError(
                f"{one} and {other} are the same file, {path_text(path)}", hint="give each its own"
            )


def _is_same_file(path: str, other: str) -> bool:
    try:
        status = os.stat(path)
        return stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(other))
    except OSError:  # new files
        return os.path.realpath(path) == os.path.realpath(other)


def _status(path: str) -> os.stat_result | None:
    """What is there, links followed; None for a new file in a folder that exists."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        folder, name = os.path.split(path)
        os.stat(folder or os.curdir)  # raises, where the folder is what is missing
        if not name:
            raise
        return None


def _check_other_uses(
    flag: str, path: str, status: os.stat_result, inputs: Mapping[str, str]
) -> None:
    shown = path_text(path)
    if _is_open_as(1, status) and not stat.S_ISCHR(status.st_mode):
        raise ConfigError(
            f"{flag}: {shown} is stdout, where the result goes", hint="name another file"
        )
    if _is_open_as(2, status) and stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{flag}: {shown} is stderr, where messages go", hint="name another file")
    for what, name in inputs.items():
        with contextlib.suppress(OSError):  # a missing input is another error
            if stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(name)):
                raise ConfigError(
                    f"{flag}: {shown} is the {what}, which this would overwrite",
                    hint="name another file",
                )


def _is_open_as(descriptor: int, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(status, os.fstat(descriptor))
    except OSError:  # closed; that is another error
        return False


def _target(path: str, status: os.stat_result | None) -> str | None:
    """The regular file to replace, or None.

    Raises:
        OSError: nothing can be written there.
    """
    if status is not None:
        if stat.S_ISDIR(status.st_mode):
            raise _os_error(errno.EISDIR)
        if stat.S_ISSOCK(status.st_mode):
            raise _os_error(errno.ENXIO)
        if not os.access(path, os.W_OK):
            raise _os_error(errno.EACCES)
        if not stat.S_ISREG(status.st_mode):
            return None
    target = os.path.realpath(path)
    # Only an attempt tells: folders can refuse new files in more ways than their mode says.
    temporary = temporary_path(target)
    with interrupts.temporary_file(temporary):
        os.close(create(temporary))
    return target


def _os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _write(logits: NDArray[np.float32], file: BinaryIO) -> None:
    """As np.save does, which cannot write to a pipe and has no reason to tell for a full disk."""
    rows = np.ascontiguousarray(logits)
    header = np.lib.format.header_data_from_array_1_0(rows)
    np.lib.format.write_array_header_1_0(file, header)
    file.write(rows.data)
