"""Ctrl-C at a chosen place."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_at(place: int, files: Collection[str]) -> Iterator[None]:
    """Raises KeyboardInterrupt inside, where Python would run a signal handler.

    Args:
        place: counted from 0, as they come in this thread: behind each call of a function written
            in C, and as each function written in Python begins. Not as a generator goes on: one
            that something is thrown into looks for no signals first.
        files: whose places count.
    """
    places = itertools.count()

    def look(frame: FrameType, event: str, _argument: object) -> None:
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        is_place = event == "c_return" or (event == "call" and not is_generator)
        if is_place and frame.f_code.co_filename in files and next(places) == place:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
