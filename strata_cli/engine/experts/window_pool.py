"""Threads that compute missed experts of recorded windows, in place from the arena.

A window on the device and the threads meet in a mailbox, layer by layer, without Python: see
kernels/mailbox.py. Python starts the threads on a window and looks whether all of them came back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.engine.experts.blobs import BlobLayout
from strata_cli.engine.kernels.host_products import matrix_fields
from strata_cli.engine.kernels.host_scratch import (
    HostLayers,
    Scratch,
    new_scratch,
    own_scratch,
)
from strata_cli.engine.kernels.host_window import announce, serve_windows, serving
from strata_cli.engine.kernels.mailbox import (
    AWAIT_ROWS,
    FAILED,
    POST_PAIRS,
    STOP,
    TAKE_ROWS,
    Mailbox,
)
from strata_cli.engine.kernels.splitting import SHARES
from strata_cli.errors import DeviceError

NAP_S = 20e-6
REST_NAP_S = 1e-3
MOST_ROWS = 8  # tokens of a window that the threads help with
PATIENCE_S = 30.0
MOST_THREADS = 32  # more wait for each other longer than they help


class WindowPool:
    """The threads and their mailbox. Used from the thread that computes; a context manager.

    A window: open(), the replay of a graph that copies mailbox.orders to mailbox.current and posts
    to the mailbox, start(), and finish() when the device is done. abandon() ends one that was
    interrupted, and mend() makes the pool usable again.

    Args:
        device: that windows run on.
        layouts: of each layer's blobs.
        blobs: address of each expert in host memory, int64 [L, E]; 0: not there.
        top_k: experts of a token.
        num_threads: at least 1.
        patience_s: for every wait of threads and device.
        is_exact: with the bits of the host's own products, where the device has the same.

    Attributes:
        mailbox: see above.
        is_open: whether a window is under way, or was interrupted.
        expert_s: seconds that an expert takes the threads together, of late; 0: not known.
        num_computed: experts of the last window.
    """

    def __init__(
        self,
        device: Device,
        layouts: Sequence[BlobLayout],
        blobs: NDArray[np.int64],
        top_k: int,
        num_threads: int,
        patience_s: float = PATIENCE_S,
        *,
        is_exact: bool = False,
    ) -> None:
        device.prepare([POST_PAIRS, AWAIT_ROWS, TAKE_ROWS])
        self.is_open = False
        self.expert_s = 0.0
        self.num_computed = 0
        self.patience_ns = max(1, round(patience_s * 1e9))
        self._patience_s = patience_s
        matrices = [
            matrix_fields((layout.gate, layout.up, layout.down), is_exact=is_exact)
            for layout in layouts
        ]
        self._layers = HostLayers(np.ascontiguousarray(blobs), np.array(matrices, np.int64))
        width = max(layout.gate.rows for layout in layouts)
        pairs, hidden_size = MOST_ROWS * top_k, layouts[0].gate.cols
        self._scratch = new_scratch(len(layouts), pairs, width)
        self._window = 0
        with ExitStack() as resources:
            box = Mailbox(device, len(layouts), MOST_ROWS, top_k, hidden_size)
            self.mailbox = resources.enter_context(box)
            self._workers = [
                _Worker(index, self.mailbox, self._layers, self._scratch, pairs, self.patience_ns)
                for index in range(num_threads)
            ]
            for worker in self._workers:
                resources.callback(worker.end)
                worker.begin()
            resources.callback(self.abandon)
            self._resources = resources.pop_all()

    @property
    def num_threads(self) -> int:
        """That compute."""
        return len(self._workers)

    def open(self, link_share: int) -> None:
        """Before a window is launched.

        Args:
            link_share: see split_pairs().
        """
        assert not self.is_open, "a window is under way"
        self.is_open = True
        self._window += 1
        self._scratch.counters[:] = 0
        self.mailbox.orders.numpy()[:] = (self._window, link_share)

    def start(self) -> None:
        """Behind the launch: let the threads go; new ones for those that died. Does not wait."""
        for worker in self._workers:
            worker.revive()
        announce(self._window, self._scratch.latest)
        for worker in self._workers:
            worker.wake(self._window)

    def finish(self) -> None:
        """When the device is done with the window: wait for the threads, and see what became of it.

        Raises:
            DeviceError: a thread failed, or somebody gave up; the window's results are not whole.
        """
        self._wait()
        failed = int(self.mailbox.state.numpy()[FAILED])
        error = next((worker.error for worker in self._workers if worker.error), None)
        if failed or error is not None:
            where = f" in layer {failed - 1}" if failed else ""
            raise DeviceError(
                f"the host's processor did not compute a step's experts{where}: "
                f"{error or f'nothing came within {self._patience_s:g} s'}",
                hint="--pcie-frac 1 leaves all of them to the device",
            ) from error
        self._note_times()
        self.is_open = False

    def abandon(self) -> None:
        """Make all who wait for the window give up. Does not wait; safe at any time."""
        self.mailbox.state.numpy()[STOP] = 1

    def mend(self, stream: Stream) -> None:
        """After an interrupted or failed window: usable again. Waits for what is under way.

        Args:
            stream: that the window ran on.

        Raises:
            DeviceError: a thread does not come back, or the stream failed.
        """
        self.abandon()
        stream.synchronize()
        self.rest()
        self.mailbox.state.numpy()[:] = 0
        self.is_open = False

    def rest(self) -> None:
        """Wait until no thread has anything to do, nor lingers behind a window.

        Raises:
            DeviceError: one does not come back.
        """
        for worker in self._workers:
            worker.rest(self._patience_s)

    def close(self) -> None:
        """End the threads and give the memory back; the device must be done. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self) -> None:
        """Until every thread has come back from the window, or cannot any more."""
        deadline = time.monotonic() + self._patience_s
        while not all(worker.is_back(self._window) for worker in self._workers):
            if time.monotonic() > deadline:
                self.abandon()
                self.mailbox.state.numpy()[FAILED] = 1
                return
            time.sleep(NAP_S)

    def _note_times(self) -> None:
        nanoseconds, experts = self._scratch.times.tolist()
        self._scratch.times[:] = 0
        self.num_computed = experts
        if experts:
            now_s = nanoseconds / experts * 1e-9
            self.expert_s += (now_s - self.expert_s) * (0.25 if self.expert_s else 1.0)


class _Rest:
    """A place in a thread's queue, and whether the thread has come to it.

    Not an Event: its methods are Python, and Ctrl-C inside one would leave its lock taken for ever.
    """

    def __init__(self) -> None:
        self.is_reached = False


class _Worker:
    """One thread of a pool.

    ``own.back`` and ``error`` are written by the thread alone. A thread that failed goes on with
    the next window; what it left undone makes the others give up.
    """

    def __init__(
        self,
        index: int,
        mailbox: Mailbox,
        layers: HostLayers,
        scratch: Scratch,
        pairs: int,
        patience_ns: int,
    ) -> None:
        self.windows: SimpleQueue[int | _Rest | None] = SimpleQueue()
        self.error: BaseException | None = None
        self._state = mailbox.state.numpy()
        self._own = own_scratch(pairs, layers.matrices)
        self._arguments = serving(mailbox, layers, scratch, self._own, patience_ns)
        self._name = f"strata-pool-{index}"
        self._thread: HelperThread | None = None

    def begin(self) -> None:
        """Start the thread.

        Raises:
            DeviceError: the system does not let this process have it.
        """
        self._thread = HelperThread(self._serve, self._name)
        try:
            self._thread.start()
        except RuntimeError as error:  # how Python says that the system refuses
            self._thread = None
            raise DeviceError(
                f"cannot start {self._name}: the system allows no more threads",
                hint="fewer --pool-workers, or a higher limit (ulimit -u)",
            ) from error

    def revive(self) -> None:
        """Start a new thread if this one died; it takes what is still in the queue."""
        if self._thread is None or not self._thread.is_alive():
            self.begin()

    def wake(self, window: int) -> None:
        """Behind the announcement of a window: tell the thread, if it does not look for itself."""
        if self._own.rests[0]:
            self.windows.put(window)

    def is_back(self, window: int) -> bool:
        """Whether the thread is done with a window, or will never be."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return bool(self._own.back[0] == window) or not is_alive

    def rest(self, patience_s: float) -> None:
        """Wait until the thread has nothing to do.

        Raises:
            DeviceError: it does not come back.
        """
        self.revive()
        rest = _Rest()
        self.windows.put(rest)
        deadline = time.monotonic() + patience_s
        while not rest.is_reached:
            time.sleep(REST_NAP_S)
            self.revive()
            if time.monotonic() > deadline:
                raise DeviceError(
                    f"{self._name} does not come back", hint="--pcie-frac 1 works without it"
                )
        self.error = None

    def end(self) -> None:
        """End the thread. Safe to call twice, also where the first call was interrupted."""
        if self._thread is not None:
            self.windows.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        windows = self.windows
        while (window := windows.get()) is not None:
            if isinstance(window, _Rest):
                window.is_reached = True
                continue
            if window <= self._own.back[0]:  # it was still there, and looked for itself
                continue
            try:
                serve_windows(window, self._arguments)
            except BaseException as error:  # noqa: BLE001  carried to the owner, who raises it
                self.error = error
                self._state[STOP] = 1
                self._own.back[0] = window


def pool_threads() -> int:
    """Five eighths of the processors: beside more, everything else of a step takes longer."""
    return max(1, min(5 * len(os.sched_getaffinity(0)) // 8, MOST_THREADS))


def balanced_share(expert_s: float, blob_bytes: float, link_gbps: float) -> float:
    """Share of missed experts that the link should carry, so that it and the threads end together.

    Args:
        expert_s: seconds that an expert takes the threads.
        blob_bytes: of an expert.
        link_gbps: of the link, 10^9 bytes per second.

    Returns:
        LEAST_SHARE to MOST_SHARE; USUAL_SHARE where either is unknown.
    """
    if not expert_s or not link_gbps:
        return USUAL_SHARE
    link_s = blob_bytes / link_gbps / 1e9
    return min(max(expert_s / (expert_s + link_s), LEAST_SHARE), MOST_SHARE)


LEAST_SHARE, USUAL_SHARE, MOST_SHARE = 0.10, 0.55, 0.95


def in_parts(share: float) -> int:
    """A share of misses as split_pairs() takes it."""
    return round(share * SHARES)
