"""Time on a GPU: recorded launches replayed between two events, and the bandwidth of copies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from strata_cli.engine.device.base import Device, Stream, empty

Call = Callable[[], None]

RUNS = 9
LONG_ENOUGH_MS = 4.0  # one timed replay takes at least about that
MOST_CALLS = 400  # recorded in one graph
WARM_UP_MS = 30.0


@dataclass(frozen=True)
class Row:
    """One measured operation.

    Attributes:
        name: operation and what distinguishes this case.
        tokens: rows of the call.
        us, min_us, max_us: microseconds per call: median, fastest and slowest run.
        moved_bytes: the fewest bytes it must read and write.
        gbps: moved_bytes over the median.
        share: of the bandwidth measured in the same run.
    """

    name: str
    tokens: int
    us: float
    min_us: float
    max_us: float
    moved_bytes: int
    gbps: float
    share: float

    def line(self) -> str:
        return (
            f"{self.name:44s} T {self.tokens:5d} {self.us:10.2f} us "
            f"({self.min_us:9.2f} .. {self.max_us:9.2f}) {self.gbps:8.1f} GB/s {self.share:6.1%}"
        )

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class Clock:
    """A stream whose recorded launches are timed; knows the device's copy bandwidth."""

    def __init__(self, device: Device, stream: Stream) -> None:
        self.device = device
        self.stream = stream
        self._start, self._stop = device.event(timing=True), device.event(timing=True)
        self.copy_gbps = self._measure_copies()
        self.rows: list[Row] = []

    def measure(self, name: str, tokens: int, moved_bytes: int, calls: Sequence[Call]) -> Row:
        """Time an operation.

        Args:
            name: see Row.
            tokens: see Row.
            moved_bytes: see Row.
            calls: the operation on as many different inputs as it takes to keep them out of the
                caches; each enqueues it once. They are recorded one after the other.
        """
        once = self._replay_ms(calls, 1) / len(calls)
        repeats = int(LONG_ENOUGH_MS / max(once, 1e-3) / len(calls)) + 1
        repeats = max(1, min(repeats, MOST_CALLS // len(calls)))
        times = self._timed(calls, repeats)
        us = statistics.median(times)
        gbps = moved_bytes / us * 1e-3
        share = gbps / self.copy_gbps
        row = Row(name, tokens, us, min(times), max(times), moved_bytes, gbps, share)
        self.rows.append(row)
        print(row.line(), flush=True)
        return row

    def _timed(self, calls: Sequence[Call], repeats: int) -> list[float]:
        with self.stream.capture() as graph:
            for _ in range(repeats):
                for call in calls:
                    call()
        first = self._elapsed_ms(lambda: self.stream.replay(graph))
        for _ in range(min(50, int(WARM_UP_MS / max(first, 1e-3)))):
            self.stream.replay(graph)
        times = [self._elapsed_ms(lambda: self.stream.replay(graph)) for _ in range(RUNS)]
        graph.close()
        return [1e3 * ms / (repeats * len(calls)) for ms in times]

    def _replay_ms(self, calls: Sequence[Call], runs: int) -> float:
        for call in calls:  # compiles and loads what is new
            call()
        self.stream.synchronize()

        def all_calls() -> None:
            for _ in range(runs):
                for call in calls:
                    call()

        return self._elapsed_ms(all_calls)

    def _elapsed_ms(self, work: Call) -> float:
        self.stream.record(self._start)
        work()
        self.stream.record(self._stop)
        self._stop.synchronize()
        return self._stop.elapsed_ms(self._start)

    def _measure_copies(self) -> float:
        """GB/s of copies inside the device's memory, bytes read and written counted."""
        nbytes = 1 << 30
        source, target = (empty(self.device, (nbytes,), "uint8") for _ in range(2))
        self.stream.fill(source, 7)
        self.stream.copy(target, source)
        times = [self._elapsed_ms(lambda: self.stream.copy(target, source)) for _ in range(RUNS)]
        for tensor in (source, target):
            tensor.buffer.close()
        return 2 * nbytes / statistics.median(times) * 1e-6
