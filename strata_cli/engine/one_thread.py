"""One thread at a time: another one is told so, where it would read a sequence into nonsense."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from strata_cli.errors import StateError


class OneThread:
    """Who uses an engine now. Finds threads that overlap by any length of time worth the name."""

    def __init__(self) -> None:
        self._blocks: dict[object, int] = {}  # that are open, and their threads

    @contextmanager
    def using(self) -> Iterator[None]:
        """Around what must not be mixed with the work of other threads. May be nested.

        Raises:
            StateError: another thread is inside; what it does is not disturbed.
        """
        me, block = threading.get_ident(), object()
        if any(thread != me for thread in tuple(self._blocks.values())):
            raise StateError(
                "another thread is using the engine", hint="use it from one thread at a time"
            )
        try:
            self._blocks[block] = me
            yield
        finally:
            self._blocks.pop(block, None)
