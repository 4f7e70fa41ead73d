"""What the process's control groups leave it of the machine, as containers and services set it."""

from __future__ import annotations

from pathlib import Path

from strata_cli.engine.device.base import MemoryInfo

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNIFIED = "0::/"  # the line of version 2
_RECLAIMABLE = ("active_file", "inactive_file")


def cgroup_memory(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> MemoryInfo | None:
    """Memory left and allowed, by the strictest of the groups that the process is in.

    File pages that the kernel can drop count as left.

    Args:
        mount: where control groups (version 2) are mounted.
        membership: the file that names the process's own.

    Returns:
        None where no group sets a limit.
    """
    limits = [limit for limit in map(_limit, _groups(mount, membership)) if limit is not None]
    return min(limits, default=None)


def cgroup_processors(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Processors' worth of time allowed, by the strictest of the groups that the process is in.

    Args:
        mount: where control groups (version 2) are mounted.
        membership: the file that names the process's own.

    Returns:
        None where no group sets a limit.
    """
    quotas = [quota for quota in map(_quota, _groups(mount, membership)) if quota is not None]
    return min(quotas, default=None)


def _groups(mount: Path, membership: Path) -> list[Path]:
    """The process's own group and all above it; none where version 2 is not in use."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = next((line[len(_UNIFIED) :] for line in lines if line.startswith(_UNIFIED)), None)
    if own is None:
        return []
    group = mount / own
    return [group, *group.parents][: len(Path(own).parts) + 1]


def _quota(group: Path) -> float | None:
    """Of time: "400000 100000" is four processors; "max 100000" is as many as there are."""
    try:
        allowed, period = (group / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return None if allowed == "max" else int(allowed) / int(period)


def _limit(group: Path) -> MemoryInfo | None:
    try:
        allowed = (group / "memory.max").read_text(encoding="ascii").strip()
        if allowed == "max":
            return None
        used = int((group / "memory.current").read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii").split()
    except OSError:  # the root group has no limit, and others may not be ours to read
        return None
    values = dict(zip(stat[::2], map(int, stat[1::2]), strict=False))
    kept = used - sum(values.get(name, 0) for name in _RECLAIMABLE)
    return MemoryInfo(free_bytes=max(int(allowed) - kept, 0), total_bytes=int(allowed))
