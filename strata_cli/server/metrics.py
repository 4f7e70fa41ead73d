"""Counters for Prometheus: of the server, and of the engine as it reports them itself."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from strata_cli.server.protocol import Status
from strata_cli.server.queue import RequestQueue

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """What the server counts. Each application has its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "strata_http_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "strata_http_request_seconds",
            "From a request's arrival to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count a request that is over; 499 stands for a client that went away."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def page(self, queue: RequestQueue, status: Status | None, starts: int) -> bytes:
        """What Prometheus reads.

        Args:
            queue: the server's.
            status: the engine's; None while there is none.
            starts: of the engine.
        """
        now = CollectorRegistry()
        now.register(_Now(queue, status, starts))
        return generate_latest(self.registry) + generate_latest(now)


class _Now(Collector):
    """What is read off at the moment of asking."""

    def __init__(self, queue: RequestQueue, status: Status | None, starts: int) -> None:
        self._queue = queue
        self._status = status
        self._starts = starts

    def collect(self) -> Iterable[Metric]:
        """One family for each number."""
        queue = self._queue
        yield _gauge("strata_requests_inside", "Requests answered now, or waiting.", queue.entered)
        yield _gauge("strata_turns_waiting", "Reads that wait for the engine.", queue.waiting)
        yield _gauge("strata_turns_running", "Reads that the engine has.", queue.running)
        yield _counter("strata_queue_refused", "Requests turned away by 503.", queue.refused)
        yield _counter("strata_engine_starts", "Times the engine was started.", self._starts)
        yield _gauge("strata_engine_up", "Whether it is loaded.", int(self._status is not None))
        if self._status is not None:
            yield from _engine(self._status)


def _engine(status: Status) -> Iterable[Metric]:
    yield _gauge(
        "strata_engine_memory_bytes", "Resident memory of its process.", status.memory_bytes
    )
    for state in ("waiting", "reading", "generating"):
        yield _gauge(
            f"strata_engine_{state}", f"Requests that are {state}.", getattr(status, state)
        )
    counters = status.counters
    for name, meaning in _TOTALS.items():
        yield _counter(f"strata_engine_{name}", meaning, getattr(counters, name))
    if counters.experts is not None:
        for name, meaning in _EXPERTS.items():
            yield _counter(f"strata_experts_{name}", meaning, getattr(counters.experts, name))


_TOTALS = {
    "requests": "Requests taken, since the engine's start.",
    "requests_failed": "Requests that failed.",
    "requests_cancelled": "Requests that were stopped.",
    "canonical_reads": "Canonical reads.",
    "prompt_tokens": "Tokens of prompts.",
    "reused_tokens": "Of these, known from earlier prompts.",
    "read_tokens": "Of these, read.",
    "generated_tokens": "Tokens generated.",
    "passes": "Passes of the engine, of any kind.",
    "steps": "Of these, passes of generated tokens alone.",
    "step_rows": "Generated tokens that passes of any kind took in.",
    "prompt_ms": "Milliseconds of passes with pieces of prompts.",
    "step_ms": "Milliseconds of passes of generated tokens alone.",
}

_EXPERTS = {
    "routed": "Experts that steps wanted; the sum of the next four.",
    "hits": "Found in the expert cache.",
    "pcie": "Read by the GPU over its link to host memory.",
    "cpu": "Computed on the host's processor.",
    "dropped": "Left out.",
    "swaps": "Experts that changed places with others of the cache.",
}


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
