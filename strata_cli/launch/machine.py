"""What is known of a machine: plain values, which a probe finds out and a test makes up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from strata_cli.engine.device.base import MemoryInfo
from strata_cli.engine.device.gpu_survey import GpuSurvey

NO_LIMIT = 1 << 62  # of memory that may be locked


class Processor(NamedTuple):
    """The host's processor.

    Attributes:
        name: what its maker calls it.
        num_usable: logical cores that this process may use, or has the time of.
        num_cores: logical cores that the machine has.
        features: of its instruction set.
    """

    name: str
    num_usable: int
    num_cores: int
    features: frozenset[str]


class Memlock(NamedTuple):
    """How much memory may be locked, in bytes; NO_LIMIT: any.

    Attributes:
        soft_bytes: that this process may lock.
        hard_bytes: that it may raise that to.
        is_exempt: whether it may lock any amount all the same.
    """

    soft_bytes: int
    hard_bytes: int
    is_exempt: bool

    @property
    def reachable_bytes(self) -> int:
        """Most that this process can come to lock."""
        return NO_LIMIT if self.is_exempt else max(self.soft_bytes, self.hard_bytes)


class Disk(NamedTuple):
    """Where the model's file lies.

    Attributes:
        free_bytes: of its file system.
        is_rotational: whether it turns; None: unknown.
        read_gbps: bytes per second, measured past the page cache; None: not measured.
    """

    free_bytes: int
    is_rotational: bool | None = None
    read_gbps: float | None = None


class Port(NamedTuple):
    """Where the server is to listen.

    Attributes:
        host, port: the address.
        problem: why it cannot; empty when it can.
        holder: the process that listens there, in words; empty: nobody, or unknown.
        pid: of that process; 0: unknown.
        free_port: the next one that could be had; 0: none was found.
    """

    host: str
    port: int
    problem: str = ""
    holder: str = ""
    pid: int = 0
    free_port: int = 0


class Software(NamedTuple):
    """What is installed.

    Attributes:
        python: version.
        missing: packages that a server needs and that cannot be imported.
        has_systemd: whether systemd runs this machine.
        cache_folder: where compiled kernels are kept; empty: nowhere.
        cache_problem: why not.
    """

    python: str
    missing: tuple[str, ...] = ()
    has_systemd: bool = False
    cache_folder: str = ""
    cache_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as this process sees it.

    Attributes:
        processor: of the host.
        memory: available and in all, of the machine or of its container where that has less.
        group_memory: what control groups leave and allow; None: they set no limit.
        memlock: limit of locked memory.
        gpus: see GpuSurvey.
        disk: of the model.
        port: for the server.
        software: what is installed.
    """

    processor: Processor
    memory: MemoryInfo
    memlock: Memlock
    gpus: GpuSurvey
    disk: Disk
    port: Port
    software: Software
    group_memory: MemoryInfo | None = None
