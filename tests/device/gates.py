"""Holding a stream still, so that a test can look at what has not run yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata_cli.engine.device.base import Stream

PATIENCE_S = 30.0


def standing_at(gate: threading.Event, seconds: float = PATIENCE_S) -> Callable[[], None]:
    """A host function that returns once the gate is set, or after the given time."""

    def stand() -> None:
        gate.wait(seconds)

    return stand


@contextmanager
def held(*streams: Stream) -> Iterator[threading.Event]:
    """Streams that stand still until the gate is set, at the latest at the end of the block."""
    gate = threading.Event()
    reached = [threading.Event() for _ in streams]
    for stream, here in zip(streams, reached, strict=True):

        def stand(here: threading.Event = here) -> None:
            here.set()
            gate.wait(PATIENCE_S)

        stream.call(stand)
    try:
        for here in reached:
            assert here.wait(PATIENCE_S)
        yield gate
    finally:
        gate.set()
