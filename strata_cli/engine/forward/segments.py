"""The table in which kernels that take all segments of a pass at once find them: segments.cuh."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Stream
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.workspace import Workspace
from strata_cli.engine.kernels.segments import SEGMENT_WORDS
from strata_cli.engine.model.spec import ModelSpec

# Words of a segment: row, rows and position; then addresses. A running state's: two that are read,
# two that are written. A cache's: keys, values, index keys and pooled, of what lies ahead of the
# segment and of its own.
_READ, _WRITTEN = slice(3, 5), slice(5, 7)
_AHEAD, _OWN = slice(3, 7), slice(7, 11)
_POOLED = 10


def wants_table(stream: Stream, batch: Batch, most_segments: int) -> bool:
    """Whether a pass takes its segments together: on a GPU, where there are several of them."""
    return stream.shared_bytes > 0 and 1 < len(batch.segments) <= most_segments


def segment_rows(
    spec: ModelSpec, workspace: Workspace, segments: Sequence[Segment]
) -> NDArray[np.int64]:
    """The table of a pass that is about to be enqueued.

    A branch leaves its running state nowhere. Its rows of a cache lie in the workspace, where its
    sequence's would begin if that had gone on by them: addressed by position like the others.

    Args:
        spec: the model.
        workspace: of the pass.
        segments: of the pass.

    Returns:
        int64 [L + 1, S, SEGMENT_WORDS]: of each layer, and last of the n-gram embedding.
    """
    starts = np.array([segment.start for segment in segments])
    counts = np.array([segment.stop - segment.start for segment in segments])
    positions = np.array([segment.state.position for segment in segments])
    is_branch = np.array([[segment.room is not None] for segment in segments])
    addresses = np.stack([segment.state.addresses() for segment in segments], axis=1)
    table = np.zeros((*addresses.shape[:2], SEGMENT_WORDS), np.int64)
    table[:, :, :3] = np.stack([starts, counts, positions], axis=1)
    runs = np.array([*spec.is_recurrent, True])
    table[runs, :, _READ] = addresses[runs, :, :2]
    table[runs, :, _WRITTEN] = np.where(is_branch, 0, addresses[runs, :, :2])
    table[~runs, :, _AHEAD] = addresses[~runs]
    rows = np.stack(
        [
            _address(workspace, name, starts - positions)
            for name in ("branch_keys", "branch_values", "index_k", "branch_pooled")
        ],
        axis=1,
    )
    table[~runs, :, _OWN] = np.where(is_branch, rows, addresses[~runs])
    for layer, ratio in enumerate(spec.index_ratio):
        if ratio and not spec.is_recurrent[layer]:
            blocks = _address(workspace, "branch_pooled", starts - positions // ratio)
            table[layer, :, _POOLED] = np.where(is_branch[:, 0], blocks, table[layer, :, _POOLED])
    return table


def _address(workspace: Workspace, name: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of rows of a scratch tensor, which may lie ahead of its first."""
    first = workspace.take(name, 1)
    return first.address + rows * first.nbytes
