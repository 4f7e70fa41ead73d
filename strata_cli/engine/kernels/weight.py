"""Quantized matrices as kernels see them: bytes somewhere, a type, rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.model.quants import QuantType, row_bytes
from strata_cli.errors import ShapeError


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix in one buffer. Owns nothing.

    Attributes:
        data: the rows' bytes, one row after the other, any shape.
        qtype: how a row's bytes encode its weights.
        rows: output features N.
        cols: input features K, a multiple of the type's block.
    """

    data: Tensor
    qtype: QuantType
    rows: int
    cols: int

    def __post_init__(self) -> None:
        """Raises ShapeError when the bytes do not hold rows x cols weights."""
        if self.data.nbytes != self.nbytes:
            raise ShapeError(
                f"{self.qtype.name} matrix of {self.rows} x {self.cols} weights needs "
                f"{self.nbytes} bytes, got {self.data.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * row_bytes(self.qtype, self.cols)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """Where a matrix lies inside each expert's blob; the blobs' addresses come at launch.

    Attributes:
        qtype: how a row's bytes encode its weights.
        rows: output features N.
        cols: input features K, a multiple of the type's block.
        offset_bytes: first byte of the matrix, from the start of the blob.
    """

    qtype: QuantType
    rows: int
    cols: int
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * row_bytes(self.qtype, self.cols)
