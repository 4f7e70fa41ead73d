from __future__ import annotations

from typing import Any

import pytest

from strata_cli.engine.device.base import MemoryInfo
from strata_cli.engine.device.gpu_survey import GpuSurvey, Holder, Link
from strata_cli.errors import OutOfMemory
from strata_cli.launch.checking import Check, check_machine, check_plan, exit_code
from strata_cli.launch.machine import Disk, Machine, Memlock, Port, Processor, Software
from strata_cli.launch.planning import LaunchPlan, LaunchWishes, plan_launch
from tests.launch.made_up import GIB, MIB, MadeUpModel, a_gpu, a_machine

FIXED = LaunchWishes(given={}, origin_of={})


def found(machine: Machine) -> dict[str, Check]:
    return {check.name: check for check in check_machine(machine)}


def test_a_good_machine_needs_no_advice() -> None:
    checks = check_machine(a_machine(a_gpu()))
    assert {check.state for check in checks} == {"ok"}
    assert {check.advice for check in checks} == {""}
    assert exit_code(checks) == 0


LOW = Memlock(8 * MIB, 8 * MIB, is_exempt=False)
SLOW = Link(read_gbps=6.0, generation=4, width=16, most_width=16)
NARROW = Link(read_gbps=12.5, generation=4, width=8, most_width=16)
OLD = GpuSurvey(seen=("NVIDIA Old",), problem="CUDA 12.4, need 13.0", hint="update the driver")


@pytest.mark.parametrize(
    ("machine", "name", "state", "value", "advice"),
    [
        (a_machine(gpus=OLD), "gpu", "fail", "NVIDIA Old: CUDA 12.4", "update the driver"),
        (a_machine(), "gpu", "ok", "none was found", ""),
        (a_machine(a_gpu(problem="too old", hint="another")), "cuda:0", "fail", "too old", "anot"),
        (
            a_machine(a_gpu(), a_gpu(ordinal=1, problem="too old", hint="another")),
            "cuda:1", "warn", "too old", "another",
        ),
        (
            a_machine(a_gpu(holders=(Holder(7, "game", GIB),))),
            "cuda:0 users", "warn", "game (7)", "time of this GPU",
        ),
        (a_machine(a_gpu(link=SLOW)), "cuda:0 link", "warn", "6.0 GB/s", "about 22 GB/s"),
        (a_machine(a_gpu(link=NARROW)), "cuda:0 link", "warn", "PCIe 4 x8", "can x16"),
        (a_machine(a_gpu(link=None), memlock=LOW), "memlock", "warn", "8.0 MiB", "limits.conf"),
        (a_machine(a_gpu(), memlock=LOW), "memlock", "ok", "driver does not ask", ""),
        (a_machine(memlock=LOW), "memlock", "ok", "nothing needs more", ""),
        (
            a_machine(group_memory=MemoryInfo(GIB, 2 * GIB)),
            "container", "ok", "allow 2.00 GiB, 1.00 GiB left", "",
        ),
        (
            a_machine(disk=Disk(GIB, is_rotational=True, read_gbps=0.12)),
            "disk", "warn", "reads 0.12 GB/s, turns", "faster disk",
        ),
        (
            a_machine(port=Port("127.0.0.1", 80, "Permission denied")),
            "port", "fail", "port 80: Permission denied", "another --port",
        ),
        (
            a_machine(port=Port("127.0.0.1", 80, "in use", "process 7 (nginx)", 7, 81)),
            "port", "fail", "by process 7 (nginx)", "--port 81",
        ),
        (
            a_machine(software=Software("3.12.1", missing=("uvicorn",))),
            "software", "fail", "without uvicorn", "strata-cli[serve]",
        ),
        (
            a_machine(software=Software("3.12.1", cache_problem="disk full")),
            "cache", "warn", "disk full", "at every start",
        ),
        (
            a_machine(processor=Processor("Old", 2, 4, frozenset({"sse2"}))),
            "processor", "warn", "2 of 4 cores", "slow",
        ),
    ],
)  # fmt: skip
def test_each_trouble_has_a_state_and_what_to_do(
    machine: Machine, name: str, state: str, value: str, advice: str
) -> None:
    check = found(machine)[name]
    assert check.state == state
    assert value in check.value
    assert advice in check.advice
    assert bool(check.advice) == (state != "ok")
    assert exit_code([check]) == (1 if state == "fail" else 0)


def test_a_plan_that_can_be_made_is_fine_and_its_notes_are_warnings() -> None:
    machine, names = a_machine(a_gpu(holders=(Holder(7, "game", GIB),))), frozenset({"device"})

    def make() -> LaunchPlan:
        return plan_launch(machine, MadeUpModel(), FIXED, names)

    plan, note = check_plan(make)
    assert plan == Check("plan", "ok", "runs on cuda:0 with a context of 32768 tokens")
    assert (note.name, note.state) == ("note", "warn")


def test_a_plan_that_cannot_be_made_fails_with_its_reason() -> None:
    def make() -> Any:
        raise OutOfMemory("too large", hint="a smaller one")

    checks = check_plan(make)
    assert checks == [Check("plan", "fail", "too large", "a smaller one")]
    assert exit_code(checks) == 1
