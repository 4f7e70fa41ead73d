"""Looks at the NVIDIA GPUs of this machine: what they are, who uses them, how fast their link is.

A look costs a context on each GPU (some hundred MiB, for a moment), and changes no setting of any.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from strata_cli.engine.device.base import Device, Tensor, empty
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.cuda_driver import Gpu, check, find_driver, find_gpu
from strata_cli.errors import ConfigError, DeviceError, OutOfMemory

DRIVER_FOLDER = Path("/proc/driver/nvidia")
TOOL_TIMEOUT_S = 20.0
LINK_BYTES = 256 << 20
LINK_PASSES = 5
BEYOND_BYTES = 16 << 20  # locked under a limit of nothing, to learn whether the driver asks for it
LINK_FIELDS = (
    "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max", "display_active",
)  # fmt: skip

Ask = Callable[[Sequence[str]], str]


class Holder(NamedTuple):
    """A process that has memory of a GPU.

    Attributes:
        pid: as this machine numbers it.
        name: of its program.
        nbytes: that it has; 0 where the driver does not say.
    """

    pid: int
    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How a GPU is connected.

    Attributes:
        read_gbps: bytes per second from page-locked host memory to the device, measured.
        generation: of PCIe, the best that both ends can; None: unknown.
        width: lanes in use; None: unknown.
        most_width: lanes that both ends have; None: unknown.
        locks_beyond_limit: whether the driver locks memory without asking for the memlock limit;
            None: unknown.
    """

    read_gbps: float
    generation: int | None = None
    width: int | None = None
    most_width: int | None = None
    locks_beyond_limit: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU.

    Attributes:
        ordinal: its number, as in cuda:N.
        name: what its maker calls it.
        capability: compute capability.
        total_bytes, free_bytes: of its memory; free to this process.
        shared_bytes: most dynamic shared memory of a thread block.
        num_multiprocessors: how many it has.
        holders: other processes that have memory of it.
        drives_display: whether a screen is connected to it and on; None: unknown.
        link: to the host; None: not measured.
        problem: why it cannot be used; empty when it can.
        hint: what to do about that.
    """

    ordinal: int
    name: str
    capability: tuple[int, int] = (0, 0)
    total_bytes: int = 0
    free_bytes: int = 0
    shared_bytes: int = 0
    num_multiprocessors: int = 0
    holders: tuple[Holder, ...] = ()
    drives_display: bool | None = None
    link: Link | None = None
    problem: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSurvey:
    """All GPUs of a machine.

    Attributes:
        gpus: that the driver lists.
        seen: names of those that the kernel lists, whether or not they can be used.
        driver: version of the driver; empty where there is none.
        problem: why none can be used; empty when one can.
        hint: what to do about that.
    """

    gpus: tuple[GpuFacts, ...] = ()
    seen: tuple[str, ...] = ()
    driver: str = ""
    problem: str = ""
    hint: str = ""


def survey_gpus(folder: Path = DRIVER_FOLDER, ask: Ask | None = None) -> GpuSurvey:
    """Every GPU with its memory and its users; the links are not measured.

    Args:
        folder: where the kernel's driver describes itself.
        ask: runs nvidia-smi with these arguments and gives its output, empty where it fails.
    """
    ask_tool = ask or _nvidia_smi
    seen, driver = _seen(folder), _driver_version(folder)
    try:
        num_gpus = find_driver().num_gpus
    except (ConfigError, DeviceError) as error:
        return GpuSurvey(seen=seen, driver=driver, problem=error.message, hint=error.hint)
    gpus = tuple(_look_at(ordinal, ask_tool) for ordinal in range(num_gpus))
    problem, hint = _why_none(gpus)
    return GpuSurvey(gpus=gpus, seen=seen, driver=driver, problem=problem, hint=hint)


def _why_none(gpus: Sequence[GpuFacts]) -> tuple[str, str]:
    """Why none of these can be used, and what to do; nothing to say where one can."""
    if any(not gpu.problem for gpu in gpus):
        return "", ""
    if not gpus:
        return "the NVIDIA driver lists no GPU", "--device host"
    return gpus[0].problem, gpus[0].hint


def measure_link(gpu: GpuFacts, ask: Ask | None = None) -> GpuFacts:
    """The same GPU with its link, measured with a copy of LINK_BYTES; the best of a few.

    Raises:
        DeviceError: the GPU, or page-locked memory, is not to be had.
    """
    found = find_gpu(gpu.ordinal)
    with CudaDevice(found, CudaOptions(vram_reserve_bytes=0)) as device:
        rate = _copy_rate(device)
        is_beyond = _locks_beyond_limit(device)
    generation, width, most_width, _ = _link_words(_bus_id(found), ask or _nvidia_smi)
    link = Link(
        read_gbps=rate,
        generation=_number(generation),
        width=_number(width),
        most_width=_number(most_width),
        locks_beyond_limit=is_beyond,
    )
    return replace(gpu, link=link)


def _look_at(ordinal: int, ask: Ask) -> GpuFacts:
    try:
        gpu = find_gpu(ordinal)
        bus_id = _bus_id(gpu)
    except (ConfigError, DeviceError) as error:
        name = f"cuda:{ordinal}"
        return GpuFacts(ordinal=ordinal, name=name, problem=error.message, hint=error.hint)
    facts = GpuFacts(
        ordinal=ordinal,
        name=gpu.name,
        capability=gpu.capability,
        shared_bytes=gpu.shared_bytes,
        num_multiprocessors=gpu.num_multiprocessors,
        holders=_holders(bus_id, ask),
        drives_display={"Enabled": True, "Disabled": False}.get(_link_words(bus_id, ask)[3]),
    )
    return _with_memory(facts, gpu)


def _bus_id(gpu: Gpu) -> str:
    """The GPU's place on the bus: its number may be another for the driver's tools."""
    text = check("cuDeviceGetPCIBusId()", gpu.driver.cuDeviceGetPCIBusId(16, gpu.handle))
    return str(text.split(b"\0")[0].decode())


def _with_memory(facts: GpuFacts, gpu: Gpu) -> GpuFacts:
    try:
        with CudaDevice(gpu, CudaOptions(vram_reserve_bytes=0)) as device:
            free_bytes, total_bytes = device.memory()
    except DeviceError as error:
        return replace(facts, problem=error.message, hint=error.hint)
    return replace(facts, free_bytes=free_bytes, total_bytes=total_bytes)


def _copy_rate(device: Device) -> float:
    """10^9 bytes per second from page-locked memory to the device."""
    source = Tensor.over(device.allocate_pinned(LINK_BYTES), (LINK_BYTES,), np.uint8)
    target = empty(device, (LINK_BYTES,), np.uint8)
    stream = device.stream("link")
    best = 0.0
    for _ in range(LINK_PASSES):
        start, end = device.event(timing=True), device.event(timing=True)
        stream.record(start)
        stream.copy(target, source)
        stream.record(end)
        stream.synchronize()
        best = max(best, LINK_BYTES / 1e6 / max(end.elapsed_ms(start), 1e-6))
    return best


def _locks_beyond_limit(device: Device) -> bool:
    """Whether memory can be page-locked for the GPU while this process may lock none itself."""
    with _no_locked_memory():
        try:
            device.allocate_pinned(BEYOND_BYTES).close()
        except OutOfMemory:
            return False
    return True


@contextlib.contextmanager
def _no_locked_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def _seen(folder: Path) -> tuple[str, ...]:
    names = []
    for path in sorted(folder.glob("gpus/*/information")):
        lines = _text(path).splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
        names.append(models[0] if models else path.parent.name)
    return tuple(names)


def _driver_version(folder: Path) -> str:
    """The first number with dots of a line: "NVRM version: ... Module  580.65.06  Release"."""
    first = _text(folder / "version").partition("\n")[0]
    words = [word for word in first.split() if word.count(".") >= 1 and word[0].isdigit()]
    return words[0] if words else ""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


_PLAIN = "--format=csv,noheader,nounits"


def _holders(bus_id: str, ask: Ask) -> tuple[Holder, ...]:
    query = "--query-compute-apps=pid,process_name,used_memory"
    holders = []
    for line in ask([f"--id={bus_id}", query, _PLAIN]).splitlines():
        pid, _, rest = line.partition(",")
        name, _, mib = rest.rpartition(",")
        if pid.strip().isdecimal() and int(pid) != os.getpid():
            holders.append(Holder(int(pid), name.strip(), (_number(mib) or 0) << 20))
    return tuple(holders)


def _link_words(bus_id: str, ask: Ask) -> list[str]:
    """The answers for LINK_FIELDS; empty ones where there are none."""
    answer = ask([f"--id={bus_id}", f"--query-gpu={','.join(LINK_FIELDS)}", _PLAIN])
    words = [word.strip() for word in answer.strip().split(",")]
    return words if len(words) == len(LINK_FIELDS) else [""] * len(LINK_FIELDS)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _nvidia_smi(arguments: Sequence[str]) -> str:
    """What nvidia-smi, which comes with the driver, answers; nothing where it cannot."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
