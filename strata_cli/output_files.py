"""Files that users name, written: a regular one whole or not at all, any other kind as it is."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO

Write = Callable[[BinaryIO], object]
Temporary = Callable[[str], AbstractContextManager[None]]


@contextmanager
def removed_at_end(path: str) -> Iterator[None]:
    """Removes a file, if it is still there, when the block ends."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def target_of(path: str) -> str | None:
    """The regular file, there or not yet, that a path names, links followed; None: another kind.

    Raises:
        OSError: what is there cannot be looked at.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
    return os.path.realpath(path)


def write_in_place(path: str, write: Write) -> None:
    """Write to a device or a pipe that is there; waits for a pipe's reader.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb", opener=_open_existing) as file:
        write(file)


def replace_file(
    target: str, write: Write, temporary: Temporary = removed_at_end, *, is_durable: bool = False
) -> None:
    """Write a regular file anew. Whatever happens, it is the old one or the new one, whole.

    Args:
        target: from target_of(). Its mode is kept.
        write: writes all of it.
        temporary: removes the file beside it, should it stay.
        is_durable: also if the machine stops at once; waits for the disk.

    Raises:
        OSError: it cannot be written.
    """
    beside = temporary_path(target)
    with temporary(beside):
        with open(create(beside), "wb") as file:
            with contextlib.suppress(OSError):  # nothing there yet, or a file system without modes
                os.fchmod(file.fileno(), stat.S_IMODE(os.stat(target).st_mode))
            write(file)
            if is_durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, target)


def temporary_path(target: str) -> str:
    """A name for a file beside the target that nobody else has."""
    return os.path.join(os.path.dirname(target), f".strata-{os.urandom(8).hex()}.tmp")


def create(path: str) -> int:
    """A descriptor of a new file.

    Raises:
        OSError: it is there, or cannot be made.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def _open_existing(path: str, _flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
