"""Ctrl-C: one ends the run in good order; however many come, none shows a traceback.

A module of the standard library alone: it must be there before anything slow is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it

PATIENCE_S = 2.0
"""So long a run that was interrupted may take to end; then the next Ctrl-C ends it at once."""

AGAIN_S = 0.02


class Interrupts:
    """How this process answers SIGINT.

    The first one raises KeyboardInterrupt. Those that follow would only cut the cleanup short, so
    they do nothing until it has had its time. Signal handlers run in the main thread, which is the
    one that writes every field.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._at_once = 0
        self._is_installed = False
        self._temporary: set[str] = set()

    @property
    def is_asked(self) -> bool:
        """Whether the user has asked for an end."""
        return self._asked_at is not None

    def install(self) -> None:
        """Take over SIGINT, unless whoever started the process wants it ignored."""
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._is_installed = True
        sys.unraisablehook = self._unraisable
        signal.signal(signal.SIGALRM, self._raise_again)
        signal.signal(signal.SIGINT, self._interrupt)

    def finish(self) -> None:
        """From here on SIGINT is ignored: the process is about to end. Removes temporary files."""
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
        self._remove_temporary_files()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside the block SIGINT ends the process on the spot.

        For imports: there is nothing to clean up, and some packages take any exception for a
        missing one.
        """
        self._at_once += 1
        try:
            yield
        finally:
            self._at_once -= 1

    @contextmanager
    def temporary_file(self, path: str) -> Iterator[None]:
        """Removes a file at the end of the block, or of the process if that ends inside."""
        self._temporary.add(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            self._temporary.discard(path)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._at_once or (self.is_asked and now - (self._asked_at or now) > PATIENCE_S):
            self._remove_temporary_files()
            os._exit(INTERRUPTED)
        if not self.is_asked:
            self._asked_at = now
            raise KeyboardInterrupt

    def _unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Python dropped an exception: it came in a finalizer, or below a compiler written in C."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not here, where it would be dropped again, but as soon as we are out of there.
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            sys.__unraisablehook__(unraisable)

    def _raise_again(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt

    def _remove_temporary_files(self) -> None:
        for path in tuple(self._temporary):
            with contextlib.suppress(OSError):
                os.unlink(path)


interrupts = Interrupts()
