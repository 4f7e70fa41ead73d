"""What of a sequence is positional, copied to host memory, so that another may use its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.device.transfer import download, upload
from strata_cli.engine.forward.state import GdnState, SequenceState


@dataclass(frozen=True, slots=True)
class ParkedRows:
    """K/V and index rows of a sequence's first positions, in host memory.

    Attributes:
        ids: the tokens of these positions.
        parts: copies of the rows, in a fixed order.
        exact_rows: see SequenceState.
    """

    ids: tuple[int, ...]
    parts: tuple[NDArray[Any], ...]
    exact_rows: int

    @property
    def nbytes(self) -> int:
        """Host memory of the copies."""
        return sum(part.nbytes for part in self.parts)


def parked_bytes(state: SequenceState) -> int:
    """Host memory that parking all valid rows would take."""
    return sum(rows.nbytes for rows in _rows(state, len(state.cached_ids)))


def park(state: SequenceState, num_tokens: int | None = None) -> ParkedRows:
    """Copy valid rows to host memory; also of a sequence interrupted halfway. Waits.

    Args:
        state: of the sequence.
        num_tokens: so many of its first rows, at most those that are valid; None: all of them.
    """
    ids = tuple(state.cached_ids[:num_tokens])
    parts = (download(state.device, state.stream, rows) for rows in _rows(state, len(ids)))
    return ParkedRows(ids, tuple(parts), min(state.exact_rows, len(ids)))


def unpark(state: SequenceState, parked: ParkedRows) -> None:
    """Put the rows back. A snapshot must be restored before anything is read. Waits."""
    state.is_consistent = False
    state.cached_ids = []
    state.exact_rows = 0
    tensors = _rows(state, len(parked.ids))
    for tensor, part in zip(tensors, parked.parts, strict=True):
        upload(state.device, state.stream, tensor, part)
    state.cached_ids = list(parked.ids)
    state.exact_rows = parked.exact_rows


def _rows(state: SequenceState, count: int) -> Iterator[Tensor]:
    for layer, ratio in zip(state.layers, state.ratio, strict=True):
        if isinstance(layer, GdnState):
            continue
        yield layer.keys.rows(0, count)
        yield layer.values.rows(0, count)
        if ratio:
            yield layer.index_keys.rows(0, count)
            yield layer.pooled.rows(0, count // ratio)
