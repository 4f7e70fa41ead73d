"""Who looks on while prompts are read: the trace and the residual dump. They change no result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from strata_cli.engine.device.timing import NO_SPANS, Spans
from strata_cli.engine.forward.layers import Forward
from strata_cli.engine.prefill.dump import ResidualDump
from strata_cli.engine.trace import OUTSIDE


class Watch:
    """Follows the prompts of one engine, on the thread that computes.

    Args:
        spans: of the stream that computes.
        dump: where residuals go; None: nowhere.

    Attributes:
        spans: for those who enqueue a chunk.
    """

    def __init__(self, spans: Spans = NO_SPANS, dump: ResidualDump | None = None) -> None:
        self.spans = spans
        self._trace = spans.trace
        self._dump = dump
        self._num_chunks = 0

    @contextmanager
    def prompt(self, position: int, num_tokens: int) -> Iterator[None]:
        """Around the reading of new tokens; they begin at the position."""
        start_ns = self._trace.now_ns()
        self._trace.event("prompt.begin", position=position, tokens=num_tokens)
        yield
        self.spans.finish()
        self._trace.since("prompt.end", start_ns, tokens=num_tokens)

    @contextmanager
    def chunk(
        self,
        forward: Forward,
        position: int,
        num_tokens: int,
        *,
        ring_slots: int = 0,
        is_dumped: bool = True,
    ) -> Iterator[None]:
        """Around the enqueueing of a chunk.

        Args:
            forward: in whose workspace the residual streams end up.
            position: of the first token.
            num_tokens: of the chunk.
            ring_slots: that its experts are streamed through; 0: they are where they are read.
            is_dumped: its rows are consecutive positions, which the residual dump may show.
        """
        trace = self._trace
        if trace.is_on:
            trace.chunk = self._num_chunks
        self._num_chunks += 1
        start_ns = trace.now_ns()
        trace.event("chunk.begin", position=position, tokens=num_tokens, ring_slots=ring_slots)
        try:
            yield
            if self._dump is not None and is_dumped:
                x = forward.workspace.take("x", num_tokens)
                self._dump.write(forward.stream, x, position)
            trace.since("chunk.end", start_ns, tokens=num_tokens)
        finally:
            if trace.is_on:
                trace.chunk = OUTSIDE
        self.spans.flush()

    def close(self) -> None:
        """Ends the dump and gives events back. Safe to call twice."""
        self.spans.close()
        if self._dump is not None:
            self._dump.close()


NO_WATCH = Watch()
