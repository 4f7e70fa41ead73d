"""The GPU that launches are planned for, as a stream tells of it."""

from __future__ import annotations

from typing import NamedTuple

from strata_cli.engine.device.base import Stream

NO_LIMIT = 1 << 30


class Gpu(NamedTuple):
    """What decides which functions run, and in how many blocks; never what their bits are.

    Attributes:
        shared_bytes: most dynamic shared memory of a block.
        num_multiprocessors: how many there are.
        capability: compute capability.
    """

    shared_bytes: int
    num_multiprocessors: int
    capability: tuple[int, int] = (0, 0)


def gpu_of(stream: Stream) -> Gpu:
    """The GPU that a stream belongs to; the host has no limits and no multiprocessors."""
    return Gpu(stream.shared_bytes or NO_LIMIT, stream.num_multiprocessors, stream.capability)
