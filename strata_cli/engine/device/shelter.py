"""Work that Ctrl-C cannot cut in two: a thread that no signal interrupts does it.

Python raises KeyboardInterrupt in the main thread alone, behind any call. Between a driver that has
given memory and the line that notes it, that would leave what nobody gives back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from strata_cli.engine.device.helper_thread import HelperThread


class _Job:
    """What is to be done, and how it ended; ``done`` is locked until then."""

    __slots__ = ("done", "error", "work")

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001  carried to whoever asked, who raises it
            self.error = error
        self.done.release()


class Shelter:
    """Does work of the main thread, one piece after the other, each to its end.

    Args:
        name: of the thread, for messages.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._is_closed = False
        self._thread = HelperThread(self._serve, name)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Have it done, and wait. Another thread than the main one does it itself.

        An interrupt ends the wait, not the work: what that makes, it hands to an owner itself.

        Raises:
            whatever the work raises.
        """
        if self._is_closed or threading.current_thread() is not threading.main_thread():
            work()
            return
        job = _Job(work)
        self._jobs.put(job)
        job.done.acquire()
        error, job.error = job.error, None  # it refers to the job's frame, which refers to the job
        if error is not None:
            try:
                raise error
            finally:
                del error  # and to this one

    def close(self) -> None:
        """End the thread behind what is asked already. Who asks later does it itself."""
        self._is_closed = True  # first: nobody may wait behind the end
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # its memory is not kept until the next one comes
