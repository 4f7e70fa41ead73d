"""Copies of rows of one matrix into rows of another: neighbours in both are one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata_cli.engine.device.base import Tensor
from strata_cli.errors import ShapeError


class RowRuns(NamedTuple):
    """Runs of neighbouring rows: so many rows from src on, to those from dst on."""

    dst: list[int]
    src: list[int]
    rows: list[int]

    def pairs(self, dst: Tensor, src: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The bytes of each run in both matrices, flat."""
        return [
            (
                _flat(dst, to * dst.shape[1], rows * src.shape[1]),
                _flat(src, source * src.shape[1], rows * src.shape[1]),
            )
            for to, source, rows in zip(self.dst, self.src, self.rows, strict=True)
        ]


def _flat(matrix: Tensor, first: int, nbytes: int) -> Tensor:
    return Tensor(matrix.buffer, matrix.offset_bytes + first, (nbytes,), matrix.dtype)


def row_runs(dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]) -> RowRuns:
    """The pieces that a copy of rows is cut into.

    Args:
        dst: uint8 [R, W].
        dst_rows: where each row goes, to its first bytes.
        src: uint8 [S, w], w <= W.
        src_rows: what goes there.

    Raises:
        ShapeError: a row of src does not fit one of dst, a matrix has no such row, or there are
            not as many of one as of the other.
    """
    (num_dst, dst_bytes), (num_src, src_bytes) = dst.shape, src.shape
    if src_bytes > dst_bytes or len(dst_rows) != len(src_rows):
        raise ShapeError(
            f"{len(src_rows)} rows of {src_bytes} bytes do not fit {len(dst_rows)} of {dst_bytes}"
        )
    if not dst_rows:
        return RowRuns([], [], [])
    bounds = min(dst_rows), max(dst_rows), min(src_rows), max(src_rows)
    if bounds[0] < 0 or bounds[1] >= num_dst or bounds[2] < 0 or bounds[3] >= num_src:
        raise ShapeError(
            f"rows {bounds[2]}..{bounds[3]} of {num_src} to {bounds[0]}..{bounds[1]} of {num_dst}"
        )
    if src_bytes != dst_bytes:  # a gap lies behind each
        return RowRuns(list(dst_rows), list(src_rows), [1] * len(dst_rows))
    runs = RowRuns([], [], [])
    next_to = next_source = -1
    for to, source in zip(dst_rows, src_rows, strict=True):
        if to == next_to and source == next_source:
            runs.rows[-1] += 1
        else:
            runs.dst.append(to)
            runs.src.append(source)
            runs.rows.append(1)
        next_to, next_source = to + 1, source + 1
    return runs
