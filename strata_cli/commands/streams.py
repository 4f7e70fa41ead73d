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
from typing import Any, TextIO

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


class _Writer(io.BufferedWriter):
    """Writes all it is given, also where the other side set the descriptor to answer EAGAIN.

    After its first failure it drops what comes. Only the buffer in C talks to the descriptor: an
    interrupt between the two would make it write once more what was written already.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(io.FileIO(descriptor, "w", closefd=False))
        self.has_failed = False

    def write(self, data: Any) -> int:
        """Take bytes; the number of all of them."""
        rest = memoryview(data).cast("B")
        nbytes = rest.nbytes
        while not self.has_failed:
            try:
                super().write(rest)
                break
            except BlockingIOError as error:
                rest = rest[error.characters_written :]
                self._wait()
            except OSError as error:
                self._fail(error)
        return nbytes

    def flush(self) -> None:
        """Write what was taken."""
        while not self.has_failed:
            try:
                super().flush()
                break
            except BlockingIOError:
                self._wait()
            except OSError as error:
                self._fail(error)

    def drop(self) -> None:
        """Drop what was taken and not written, and all that comes. Does not block."""
        self.has_failed = True

    def _wait(self) -> None:
        select.select([], [self.fileno()], [])

    def _fail(self, _error: OSError) -> None:
        self.drop()


class ResultWriter(_Writer):
    """Takes results; raises OutputFailed once, when they cannot be written."""

    failure: OutputFailed | None = None

    def check(self) -> None:
        """Refuse a descriptor that is not open for writing.

        Raises:
            OutputFailed: it is not.
        """
        mode = fcntl.fcntl(self.fileno(), fcntl.F_GETFL) & os.O_ACCMODE
        if mode == os.O_RDONLY:
            self._fail(OSError(errno.EBADF, os.strerror(errno.EBADF)))

    def _fail(self, _error: OSError) -> None:
        self.drop()
        self.failure = OutputFailed(_error)
        raise self.failure from _error


class MessageWriter(_Writer):
    """Takes messages. Those that cannot be written are dropped: there is nowhere to complain."""


def open_streams() -> ResultWriter:
    """Replace sys.stdout and sys.stderr by streams that behave as this module says.

    A stream that the caller closed gets /dev/null for its descriptor; or the next file that is
    opened, perhaps the model, would be stdout for every library that writes to descriptor 1.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_WRONLY)
    results = ResultWriter(1 if sys.stdout is not None else os.open(os.devnull, os.O_RDONLY))
    messages = MessageWriter(2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY))
    sys.stdout = _text(results, sys.stdout)
    sys.stderr = _text(messages, sys.stderr)
    return results


def _text(writer: _Writer, before: TextIO | None) -> TextIO:
    errors = "backslashreplace" if before is None or before.errors == "strict" else before.errors
    return io.TextIOWrapper(
        writer,
        encoding=before.encoding if before is not None else "utf-8",
        errors=errors,
        line_buffering=True,
    )


def require_stdout() -> None:
    """Refuse to begin what could not be told.

    Raises:
        OutputFailed: stdout is closed, or not open for writing.
    """
    writer = getattr(sys.stdout, "buffer", None)
    if isinstance(writer, ResultWriter):
        writer.check()
