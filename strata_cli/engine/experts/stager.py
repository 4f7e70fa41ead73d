"""The stager: helper threads that bring blobs of the file into pinned buffers, ahead of their copy.

Job j uses buffer j mod num_buffers, once the copy of job j - num_buffers has left it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.device.base import Device, Event, Tensor
from strata_cli.engine.device.helper_thread import HelperThread
from strata_cli.errors import DeviceError, StallError, StateError, StrataError

logger = logging.getLogger(__name__)

NUM_BUFFERS = 16
NUM_THREADS = 4
SHORTEST_NAP_S, LONGEST_NAP_S = 50e-6, 1e-3
SETTLE_S = 30.0  # a read that takes longer hangs
NO_JOB = -1


class StagerSize(NamedTuple):
    """Of a stager.

    Attributes:
        num_buffers: pinned, of a blob each, at least 1.
        num_threads: that read into them, at least 1.
    """

    num_buffers: int = NUM_BUFFERS
    num_threads: int = NUM_THREADS


class BlobSource(Protocol):
    """Where blobs come from. Any thread may ask, several at once."""

    def blob_bytes(self, layer: int) -> int:
        """Bytes of each blob of a layer."""
        ...

    def read(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        """Copy a blob over out, uint8 [blob_bytes]."""
        ...


class JobList(Protocol):
    """Copies in order, some of which need staging; may grow. An EntryList is one."""

    @property
    def count(self) -> int:
        """Copies so far."""
        ...

    @property
    def layers(self) -> Sequence[int]:
        """Of each copy."""
        ...

    @property
    def experts(self) -> Sequence[int]:
        """Of each copy."""
        ...

    @property
    def jobs(self) -> Sequence[int]:
        """Of each copy, numbered in its order; below 0: it needs no staging."""
        ...


class _Claim(NamedTuple):
    """A job that one thread has taken."""

    jobs: JobList
    job: int
    layer: int
    expert: int
    left: Event | None  # behind the last copy out of the job's buffer


class Stager:
    """StagedBlobs of one list of copies after the other; a context manager.

    begin(), end() and sent() come from the threads that issue the copies, one at a time. A list
    begins when the threads are done with the last one, so none takes a job of the wrong list.
    Everything is written under the lock; is_ready() and blob() read without it. A thread that
    ended fails the list that it worked on; the next list gets a new one.

    The callers' threads take the lock itself and never wait in the condition, whose methods are
    Python: Ctrl-C inside one of them would leave the lock taken for ever.

    Args:
        device: whose copies read the buffers.
        source: of the blobs.
        slot_bytes: of a buffer; no blob is larger.
        num_buffers: at least 1.
        num_threads: at least 1.
    """

    def __init__(
        self,
        device: Device,
        source: BlobSource,
        slot_bytes: int,
        num_buffers: int = NUM_BUFFERS,
        num_threads: int = NUM_THREADS,
    ) -> None:
        self.num_buffers = num_buffers
        self._source = source
        buffer = device.allocate_pinned(num_buffers * slot_bytes)
        self._buffers = Tensor.over(buffer, (num_buffers, slot_bytes), np.uint8)
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)  # waited for by the threads alone
        self._list: JobList | None = None
        self._entries: list[int] = []  # of the jobs listed so far
        self._next_entry = 0
        self._claimed = 0
        self._sent = 0
        self._reading: set[threading.Thread] = set()  # those that hold a claim
        self._ready = [NO_JOB] * num_buffers
        self._left: list[Event | None] = [None] * num_buffers
        self._failure: StrataError | None = None  # of this list
        self._ended: set[threading.Thread] = set()  # as far as they could say so
        self._is_closed = False
        self._threads = [self._started(index) for index in range(num_threads)]

    @contextmanager
    def staging(self, jobs: JobList) -> Iterator[Stager]:
        """begin(), and end() behind it in any case.

        Interrupted twice, it is the next one that ends the list; and this one, left to the garbage
        collector, may then come to its own end when the next one's is under way.
        """
        self.end()
        try:
            self.begin(jobs)
            yield self
        except BaseException:
            if self._list is jobs:
                try:
                    self.end()
                except StallError as error:  # the first exception says more
                    logger.warning("%s", error)
            raise
        self.end()

    def begin(self, jobs: JobList) -> None:
        """Start bringing the blobs of a list, as many as there are buffers for.

        Raises:
            StateError: the last list was not ended, or the stager is closed.
            StallError: a read for the last list hangs.
            DeviceError: a thread ended and no other can be started.
        """
        with self._lock:
            if self._list is not None or self._is_closed:
                state = "closed" if self._is_closed else "still staging another list"
                raise StateError(f"the stager is {state}")
        self._settle()  # end() may have been interrupted
        self._replace_ended()
        with self._lock:
            self._list = jobs
            self._entries, self._next_entry = [], 0
            self._claimed = self._sent = 0
            self._failure = None
            self._list_jobs()

    def end(self) -> None:
        """Take no more jobs; blocks until no thread reads and no copy is under way.

        Safe to call twice. A copy that failed is not raised here: its stream tells.

        Raises:
            StallError: a read hangs; what waits for it is not touched before it is done.
        """
        with self._lock:
            self._list = None
        self._settle()

    def is_ready(self, job: int) -> bool:
        """See StagedBlobs."""
        if self._failure is not None:
            raise self._failure
        if job >= len(self._entries):  # the list has grown
            with self._lock:
                self._list_jobs()
        if self._ready[job % self.num_buffers] == job:
            return True
        if any(map(self._is_gone, self._threads)):
            with self._lock:
                self._bury()
        return False

    def blob(self, job: int) -> Tensor:
        """See StagedBlobs."""
        if not self.is_ready(job):
            raise StateError(f"the blob of job {job} is not in pinned memory")
        index = job % self.num_buffers
        nbytes = self._source.blob_bytes(self._layer(job))
        return self._buffers.rows(index, index + 1).reshape(self._buffers.shape[1]).rows(0, nbytes)

    def sent(self, job: int, copied: Event) -> None:
        """See StagedBlobs. In the order of the jobs."""
        with self._lock:
            self._left[job % self.num_buffers] = copied
            self._sent = job + 1
            self._has_work.notify_all()

    def close(self) -> None:
        """End the threads and give the buffers back. Safe to call twice.

        Raises:
            StallError: a read hangs; its thread keeps the buffers.
        """
        self.end()
        with self._lock:
            self._is_closed = True
            self._has_work.notify_all()
        for thread in self._threads:
            thread.join()
        self._buffers.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Blocks until nobody writes or reads a buffer; what is in them is forgotten."""
        give_up = time.monotonic() + SETTLE_S
        nap_s = SHORTEST_NAP_S
        while self._is_read():
            if time.monotonic() >= give_up:
                raise StallError(
                    f"{len(self._reading)} reads of experts from the file have not ended "
                    f"within {SETTLE_S:.0f} s",
                    hint="the disk hangs: try again when it answers, or end the process",
                )
            time.sleep(nap_s)
            nap_s = min(1.2 * nap_s, LONGEST_NAP_S)
        with self._lock:
            self._ready = [NO_JOB] * self.num_buffers
        for index, event in enumerate(self._left):
            if event is not None:
                with suppress(DeviceError):  # however the copy ended
                    event.synchronize()
                self._left[index] = None

    def _is_read(self) -> bool:
        """Whether a thread still reads into a buffer, or has begun to."""
        with self._lock:
            self._bury()
            return bool(self._reading)

    def _list_jobs(self) -> None:
        """Note what the list has come to. Under the lock."""
        if self._list is None:
            return
        count, jobs = self._list.count, self._list.jobs
        self._entries += [k for k in range(self._next_entry, count) if jobs[k] >= 0]
        self._next_entry = count
        self._has_work.notify_all()

    def _layer(self, job: int) -> int:
        jobs = self._list
        if jobs is None:
            raise StateError(f"the list of job {job} was ended")
        return jobs.layers[self._entries[job]]

    def _started(self, index: int) -> threading.Thread:
        thread = HelperThread(self._serve, f"strata-stager-{index}")
        thread.start()
        return thread

    def _replace_ended(self) -> None:
        """As many threads as there were. Nobody reads."""
        for index, thread in enumerate(self._threads):
            if self._is_gone(thread):
                try:
                    self._threads[index] = self._started(index)
                except RuntimeError as error:  # what Python says where the system refuses one
                    raise DeviceError(
                        f"no thread can be started that reads experts from the file: {error}",
                        hint="raise the limits of threads and memory, and restart",
                    ) from error
                self._ended.discard(thread)

    def _is_gone(self, thread: threading.Thread) -> bool:
        return thread in self._ended or not thread.is_alive()

    def _bury(self) -> None:
        """Nobody waits for threads that have ended. Under the lock."""
        gone = {thread for thread in self._threads if self._is_gone(thread)}
        if gone and not self._is_closed:
            self._reading -= gone
            self._failure = self._failure or DeviceError(
                "a thread that reads experts from the file has ended",
                hint="read the prompt again: another one takes its place",
            )

    def _serve(self) -> None:
        try:
            while (claim := self._claim()) is not None:
                self._stage(claim)
        except BaseException as error:  # noqa: BLE001  carried to whoever asks for a blob
            with self._lock:
                self._failure = self._failure or _as_told(error)
                self._ended.add(threading.current_thread())
                self._reading.discard(threading.current_thread())
                self._has_work.notify_all()

    def _claim(self) -> _Claim | None:
        """The next job, when there is one and its buffer was sent; None at the end of all."""
        with self._lock:
            self._has_work.wait_for(lambda: self._is_closed or self._has_job())
            jobs, job = self._list, self._claimed
            if jobs is None or self._is_closed:
                return None
            self._claimed += 1
            self._reading.add(threading.current_thread())
            k = self._entries[job]
            left = self._left[job % self.num_buffers]
            return _Claim(jobs, job, jobs.layers[k], jobs.experts[k], left)

    def _has_job(self) -> bool:
        is_listed = self._list is not None and self._claimed < len(self._entries)
        return is_listed and self._claimed < self._sent + self.num_buffers and not self._failure

    def _stage(self, claim: _Claim) -> None:
        failure: BaseException | None = None
        is_read = False
        try:
            is_read = self._read(claim)
        except BaseException as error:  # noqa: BLE001  carried to whoever asks for a blob
            failure = error
        with self._lock:
            self._reading.discard(threading.current_thread())
            if failure is not None:
                self._failure = self._failure or _as_told(failure)
            if is_read:
                self._ready[claim.job % self.num_buffers] = claim.job
            self._has_work.notify_all()

    def _read(self, claim: _Claim) -> bool:
        """Bring the blob into its buffer; False if the list was ended before that began."""
        nap_s = SHORTEST_NAP_S
        while claim.left is not None and not claim.left.query():
            if self._list is not claim.jobs:
                return False
            time.sleep(nap_s)
            nap_s = min(1.2 * nap_s, LONGEST_NAP_S)
        room = self._buffers.numpy()[claim.job % self.num_buffers]
        nbytes = self._source.blob_bytes(claim.layer)
        self._source.read(claim.layer, claim.expert, room[:nbytes])
        return True


def _as_told(error: BaseException) -> StrataError:
    """What ended a read, as the one who asked for it is told."""
    if isinstance(error, StrataError):
        return error
    told = DeviceError(
        f"experts could not be read from the file: {type(error).__name__}: {error}",
        hint="check the disk and the free memory, then read the prompt again",
    )
    told.__cause__ = error
    return told
