"""What the consumer tells the trace about the stream that reads the ring."""

from __future__ import annotations

from strata_cli.engine.device.base import Event
from strata_cli.engine.experts.ring import Ring


class ReadTrace:
    """Splits the time of a layer's experts: computing, waiting for copies, waiting for the host.

    Marks are None, and nothing is written, where the ring has no trace. Used by the consumer.

    Args:
        ring: whose reading stream is looked at.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._idle: Event | None = None

    def pause(self) -> None:
        """Nothing more is enqueued until the host knows something: the device may run dry."""
        self._idle = self._mark()

    def resume(self, layer: int) -> Event | None:
        """The host goes on; the mark where the device does too."""
        mark = self._mark()
        self._ring.read_spans.span("host.wait", self._idle, mark, layer=layer)
        self._idle = None
        return mark

    def awaited(self, start: Event | None, layer: int, entry: int) -> Event | None:
        """Later work waits for the entry's copy since the mark; the mark where that is there."""
        mark = self._mark()
        self._ring.read_spans.span("copy.wait", start, mark, layer=layer, entry=entry)
        return mark

    def computed(
        self, start: Event | None, layer: int, ranks: range, experts: int, *, is_resident: bool
    ) -> None:
        """The products of a group are enqueued since the mark, of so many experts."""
        self._ring.read_spans.span(
            "group.run",
            start,
            self._mark(),
            layer=layer,
            first_rank=ranks[0],
            last_rank=ranks[-1],
            experts=experts,
            is_resident=is_resident,
        )

    def leave(self) -> None:
        """The layer's groups are enqueued; what follows needs nothing of the host."""
        self._idle = None

    def _mark(self) -> Event | None:
        return self._ring.read_spans.mark(self._ring.reads)
