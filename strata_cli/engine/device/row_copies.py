"""Copies of rows of one matrix into rows of another: neighbours in both are one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from strata_cli.engine.device.base import Tensor
from strata_cli.errors import ShapeError


class RowRun(NamedTuple):
    """So many neighbouring rows, from src on to those from dst on."""

    dst: int
    src: int
    rows: int

    def pair(self, dst: Tensor, src: Tensor) -> tuple[Tensor, Tensor]:
        """The bytes of the run in both matrices, flat."""
        nbytes = self.rows * src.shape[1]
        to_at = dst.offset_bytes + self.dst * dst.shape[1]
        from_at = src.offset_bytes + self.src * src.shape[1]
        return (
            Tensor(dst.buffer, to_at, (nbytes,), dst.dtype),
            Tensor(src.buffer, from_at, (nbytes,), src.dtype),
        )


def row_runs(
    dst: Tensor, dst_rows: Sequence[int], src: Tensor, src_rows: Sequence[int]
) -> list[RowRun]:
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
        return []
    if (
        min(dst_rows) < 0
        or max(dst_rows) >= num_dst
        or min(src_rows) < 0
        or max(src_rows) >= num_src
    ):
        raise ShapeError(
            f"rows {min(src_rows)}..{max(src_rows)} of {num_src} to "
            f"{min(dst_rows)}..{max(dst_rows)} of {num_dst}"
        )
    if src_bytes != dst_bytes:  # a gap lies behind each
        return [RowRun(to, source, 1) for to, source in zip(dst_rows, src_rows, strict=True)]
    runs: list[RowRun] = []
    to, source, count = dst_rows[0], src_rows[0], 0
    for next_to, next_source in zip(dst_rows, src_rows, strict=True):
        if next_to == to + count and next_source == source + count:
            count += 1
        else:
            runs.append(RowRun(to, source, count))
            to, source, count = next_to, next_source, 1
    runs.append(RowRun(to, source, count))
    return runs
