"""What the worker has done so far, for the server's metrics."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.server.jobs import GenerateJob
from strata_cli.server.protocol import Counters, ExpertCounters
from strata_cli.server.score_jobs import AnyJob

STATM = Path("/proc/self/statm")


@dataclass(slots=True)
class Tally:
    """Totals since the start; see Counters. The engine's thread writes, any thread reads."""

    requests: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    canonical_reads: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    steps: int = 0
    step_rows: int = 0
    prompt_ms: float = 0.0
    step_ms: float = 0.0

    def add(self, job: AnyJob) -> None:
        """A request that is over, or was cancelled."""
        self.canonical_reads += job.canonical
        self.prompt_tokens += job.prompt_tokens
        self.reused_tokens += job.reused_tokens
        self.read_tokens += job.read_tokens
        if isinstance(job, GenerateJob):
            self.generated_tokens += len(job.generated)

    def counters(self, experts: ResidencyCounts | None) -> Counters:
        """All of it, as it is told."""
        told = {name: getattr(self, name) for name in self.__slots__}
        return Counters(**told, experts=None if experts is None else _experts(experts))


def resident_bytes() -> int:
    """Memory of this process that is in use; 0 where that cannot be found out."""
    try:
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


def _experts(counts: ResidencyCounts) -> ExpertCounters:
    return ExpertCounters(
        routed=counts.routed,
        hits=counts.hits,
        pcie=counts.pcie,
        cpu=counts.cpu,
        dropped=counts.dropped,
        swaps=counts.swaps,
    )
