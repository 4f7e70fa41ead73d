"""Judges a machine: what is fine, what is not, and what to do about it. Pure; changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

from strata_cli.engine.device.cuda_driver import MIN_CAPABILITY
from strata_cli.engine.device.gpu_survey import GpuFacts, Link
from strata_cli.engine.device.sizes import gib
from strata_cli.errors import StrataError
from strata_cli.launch.machine import NO_LIMIT, Machine
from strata_cli.launch.planning import LaunchPlan

State: TypeAlias = Literal["ok", "warn", "fail"]

LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # of a PCIe lane
GOOD_SHARE = 0.7  # of a link's rate that a copy should reach
LEAST_READ_GBPS = 0.5
VECTORS = ("avx512f", "avx2", "neon", "asimd")  # best first


class Check(NamedTuple):
    """One thing that was looked at.

    Attributes:
        name: of it.
        state: ok, warn or fail.
        value: what was found.
        advice: what to do; empty where nothing needs to be done.
    """

    name: str
    state: State
    value: str
    advice: str = ""


def check_machine(machine: Machine) -> list[Check]:
    """What a machine is like, whatever model is to run there."""
    return [
        _processor(machine),
        _memory(machine),
        *_group(machine),
        _memlock(machine),
        *_gpus(machine),
        _disk(machine),
        _port(machine),
        *_software(machine),
    ]


def check_plan(make: Callable[[], LaunchPlan]) -> list[Check]:
    """Whether a model can run there.

    Args:
        make: makes the plan, or raises what is in its way.
    """
    try:
        plan = make()
    except StrataError as error:
        return [Check("plan", "fail", error.message, error.hint)]
    device = plan.value("device")
    value = f"runs on {device} with a context of {plan.fit.context_tokens} tokens"
    return [Check("plan", "ok", value), *(Check("note", "warn", note) for note in plan.notes)]


def exit_code(checks: list[Check]) -> int:
    """0, or 1 where something fails."""
    return int(any(check.state == "fail" for check in checks))


def _processor(machine: Machine) -> Check:
    name, usable, cores, features = machine.processor
    vectors = [feature for feature in VECTORS if feature in features]
    value = f"{name}, {usable} of {cores} cores usable"
    if not vectors:
        return Check(
            "processor", "warn", f"{value}, no wide vectors", "computing on the host will be slow"
        )
    return Check("processor", "ok", f"{value}, {vectors[0]}")


def _memory(machine: Machine) -> Check:
    free_bytes, total_bytes = machine.memory
    return Check("memory", "ok", f"{gib(free_bytes)} available of {gib(total_bytes)}")


def _group(machine: Machine) -> Iterator[Check]:
    if machine.group_memory is not None:
        free_bytes, total_bytes = machine.group_memory
        value = f"control groups allow {gib(total_bytes)}, {gib(free_bytes)} left"
        yield Check("container", "ok", value)


def _memlock(machine: Machine) -> Check:
    soft, hard, is_exempt = machine.memlock
    if is_exempt or max(soft, hard) >= machine.memory.total_bytes:
        return Check("memlock", "ok", "unlimited" if soft >= NO_LIMIT or is_exempt else gib(hard))
    usable = [gpu for gpu in machine.gpus.gpus if not gpu.problem]
    is_asked = [gpu for gpu in usable if not (gpu.link and gpu.link.locks_beyond_limit)]
    if not is_asked:
        why = "and the GPU's driver does not ask for it" if usable else "and nothing needs more"
        return Check("memlock", "ok", f"{gib(max(soft, hard))}, {why}")
    return Check(
        "memlock",
        "warn",
        f"{gib(soft)}, at most {gib(hard)}",
        "memlock unlimited in /etc/security/limits.conf; --ulimit memlock=-1 for a container",
    )


def _gpus(machine: Machine) -> Iterator[Check]:
    survey = machine.gpus
    if not survey.gpus:
        is_missed = bool(survey.seen)
        value = f"{', '.join(survey.seen)}: {survey.problem}" if is_missed else "none was found"
        yield Check("gpu", "fail" if is_missed else "ok", value, survey.hint if is_missed else "")
        return
    yield Check("driver", "ok", survey.driver or "there, version unknown")
    for gpu in survey.gpus:
        yield from _gpu(gpu, is_only=len(survey.gpus) == 1)


def _gpu(gpu: GpuFacts, *, is_only: bool) -> Iterator[Check]:
    name = f"cuda:{gpu.ordinal}"
    if gpu.problem:
        yield Check(name, "fail" if is_only else "warn", gpu.problem, gpu.hint)
        return
    assert gpu.capability >= MIN_CAPABILITY
    capability = ".".join(map(str, gpu.capability))
    free = f"{gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}"
    yield Check(name, "ok", f"{gpu.name}, compute capability {capability}, {free}")
    if gpu.holders:
        who = ", ".join(f"{holder.name} ({holder.pid})" for holder in gpu.holders)
        yield Check(f"{name} users", "warn", who, "they take memory and time of this GPU")
    if gpu.link is not None:
        yield _link(f"{name} link", gpu.link)


def _link(name: str, link: Link) -> Check:
    value = f"{link.read_gbps:.1f} GB/s from page-locked memory"
    if link.generation is None or link.width is None:
        return Check(name, "ok", value)
    most_width = link.most_width or link.width
    expected = LANE_GBPS.get(link.generation, LANE_GBPS[6]) * most_width
    value += f", PCIe {link.generation} x{link.width}"
    if link.width < most_width:
        advice = f"the GPU and its slot can x{most_width}: move or reseat the card"
        return Check(name, "warn", value, advice)
    if link.read_gbps < GOOD_SHARE * expected:
        advice = f"about {GOOD_SHARE * expected:.0f} GB/s are usual: another slot, or a busy host"
        return Check(name, "warn", value, advice)
    return Check(name, "ok", value)


def _disk(machine: Machine) -> Check:
    disk = machine.disk
    parts = [f"{gib(disk.free_bytes)} free"]
    if disk.read_gbps is not None:
        parts.append(f"reads {disk.read_gbps:.2f} GB/s")
    if disk.is_rotational:
        parts.append("turns, as its driver says")
    is_slow = disk.read_gbps is not None and disk.read_gbps < LEAST_READ_GBPS
    advice = "a large model takes long to load: put it on a faster disk" if is_slow else ""
    return Check("disk", "warn" if is_slow else "ok", ", ".join(parts), advice)


def _port(machine: Machine) -> Check:
    port = machine.port
    where = f"{port.host} port {port.port}"
    if not port.problem:
        return Check("port", "ok", f"{where} is free")
    by = f" by {port.holder}" if port.holder else ""
    advice = f"--port {port.free_port} is free" if port.free_port else "another --port or --host"
    return Check("port", "fail", f"{where}: {port.problem}{by}", advice)


def _software(machine: Machine) -> Iterator[Check]:
    software = machine.software
    if software.missing:
        missing = f"Python {software.python} without {', '.join(software.missing)}"
        yield Check("software", "fail", missing, "pip install 'strata-cli[serve]'")
    else:
        yield Check("software", "ok", f"Python {software.python}, all that a server needs")
    if software.cache_problem:
        advice = "kernels are compiled at every start: mend that, or set XDG_CACHE_HOME"
        yield Check("cache", "warn", software.cache_problem, advice)
    else:
        yield Check("cache", "ok", software.cache_folder)
    yield Check("systemd", "ok", "runs" if software.has_systemd else "does not run here")
