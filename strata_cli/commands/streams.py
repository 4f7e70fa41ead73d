"""The standard streams of the process: a result that cannot be written is an error, told once.

Python's own streams lose the rest of a short write when unbuffered, are missing when the caller
closed them, and change the exit code when a message finds no taker.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import select
import sys
from typing import Any, NoReturn, TextIO

from strata_cli.errors import StrataError


class OutputFailed(StrataError):  # noqa: N818 - says what happened, as the errors beside it do
    """A result found no taker.

    Attributes:
        is_pipe_closed: the reader had enough; nobody needs to be told.
    """

    def __init__(self, error: OSError) -> None:
        is_unwritable = error.errno == errno.EBADF
        reason = "stdout is not open for writing" if is_unwritable else error.strerror
        super().__init__(f"cannot write the result: {reason}")
        self.is_pipe_closed = error.errno == errno.EPIPE


class _PatientFile(io.FileIO):
    """A descriptor that waits where the other side set it to answer EAGAIN."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)

    def _put(self, data: Any) -> int:
        while (written := super().write(data)) is None:
            select.select([], [self], [])
        return written


class ResultFile(_PatientFile):
    """Takes results. After its first failure it drops what comes: one error is enough."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self.failure: OutputFailed | None = None

    def check(self) -> None:
        """Refuse a descriptor that is not open for writing.

        Raises:
            OutputFailed: it is not.
        """
        mode = fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
        if mode == os.O_RDONLY:
            self._fail(OSError(errno.EBADF, os.strerror(errno.EBADF)))

    def write(self, data: Any) -> int:
        """Bytes written, which may be fewer than asked.

        Raises:
            OutputFailed: they cannot be written.
        """
        if self.failure is not None:
            return memoryview(data).nbytes
        try:
            return self._put(data)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        self.failure = OutputFailed(error)
        raise self.failure from error


class MessageFile(_PatientFile):
    """Takes messages. One that cannot be written is dropped: there is nowhere to complain."""

    def write(self, data: Any) -> int:
        """Bytes written or dropped."""
        try:
            return self._put(data)
        except OSError:
            return memoryview(data).nbytes


def open_streams() -> ResultFile:
    """Replace sys.stdout and sys.stderr by streams that behave as this module says.

    A stream that the caller closed gets /dev/null for its descriptor; or the next file that is
    opened, perhaps the model, would be stdout for every library that writes to descriptor 1.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_WRONLY)
    results = ResultFile(1 if sys.stdout is not None else os.open(os.devnull, os.O_RDONLY))
    messages = MessageFile(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY))
    sys.stdout = _text(results, sys.stdout)
    sys.stderr = _text(messages, sys.stderr)
    return results


def _text(file: _PatientFile, before: TextIO | None) -> TextIO:
    errors = "backslashreplace" if before is None or before.errors == "strict" else before.errors
    return io.TextIOWrapper(
        io.BufferedWriter(file),
        encoding=before.encoding if before is not None else "utf-8",
        errors=errors,
        line_buffering=True,
    )


def require_stdout() -> None:
    """Refuse to begin what could not be told.

    Raises:
        OutputFailed: stdout is closed, or not open for writing.
    """
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(file, ResultFile):
        file.check()
