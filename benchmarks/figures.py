"""Figures: how long something takes, as median, least and most of several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure of a report."""

    what: str
    unit: str
    median: float
    least: float
    most: float

    def line(self) -> str:
        spread = f"({self.least:.2f} to {self.most:.2f})"
        return f"{self.what:<66} {self.median:9.2f} {self.unit:<9} {spread:<22}".rstrip()


def figure(what: str, unit: str, values: Sequence[float]) -> Figure:
    return Figure(what, unit, statistics.median(values), min(values), max(values))


def seconds(action: Callable[[], object]) -> float:
    """Of wall time, for one call."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began
