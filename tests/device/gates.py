"""Holding a stream still, so that a test can look at what has not run yet.

A gate is a kernel that waits for a flag in pinned memory, not a host function: a GPU's driver calls
the host functions of all streams from one thread, so that one which waits holds up every stream.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from strata_cli.engine.device.base import Device, Event, Kernel, Launch, Stream, Tensor
from tests.device.kernels import SOURCE, touch_all

PATIENCE_S = 30.0
POLL_S = 1e-3


def standing_at(gate: threading.Event, seconds: float = PATIENCE_S) -> Callable[[], None]:
    """A host function that returns once the gate is set, or after the given time.

    While it waits, a device may hold back the host functions of its other streams.
    """

    def stand() -> None:
        gate.wait(seconds)

    return stand


class Gate:
    """Where streams of one device stand until it is set, or until patience ends.

    ``flags`` holds, for each stream, where it is (0 on its way, 1 here, 2 gone; written by the
    device) and whether it may pass (written here).
    """

    def __init__(self, device: Device, num_streams: int) -> None:
        nbytes = 2 * num_streams * np.dtype(np.int32).itemsize
        buffer = device.allocate_pinned(max(nbytes, 1))
        self._flags = Tensor.over(buffer, (num_streams, 2), np.int32)
        self._flags.numpy()[:] = 0

    def stop(self, index: int, stream: Stream) -> None:
        """Enqueue the gate on the stream."""
        flag = self._flags.rows(index, index + 1)
        stream.launch(STAND, Launch(items=1), flag, int(PATIENCE_S * 1e9))

    def have_arrived(self) -> bool:
        return bool((self._flags.numpy()[:, 0] >= 1).all())

    def have_left(self) -> bool:
        """True when no stream will read the flags again, so that they may be freed."""
        return bool((self._flags.numpy()[:, 0] == 2).all())

    def set(self) -> None:
        self._flags.numpy()[:, 1] = 1


@contextmanager
def held(device: Device, *streams: Stream) -> Iterator[Gate]:
    """Streams that stand still until the gate is set, at the latest at the end of the block.

    Inside, a GPU may make the caller of a pageable copy wait for the stream, so for the gate.
    """
    _load_kernels(device)
    gate = Gate(device, len(streams))
    for index, stream in enumerate(streams):
        gate.stop(index, stream)
    try:
        wait_until(gate.have_arrived)
        yield gate
    finally:
        gate.set()
        wait_until(gate.have_left)


def finish(event: Event) -> None:
    """Wait for an event as synchronize does, but not for ever."""
    wait_until(event.query)


def finish_stream(device: Device, stream: Stream) -> None:
    """Wait for a stream's work as synchronize does, but not for ever."""
    done = device.event()
    stream.record(done)
    finish(done)


def wait_until(reached: Callable[[], bool]) -> None:
    """Returns once reached() answers True.

    Raises:
        AssertionError: patience ended first.
    """
    end = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < end, f"not reached within {PATIENCE_S} s"
        time.sleep(POLL_S)


def _load_kernels(device: Device) -> None:
    """Run every test kernel once: a driver that loads them late waits for what runs on the GPU."""
    stream = device.stream("loading")
    passed = Gate(device, 1)
    passed.set()
    passed.stop(0, stream)
    touch_all(device, stream)
    finish_stream(device, stream)
    stream.close()


def _stand_host(_begin: int, _end: int, flag: Any, patience_ns: int) -> None:
    flag[0, 0] = 1
    end = time.monotonic_ns() + patience_ns
    while not flag[0, 1] and time.monotonic_ns() < end:
        time.sleep(POLL_S)
    flag[0, 0] = 2


def _stand_reference(_flag: Any, _patience_ns: int) -> None:
    raise NotImplementedError("a gate computes nothing")


STAND = Kernel("stand", _stand_host, _stand_reference, SOURCE)
