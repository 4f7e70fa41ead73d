"""Progress bars on stderr, shown only where somebody is looking, and only when it takes a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

DELAY_S = 0.5  # what is done by then gets no bar


@contextmanager
def progress_bar(
    what: str, unit: str, wanted: bool | None, *, scale: bool = False
) -> Iterator[Callable[[int, int], None] | None]:
    """A callback (done, total) that draws a bar, or None when no bar is wanted.

    The bar goes when all is done, so that it is not in the way of what is printed next.

    Args:
        what: label in front of the bar.
        unit: of the counts.
        wanted: True or False as the user set it; None shows it when stderr is a terminal.
        scale: show counts with SI prefixes.
    """
    is_wanted = sys.stderr is not None and sys.stderr.isatty() if wanted is None else wanted
    if not is_wanted:
        yield None
        return
    bar: Any = tqdm(
        desc=what,
        unit=unit,
        unit_scale=scale,
        file=sys.stderr,
        leave=False,
        delay=DELAY_S,
        position=0,  # one bar at a time, however many are open
    )

    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    try:
        yield update
    finally:
        bar.close()
