"""What the worker has done so far, for the server's metrics."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.server.jobs import GenerateJob
from strata_cli.server.protocol import Counters
from strata_cli.server.score_jobs import AnyJob

STATM = Path("/proc/self/statm")


class Tally(Counters, kw_only=True):
    """Counters that go up. The engine's thread writes, any thread reads."""

    def add(self, job: AnyJob) -> None:
        """A request that is over, or was cancelled."""
        self.canonical_reads += job.canonical
        self.prompt_tokens += job.prompt_tokens
        self.reused_tokens += job.reused_tokens
        self.read_tokens += job.read_tokens
        if isinstance(job, GenerateJob):
            self.generated_tokens += len(job.generated)

    def counters(self, experts: ResidencyCounts | None) -> Counters:
        """A copy of what they are now."""
        return msgspec.structs.replace(self, experts=experts)


def resident_bytes() -> int:
    """Memory of this process that is in use; 0 where that cannot be found out."""
    try:
        pages = int(STATM.read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE")
