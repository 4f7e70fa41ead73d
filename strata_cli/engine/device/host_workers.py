"""The host device's worker threads: they share the chunks of a launch with the stream's thread."""

from __future__ import annotations

import itertools
import threading
from queue import SimpleQueue
from typing import Any

from strata_cli.engine.device.base import HostFunction
from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.errors import DeviceError

CHUNKS_PER_THREAD = 4  # so that a thread that the system held up leaves its share to the others


class _Job:
    """One launch, cut into chunks that any thread may take.

    ``_taken`` and ``_finished`` are counters whose next() is atomic, so no lock is held while a
    chunk is picked. ``error`` is written by the threads of the job; the last one wins.
    """

    __slots__ = ("_args", "_chunks", "_done", "_finished", "_function", "_items", "_taken", "error")

    def __init__(self, function: HostFunction, items: int, chunks: int, args: tuple[Any, ...]):
        self._function = function
        self._items = items
        self._chunks = chunks
        self._args = args
        self._taken = itertools.count()
        self._finished = itertools.count(1)
        self._done = threading.Lock()
        self._done.acquire()
        self.error: BaseException | None = None

    def work(self) -> None:
        """Runs chunks until none is left to take."""
        items, chunks = self._items, self._chunks
        for chunk in self._taken:
            if chunk >= chunks:
                return
            if self.error is None:
                begin, end = chunk * items // chunks, (chunk + 1) * items // chunks
                try:
                    self._function(begin, end, *self._args)
                except BaseException as error:  # noqa: BLE001  carried to the stream, which raises
                    self.error = error
            if next(self._finished) == chunks:
                self._done.release()

    def join(self) -> None:
        """Blocks until every chunk is finished; raises what one of them raised."""
        self._done.acquire()
        if self.error is not None:
            raise self.error


class WorkerPool:
    """Threads shared by the streams of a device. The calling thread always works too.

    Raises:
        DeviceError: the system does not let this process have so many threads.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads: list[HelperThread] = []
        for index in range(num_threads - 1):
            thread = HelperThread(self._serve, f"strata-worker-{index}")
            try:
                thread.start()
            except RuntimeError as error:  # how Python says that the system refuses
                self.close()
                raise DeviceError(
                    f"cannot start {num_threads} threads: the system allowed {index + 1}",
                    hint=f"--threads {index + 1} or fewer, or a higher limit (ulimit -u)",
                ) from error
            self._threads.append(thread)

    def run(self, function: HostFunction, items: int, chunks: int, args: tuple[Any, ...]) -> None:
        """Runs function over [0, items) in the given number of chunks; blocks until all are done.

        A worker that wakes late finds nothing left to take, so it is never waited for.
        """
        job = _Job(function, items, chunks, args)
        for _ in range(min(len(self._threads), chunks - 1)):
            self._jobs.put(job)
        job.work()
        job.join()

    def close(self) -> None:
        """Ends the threads. Call it after every stream has ended. Safe to call twice."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.work()
            del job  # an idle worker must not keep the arrays of its last launch alive
