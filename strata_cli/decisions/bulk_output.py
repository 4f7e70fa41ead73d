"""The file that rows are appended to: bound to its input and job, and whole after any end of a run.

Each row begins with its line's number, a hash of the line and the key of the job. A row is written
by one call; a last one that a crash cut short is recognised by how it begins, and cut off.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self

import orjson

from strata_cli.decisions.bulk_input import InputLine
from strata_cli.errors import InputError, StrataError, path_text

MOST_ROW_BYTES = 64 << 20
PARTS = ("model, device or version", "set of questions", "level, prior, calibration or threshold")


class Resumed(NamedTuple):
    """How many rows are there, and the lines that have none."""

    num_rows: int
    lines: Iterator[InputLine]


def row_beginning(line: InputLine, key: str) -> bytes:
    """How the row of a line begins: an object that goes on."""
    return b'{"line":%d,"input":"%s","run":"%s",' % (
        line.number,
        line.digest.encode(),
        key.encode(),
    )


class BulkOutput:
    """Rows in the order of their lines. One process at a time has a file open.

    Args:
        path: a regular file, there or not yet.
        key: of the job; see BulkJob.

    Raises:
        InputError: the file cannot be opened, or another run has it open.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise InputError(
                f"cannot write {path_text(path)}: {error.strerror}",
                hint="name a file in a folder of yours",
            ) from error
        self._file = os.fdopen(descriptor, "r+b")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise InputError(
                f"another run is writing {path_text(path)}",
                hint="wait for it, or name another file",
            ) from None

    def resume(self, lines: Iterator[InputLine]) -> Resumed:
        """Compare the rows that are there with the lines that they answer.

        A last row that was cut short is removed.

        Args:
            lines: all of them; used up as far as they are answered.

        Raises:
            InputError: the file is not this job's about these lines; nothing has changed then.
        """
        count, position = 0, 0
        self._file.seek(0)
        while row := self._file.readline(MOST_ROW_BYTES):
            line = next(lines, None)
            if line is None:
                raise self._other(f"it has a row {count + 1}, and the input has {count} lines")
            beginning = row_beginning(line, self._key)
            if _is_cut(row, beginning) and not self._file.read(1):
                self._truncate(position)
                return Resumed(count, chain([line], lines))
            if not row.startswith(beginning) or not row.endswith(b"}\n"):
                raise self._other(_difference(row, beginning, count + 1))
            count, position = count + 1, position + len(row)
        self._truncate(position)
        return Resumed(count, lines)

    def append(self, row: bytes) -> None:
        """Write one row behind those that are there.

        Raises:
            StrataError: it cannot be written.
        """
        rest, descriptor = memoryview(row), self._file.fileno()
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError as error:
            raise self._unwritable(error) from error

    def close(self) -> None:
        """Hand all rows to the disk. Safe to call twice."""
        if not self._file.closed:
            try:
                with self._file:
                    os.fsync(self._file.fileno())
            except OSError as error:
                raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _truncate(self, position: int) -> None:
        """Let rows begin at a position, from which on there is nothing of worth."""
        try:
            self._file.truncate(position)
        except OSError as error:
            raise self._unwritable(error) from error
        os.lseek(self._file.fileno(), position, os.SEEK_SET)

    def _unwritable(self, error: OSError) -> StrataError:
        return StrataError(
            f"cannot write {path_text(self._path)}: {error.strerror}",
            hint="check the folder and its space; the same command goes on from there",
        )

    def _other(self, difference: str) -> InputError:
        return InputError(
            f"{path_text(self._path)} is not the output of this run so far: {difference}",
            hint="name another file with --out, or remove this one",
        )


def _is_cut(row: bytes, beginning: bytes) -> bool:
    """Whether a crash may have cut a row of this beginning short.

    A file system may fill what it lost with zeros.
    """
    if row.endswith(b"\n"):
        return False
    written = row.rstrip(b"\0")
    return written.startswith(beginning) or beginning.startswith(written)


def _difference(row: bytes, beginning: bytes, number: int) -> str:
    """What tells a row from the one expected, in words."""
    expected = orjson.loads(beginning.removesuffix(b",") + b"}")
    try:
        found = orjson.loads(row)
        kept = {name: str(found[name]) for name in expected}
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"its line {number} is no row of such a run"
    if kept == {name: str(value) for name, value in expected.items()}:
        return f"its row {number} does not end as rows do"
    parts = zip(PARTS, kept["run"].split("-"), expected["run"].split("-"), strict=False)
    others = [part for part, its, ours in parts if its != ours]
    if others:
        return f"its row {number} was written with another {' and another '.join(others)}"
    return f"its row {number} answers another line than the input's line {number}"
