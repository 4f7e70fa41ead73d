"""Reads the tensor directory of a GGUF file: name, type, shape and place of every tensor."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

from strata_cli.engine.model.cursor import Cursor
from strata_cli.engine.model.quants import BLOCK, QuantType
from strata_cli.errors import ModelError

MAX_TENSORS = 131_072
MAX_DIMS = 4
MAX_NAME_BYTES = 64  # the format's own limit
MAX_WEIGHTS = 2**63 - 1

_MIN_ENTRY_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, n_dims, one dim, type, offset
# For messages only: ids that ggml knows or knew, but that never hold a model's weights.
_OTHER_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


class TensorEntry(NamedTuple):
    """One line of the directory, checked against the file.

    Attributes:
        shape: numpy order, outermost axis first, the contiguous axis last.
        start: first byte of the data, counted from the start of the file.
        nbytes: length of the data.
    """

    name: str
    qtype: QuantType
    shape: tuple[int, ...]
    start: int
    nbytes: int


def check_num_tensors(cursor: Cursor, count: int) -> None:
    """Refuse a tensor count that the file is too small for."""
    cursor.check_count(count, MAX_TENSORS, _MIN_ENTRY_BYTES, "tensors")


def read_directory(cursor: Cursor, count: int, alignment: int) -> list[TensorEntry]:
    """Read ``count`` entries at the cursor and place them in the data section behind them.

    Args:
        cursor: stands at the first entry; ends behind the last.
        count: number of entries, checked by check_num_tensors.
        alignment: of the data section and of every tensor, in bytes.

    Raises:
        ModelError: an unknown type, a shape that cannot be, or data that is misaligned, overlaps
            another tensor's or reaches beyond the end of the file.
    """
    relative = [_read_entry(cursor, index, alignment) for index in range(count)]
    data_start = -(-cursor.pos // alignment) * alignment
    tensors = [entry._replace(start=data_start + entry.start) for entry in relative]
    _check_names(cursor, tensors)
    _check_places(cursor, tensors)
    return tensors


def _read_entry(cursor: Cursor, index: int, alignment: int) -> TensorEntry:
    """One entry; its start is still relative to the data section."""
    name = cursor.text(f"the name of tensor {index}", 1, MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dims = cursor.u32(what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.damaged(f"{what} has {num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.u64(what) for _ in range(num_dims)]
    weights = math.prod(dims)
    if not 1 <= weights <= MAX_WEIGHTS:
        raise cursor.damaged(f"{what} has the impossible shape {dims}")
    qtype = _quant_type(cursor, what)
    offset = cursor.u64(what)
    if offset % alignment:
        raise cursor.damaged(f"{what} starts at {offset}, which is no multiple of {alignment}")
    block = BLOCK[qtype]
    if dims[0] % block.weights:
        raise cursor.damaged(
            f"{what} has rows of {dims[0]} weights, but {qtype.name} stores blocks of "
            f"{block.weights}"
        )
    nbytes = weights // block.weights * block.nbytes
    return TensorEntry(name, qtype, tuple(reversed(dims)), offset, nbytes)


def _quant_type(cursor: Cursor, what: str) -> QuantType:
    number = cursor.u32(what)
    try:
        return QuantType(number)
    except ValueError:
        label = f" ({_OTHER_TYPES[number]})" if number in _OTHER_TYPES else ""
        raise ModelError(
            f"{cursor.origin}: {what} has the type {number}{label}, which is not supported",
            hint=f"supported types: {' '.join(qtype.name for qtype in QuantType)}",
        ) from None


def _check_names(cursor: Cursor, tensors: list[TensorEntry]) -> None:
    seen: set[str] = set()
    for entry in tensors:
        if entry.name in seen:
            raise cursor.damaged(f"tensor {entry.name!r} appears twice")
        seen.add(entry.name)


def _check_places(cursor: Cursor, tensors: list[TensorEntry]) -> None:
    by_start = sorted(tensors, key=lambda entry: entry.start)
    for before, after in pairwise(by_start):
        if before.start + before.nbytes > after.start:
            raise cursor.damaged(f"tensors {before.name!r} and {after.name!r} overlap")
    if by_start:
        last = by_start[-1]
        end = last.start + last.nbytes
        if end > cursor.size:
            raise cursor.damaged(
                f"the file is truncated: its tensors end at byte {end}, "
                f"the file at {cursor.size}; {last.name!r} lies beyond"
            )
