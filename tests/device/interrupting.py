"""Ctrl-C at a chosen place."""

from __future__ import annotations

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
            in C, and as each function written in Python begins.
        files: whose places count.
    """
    places = itertools.count()

    def look(frame: FrameType, event: str, _argument: object) -> None:
        is_place = event in ("call", "c_return") and frame.f_code.co_filename in files
        if is_place and next(places) == place:
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
