"""How one thread ends a read that another thread is busy with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from strata_cli.errors import Cancelled, StateError


class Cancellation:
    """Asked for at most once, for one read or several; then it stays asked for.

    Any thread may cancel(), also before the read begins or when it is over. Everything else is for
    the thread that reads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a block may end late, in the garbage collector
        self._is_cancelled = False
        self._stops: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody asked for the end."""
        return self._is_cancelled

    def cancel(self) -> None:
        """Ask for the end, and wake the reader where it waits. Does not wait for it."""
        with self._lock:
            self._is_cancelled = True
            stops = tuple(self._stops)
        for stop in stops:
            stop()

    def check(self) -> None:
        """Go on, or end here.

        Raises:
            Cancelled: somebody asked for the end.
        """
        if self._is_cancelled:
            raise Cancelled("the read was cancelled")

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside the block, cancel() also calls this; at once where it was called before.

        Args:
            stop: makes the block's waits end, in a StateError. Any thread may call it, also when
                the block is over.

        Raises:
            Cancelled: instead of that.
        """
        with self._lock:
            self._stops.append(stop)
            is_cancelled = self._is_cancelled
        try:
            if is_cancelled:
                stop()
            yield
        except StateError as error:
            if self._is_cancelled:
                raise Cancelled("the read was cancelled") from error
            raise
        finally:
            with self._lock:
                self._stops.remove(stop)


NEVER = Cancellation()
"""Of reads that nobody ends."""
