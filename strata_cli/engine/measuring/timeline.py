"""A chunk's time as lines of text: what compute, link and issuer did, column by column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.measuring.summary import ChunkSummary
from strata_cli.engine.trace import Event

SHADES = " .:=#"
"""From idle to busy: a column's share of time, in quarters; idle is less than a thousandth."""

IDLE = 1e-3


def timeline(chunk: ChunkSummary, events: Sequence[Event], width: int) -> dict[str, str]:
    """How busy each part was during a chunk.

    Args:
        chunk: which one.
        events: of the trace.
        width: columns; each stands for the same time.

    Returns:
        a line of SHADES for "compute" (waits left out), "link" and "issuer".
    """
    own = [event for event in events if event["chunk"] == chunk.chunk]
    idle = _busy(chunk, own, "copy.wait", width) + _busy(chunk, own, "host.wait", width)
    rows = {
        "compute": _busy(chunk, own, "layer.run", width) - idle,
        "link": _busy(chunk, own, "copy.run", width),
        "issuer": _busy(chunk, own, "issuer.turn", width),
    }
    return {name: shade(shares) for name, shares in rows.items()}


def shade(shares: NDArray[np.float64]) -> str:
    """One character for each share, 0 to 1."""
    levels = np.clip(np.ceil((len(SHADES) - 1) * (shares - IDLE)), 0, len(SHADES) - 1)
    return "".join(SHADES[int(level)] for level in levels)


def _busy(chunk: ChunkSummary, events: Sequence[Event], ev: str, width: int) -> NDArray[np.float64]:
    """Share of each column in which such an event was going on, [width]."""
    spans = [(event["t_ns"], 1e3 * event["dur_us"]) for event in events if event["ev"] == ev]
    if not spans:
        return np.zeros(width)
    edges = np.linspace(chunk.start_ns, chunk.stop_ns, width + 1)
    starts, lengths = np.array(spans, np.float64).T
    passed = np.clip(edges[:, None] - starts, 0, lengths).sum(axis=1)
    column_ns = max((chunk.stop_ns - chunk.start_ns) / width, 1)
    return np.asarray(np.diff(passed) / column_ns)
