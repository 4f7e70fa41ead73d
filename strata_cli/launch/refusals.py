"""Reasons for not starting at all: each one message with its numbers, and the next step."""

from __future__ import annotations

from strata_cli.engine.device.gpu_survey import GpuFacts
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import ConfigError, OutOfMemory
from strata_cli.launch.fits import Fit, ModelFacts
from strata_cli.launch.machine import Machine


def check_software(machine: Machine) -> None:
    """Refuse where the server cannot be imported.

    Raises:
        ConfigError: it cannot.
    """
    missing = machine.software.missing
    if missing:
        raise ConfigError(
            f"the server needs {', '.join(missing)}, not installed here",
            hint="pip install 'strata-cli[serve]'",
        )


def check_port(machine: Machine) -> None:
    """Refuse a port that is taken.

    Raises:
        ConfigError: somebody else listens there, or nobody may.
    """
    port = machine.port
    if not port.problem:
        return
    by = f" by {port.holder}" if port.holder else ""
    other = f"--port {port.free_port}" if port.free_port else "another --port or --host"
    end = f", or end that process: kill {port.pid}" if port.pid else ""
    raise ConfigError(
        f"cannot listen on {port.host} port {port.port}: {port.problem}{by}", hint=f"{other}{end}"
    )


def check_memory(machine: Machine, model: ModelFacts, fit: Fit, *, is_gpu: bool) -> None:
    """Refuse where the host has not enough memory.

    Raises:
        OutOfMemory: that is so.
    """
    free_bytes, total_bytes = machine.memory
    group = machine.group_memory
    where = f"{gib(free_bytes)} available of {gib(total_bytes)}"
    if group is not None and group.total_bytes == total_bytes:
        where += ", the limit of the control group"
    if is_gpu and fit.locked_bytes > free_bytes:
        what = "experts and the n-gram table" if fit.pinned_bytes else "n-gram table"
        raise OutOfMemory(
            f"the {what} of {model.name} need {gib(fit.locked_bytes)} of page-locked RAM: {where}",
            hint="close other programs, raise the container's limit, use a smaller quantization, "
            "--mmap-experts, or --device host, which leaves all weights in their file",
        )
    need = fit.workspace_bytes + fit.state_bytes
    if not is_gpu and need > free_bytes:
        raise OutOfMemory(
            f"{model.name} needs {gib(need)} of RAM beside its weights: {where}",
            hint="lower --max-context, close other programs, or raise the container's limit",
        )


def check_locking(machine: Machine, fit: Fit, gpu: GpuFacts | None, service: str) -> None:
    """Refuse where a GPU's driver may not lock the memory that it needs.

    A system service gets a limit of its own. Drivers that were seen to lock without asking for the
    limit are believed.

    Raises:
        OutOfMemory: it may not.
    """
    reachable = machine.memlock.reachable_bytes
    if gpu is None or service == "system" or fit.locked_bytes <= reachable:
        return
    if gpu.link is not None and gpu.link.locks_beyond_limit:
        return
    raise OutOfMemory(
        f"{gib(fit.locked_bytes)} must be page-locked for cuda:{gpu.ordinal}, "
        f"but the memlock limit of this process is {gib(reachable)}",
        hint="put '* - memlock unlimited' into /etc/security/limits.conf and log in again; in a "
        "container --ulimit memlock=-1; or --systemd system, whose unit raises it",
    )
