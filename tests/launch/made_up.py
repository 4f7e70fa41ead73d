"""Machines and models that exist in tests alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strata_cli.engine.device.base import MemoryInfo
from strata_cli.engine.device.gpu_survey import GpuFacts, GpuSurvey, Link
from strata_cli.engine.device.paper import DescribedGpu
from strata_cli.errors import OutOfMemory
from strata_cli.launch.fits import Fit, FitWishes
from strata_cli.launch.machine import NO_LIMIT, Disk, Machine, Memlock, Port, Processor, Software

GIB = 1 << 30
MIB = 1 << 20


def a_gpu(**changes: Any) -> GpuFacts:
    facts: dict[str, Any] = {
        "ordinal": 0,
        "name": "NVIDIA Made-Up 24",
        "capability": (8, 9),
        "total_bytes": 24 * GIB,
        "free_bytes": 23 * GIB,
        "shared_bytes": 101_376,
        "num_multiprocessors": 128,
        "link": Link(
            read_gbps=25.0, generation=4, width=16, most_width=16, locks_beyond_limit=True
        ),
    }
    return GpuFacts(**{**facts, **changes})


def a_machine(*gpus: GpuFacts, **changes: Any) -> Machine:
    names = tuple(gpu.name for gpu in gpus)
    survey = GpuSurvey(gpus=gpus, seen=names, driver="580.65.06" if gpus else "")
    if not gpus:
        survey = GpuSurvey(problem="no NVIDIA driver was found on this machine", hint="install it")
    facts: dict[str, Any] = {
        "processor": Processor("Made-Up 9000", 16, 16, frozenset({"avx2", "fma"})),
        "memory": MemoryInfo(60 * GIB, 64 * GIB),
        "memlock": Memlock(NO_LIMIT, NO_LIMIT, is_exempt=False),
        "gpus": survey,
        "disk": Disk(400 * GIB, is_rotational=False, read_gbps=2.0),
        "port": Port("127.0.0.1", 8080),
        "software": Software("3.12.1", has_systemd=True, cache_folder="/home/u/.cache/strata"),
    }
    return Machine(**{**facts, **changes})


@dataclass
class MadeUpModel:
    """ModelFacts of a model of a few numbers; asks are kept."""

    path: Path | None = Path("/models/made-up.gguf")
    files: tuple[Path, ...] = (Path("/models/made-up.gguf"),)
    name: str = "Made-Up 60B"
    dense_bytes: int = 3 * GIB
    experts_bytes: int = 30 * GIB
    table_bytes: int = 8 * GIB
    context_tokens: int = 262_144
    num_experts: int = 15_360
    state_bytes_of_token: int = 40_000
    workspace_bytes: int = GIB
    asked: list[FitWishes] = field(default_factory=list)

    @property
    def file_bytes(self) -> int:
        return self.dense_bytes + self.experts_bytes + self.table_bytes

    def fit(self, wishes: FitWishes, gpu: DescribedGpu | None) -> Fit:
        self.asked.append(wishes)
        context = wishes.context_tokens
        state_bytes = context * self.state_bytes_of_token * wishes.num_sequences
        least = self.dense_bytes + self.workspace_bytes + state_bytes
        room = least + self.experts_bytes if gpu is None else gpu.free_bytes
        if least > room:
            raise OutOfMemory(f"{self.name} does not fit: need {least}, free {room}")
        all_fit = least + self.experts_bytes <= room
        pinned_bytes = self.experts_bytes if wishes.pinned_bytes is None else wishes.pinned_bytes
        count = self.num_experts
        if not all_fit:
            count = (room - least) * self.num_experts // self.experts_bytes
        return Fit(
            context_tokens=context,
            chunk_tokens=wishes.chunk_tokens or 4096,
            num_sequences=wishes.num_sequences,
            is_streamed=not all_fit,
            dense_bytes=self.dense_bytes,
            experts_bytes=self.experts_bytes,
            resident_bytes=self.experts_bytes * count // self.num_experts,
            num_resident=count,
            mapped_bytes=0 if gpu is None else self.table_bytes,
            pinned_bytes=0 if all_fit else min(self.experts_bytes, pinned_bytes),
            workspace_bytes=self.workspace_bytes,
            state_bytes=state_bytes,
        )
