"""What is written for one tensor: its place in the file, and how its bytes are made."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import BLOCK, QuantType, row_bytes
from tools.synth.blocks import PLAIN, Field, random_blocks, scale_fields, set_fields, store_plain

SLICE_BYTES = 4 << 20

Values: TypeAlias = Callable[[np.random.Generator, Shape], NDArray[np.float32]]


class Patch(NamedTuple):
    """Fields that some blocks of a tensor have instead of the tensor's own.

    Attributes:
        rows: the rows, counted within each period.
        period: rows after which they come again.
        blocks: the blocks of such a row.
        fields: what is written into them.
    """

    rows: slice
    period: int
    blocks: slice
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """One tensor to write.

    Attributes:
        name: as in the file.
        qtype: how it is stored.
        shape: numpy order.
        std: standard deviation of its random weights.
        patches: exceptions for some blocks of a quantized tensor.
        values: makes a plain tensor whole, instead of normal values of this deviation.
    """

    name: str
    qtype: QuantType
    shape: Shape
    std: float = 1.0
    patches: tuple[Patch, ...] = ()
    values: Values | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all matrices of the tensor together."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Stored bytes of one row."""
        return row_bytes(self.qtype, self.shape[-1])

    @property
    def nbytes(self) -> int:
        """Stored bytes of the tensor."""
        return self.num_rows * self.row_bytes


class Slice(NamedTuple):
    """Rows of a tensor that are made at once; cut the same way whoever makes them."""

    tensor: TensorPlan
    number: int
    first_row: int
    num_rows: int


def slices_of(tensor: TensorPlan) -> list[Slice]:
    """The tensor in pieces of about SLICE_BYTES; one that makes its values whole stays whole."""
    step = max(1, SLICE_BYTES // tensor.row_bytes)
    if tensor.values is not None:
        step = tensor.num_rows
    starts = range(0, tensor.num_rows, step)
    return [
        Slice(tensor, number, start, min(step, tensor.num_rows - start))
        for number, start in enumerate(starts)
    ]


def make_slice(part: Slice, seed: int) -> NDArray[np.uint8]:
    """The stored bytes, [num_rows, row_bytes]: the same for the same seed, plan and slice."""
    tensor = part.tensor
    entropy = (seed, zlib.crc32(tensor.name.encode()), part.number)
    bits = np.random.SFC64(np.random.SeedSequence(entropy))
    if tensor.qtype in PLAIN:
        stored = store_plain(tensor.qtype, _plain_values(tensor, part.num_rows, bits))
        return stored.reshape(part.num_rows, tensor.row_bytes)
    per_row = tensor.shape[-1] // BLOCK[tensor.qtype].weights
    fields = scale_fields(tensor.qtype, tensor.std)
    blocks = random_blocks(bits, tensor.qtype, part.num_rows * per_row, fields)
    rows = blocks.reshape(part.num_rows, per_row, -1)
    for patch in tensor.patches:
        _apply(patch, rows, part.first_row)
    return rows.reshape(part.num_rows, tensor.row_bytes)


def _plain_values(
    tensor: TensorPlan, num_rows: int, bits: np.random.BitGenerator
) -> NDArray[np.float32]:
    rng = np.random.Generator(bits)
    if tensor.values is not None:
        return tensor.values(rng, tensor.shape)
    values = rng.standard_normal((num_rows, tensor.shape[-1]), dtype=np.float32)
    values *= np.float32(tensor.std)
    return values


def _apply(patch: Patch, rows: NDArray[np.uint8], first_row: int) -> None:
    """Patch the rows of a slice [rows, blocks, block bytes] that starts at first_row."""
    last_row = first_row + rows.shape[0]
    for origin in range(first_row // patch.period * patch.period, last_row, patch.period):
        start = max(origin + patch.rows.start, first_row)
        stop = min(origin + patch.rows.stop, last_row)
        if start < stop:
            set_fields(rows[start - first_row : stop - first_row, patch.blocks], patch.fields)
