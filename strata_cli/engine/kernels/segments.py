"""The segments of a pass, for kernels that take all of them in one launch.

A segment is consecutive rows of one sequence, or of a branch of it. What differs from segment to
segment, its rows and where its state lies, is in a table in device memory: segments.cuh.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.kernels.shapes import expect

SEGMENT_WORDS = 12  # int64 each, of a segment in a layer's table


class Segments(NamedTuple):
    """The segments of a pass, as one layer sees them.

    Attributes:
        table: int64 [S, SEGMENT_WORDS].
        counts: rows of each segment; together all rows of the pass, in order.
        are_steps: each segment is one token of a sequence that goes on by it.
    """

    table: Tensor
    counts: tuple[int, ...]
    are_steps: bool = False

    @property
    def longest(self) -> int:
        """Most rows of a segment."""
        return max(self.counts)

    def check(self, name: str, num_rows: int) -> None:
        """Refuse a table of other segments, or rows that are not theirs.

        Raises:
            ShapeError: it is, or they are.
        """
        expect(f"{name} segments", self.table, (len(self.counts), SEGMENT_WORDS), np.int64)
        assert sum(self.counts) == num_rows, f"{name}: {num_rows} rows of {sum(self.counts)}"
