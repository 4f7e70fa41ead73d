"""The residual dump: what the layers left in the residual streams at every 64th position."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Buffer, Device, Stream, Tensor
from strata_cli.errors import InputError, StrataError, path_text

EVERY_TOKENS = 64


class ResidualDump:
    """Writes a record for every position p of a prompt with p mod 64 = 0.

    A record is p as int64 and the residual streams x [S, D] behind the last layer as float32, all
    little-endian. The file is replaced when the first chunk comes and then grows with every chunk,
    prompt after prompt. Builds or settings that compute the same bits write the same file.

    Args:
        path: where to.
        device: holds the residual streams.
    """

    def __init__(self, path: Path, device: Device) -> None:
        self._path = path
        self._device = device
        self._file: BinaryIO | None = None
        self._staging: Buffer | None = None

    def write(self, stream: Stream, x: Tensor, position: int) -> None:
        """Write a chunk's records. Waits for the stream.

        Args:
            stream: on which the layers were enqueued.
            x: their residual streams, [T, S, D].
            position: of the first token.

        Raises:
            InputError: the file cannot be opened.
            StrataError: it cannot be written.
        """
        file = self._file or self._open()
        rows = range(-position % EVERY_TOKENS, x.shape[0], EVERY_TOKENS)
        values = self._fetch(stream, x, rows)
        record = np.dtype([("position", "<i8"), ("residual", "<f4", (values.shape[1],))])
        records = np.empty(len(rows), record)
        records["position"] = [position + row for row in rows]
        records["residual"] = values
        try:
            file.write(records.tobytes())
            file.flush()
        except OSError as error:
            raise StrataError(
                f"cannot write the residual dump to {path_text(self._path)}: {error.strerror}",
                hint="check the folder and its space",
            ) from error

    def close(self) -> None:
        """Ends the file. Safe to call twice."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # all of it was flushed
                self._file.close()
        if self._staging is not None:
            self._staging.close()
        self._file = self._staging = None

    def _open(self) -> BinaryIO:
        try:
            self._file = self._path.open("wb")
        except OSError as error:
            raise InputError(
                f"cannot write the residual dump to {path_text(self._path)}: {error.strerror}",
                hint="STRATA_PREFILL_DUMP_R is the path of a file to write",
            ) from error
        return self._file

    def _fetch(self, stream: Stream, x: Tensor, rows: range) -> NDArray[np.float32]:
        """The rows of x on the host, [len(rows), S * D]."""
        width = x.size // x.shape[0]
        if not rows:
            return np.empty((0, width), np.float32)
        staged = Tensor.over(self._room(4 * len(rows) * width), (len(rows), width), np.float32)
        for index, row in enumerate(rows):
            stream.copy(staged.rows(index, index + 1), x.rows(row, row + 1))
        stream.synchronize()
        return np.array(staged.numpy())

    def _room(self, nbytes: int) -> Buffer:
        if self._staging is None or self._staging.nbytes < nbytes:
            if self._staging is not None:
                self._staging.close()
            self._staging = None
            self._staging = self._device.allocate_pinned(nbytes)
        return self._staging
