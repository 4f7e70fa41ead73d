"""Threads that help the one that computes, and say themselves whether they still live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 1.0  # between two looks of whoever waits for an end
UNLOCKED = "release unlocked lock"  # what Python's wait for a start makes of Ctrl-C twice


class HelperThread(threading.Thread):
    """A daemon thread that an interrupt of another thread cannot make look dead.

    threading.Thread tries a lock that the running thread holds. Where a signal handler raises
    meanwhile, in is_alive() or in join(), Python up to 3.12 takes the thread for ended, for good:
    its work would be given up, and its memory be given back while it still writes.

    Args:
        target: what it runs.
        name: for messages.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._has_ended = False  # written by the thread, before it opens the gate
        self._gate = threading.Lock()
        self._gate.acquire()

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: the system refuses another thread, or it was started before.
            KeyboardInterrupt: Ctrl-C; the thread may run all the same.
        """
        try:
            super().start()
        except RuntimeError as error:
            if str(error) != UNLOCKED:
                raise
            raise KeyboardInterrupt from error

    def run(self) -> None:
        """See Thread."""
        try:
            super().run()
        finally:
            self._has_ended = True
            self._gate.release()

    def is_alive(self) -> bool:
        """Whether it runs: True between start() and the end of its target."""
        return self.ident is not None and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of its target. Ctrl-C ends the wait, and changes nothing else.

        Args:
            timeout: seconds, at most; None: as long as it takes.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left_s = LOOK_S if give_up is None else give_up - time.monotonic()
            if left_s <= 0:
                return
            if self._gate.acquire(timeout=min(left_s, LOOK_S)):
                self._gate.release()
        if self._has_ended:
            super().join()  # which takes it off Python's list of threads
