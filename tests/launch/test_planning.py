from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.config import field_names
from strata_cli.engine.device.base import MemoryInfo
from strata_cli.engine.device.gpu_survey import GpuFacts, GpuSurvey, Holder
from strata_cli.errors import ConfigError, OutOfMemory, StrataError
from strata_cli.launch.machine import Disk, Machine, Memlock, Port, Software
from strata_cli.launch.planning import LaunchPlan, LaunchWishes, plan_launch
from tests.launch.made_up import GIB, MIB, MadeUpModel, a_gpu, a_machine

NAMES = frozenset({*field_names(), "host", "port", "parallel"})


def plan(
    machine: Machine, model: MadeUpModel | None = None, service: str = "", **given_: Any
) -> LaunchPlan:
    wishes = LaunchWishes(
        given=given_, origin_of={name: f"by --{name}" for name in given_}, service=service
    )
    return plan_launch(machine, model or MadeUpModel(), wishes, NAMES)


def test_a_gpu_that_is_too_small_caches_experts_and_the_ram_holds_all() -> None:
    made = plan(a_machine(a_gpu()))
    assert made.value("model") == Path("/models/made-up.gguf")
    assert made.value("device") == "cuda:0"
    assert made.value("max_context") == 32_768
    assert made.value("prefill") == 0
    assert made.value("expert_cache") is None
    assert made.value("vram_reserve_mib") == 700
    assert (made.value("host"), made.value("port"), made.value("parallel")) == (
        "127.0.0.1", 8080, 1,
    )  # fmt: skip
    assert all(choice.reason for choice in made.choices)
    assert not any(choice.is_given for choice in made.choices)
    vram, ram, disk = made.tiers
    assert (vram.name, ram.name, disk.name) == ("VRAM", "RAM", "disk")
    assert vram.left_bytes >= 700 * MIB
    assert [part.num_experts for part in ram.parts] == [15_360, None]
    assert ram.left_bytes == (60 - 38) * GIB
    assert made.load_s == pytest.approx(41 * GIB / 2e9)


@pytest.mark.parametrize(
    ("free_gib", "name", "value"),
    [(41, "arena_pin_gib", 29.0), (20.5, "arena_pin_gib", 8.0), (12.9, "mmap_experts", True)],
)
def test_where_ram_is_short_the_other_experts_stay_in_the_file(
    free_gib: float, name: str, value: float
) -> None:
    memory = MemoryInfo(int(free_gib * GIB), 64 * GIB)
    made = plan(a_machine(a_gpu(), memory=memory))
    assert made.value(name) == value
    _, ram, disk = made.tiers
    assert ram.left_bytes >= 4 * GIB
    pinned = sum(part.num_experts or 0 for part in ram.parts)
    assert pinned + (disk.parts[1].num_experts or 0) == 15_360
    by_hand = plan(a_machine(a_gpu(), memory=memory), arena_pin_gib=2.0)
    assert by_hand.fit.pinned_bytes == 2 * GIB
    assert by_hand.value("arena_pin_gib") == 2.0
    none = plan(a_machine(a_gpu()), mmap_experts=True)
    assert none.fit.pinned_bytes == 0


def test_more_requests_at_once_take_more_contexts() -> None:
    made = plan(a_machine(a_gpu()), parallel=4)
    assert made.tiers[0].parts[2].what == "4 contexts of 32768 tokens"
    assert made.tiers[0].parts[2].nbytes == 4 * 32_768 * 40_000
    assert made.value("parallel") == 4


def test_a_gpu_that_holds_all_leaves_the_ram_to_others() -> None:
    large = a_gpu(total_bytes=80 * GIB, free_bytes=79 * GIB)
    made = plan(a_machine(large), MadeUpModel(table_bytes=0))
    assert made.tiers[1].parts == ()
    assert next(choice.reason for choice in made.choices if choice.name == "expert_cache") == (
        "now all experts fit"
    )


def test_without_a_gpu_the_host_computes_and_weights_stay_in_the_file() -> None:
    made = plan(a_machine())
    assert made.value("device") == "host"
    assert made.value("threads") == 0
    ram, disk = made.tiers
    assert ram.parts[0].num_experts == 15_360
    assert [part.what for part in disk.parts] == ["n-gram table, a few rows for each token"]
    assert made.load_s is None
    assert made.notes == ()


def test_a_host_with_little_ram_says_what_stays_on_the_disk() -> None:
    made = plan(a_machine(memory=MemoryInfo(20 * GIB, 32 * GIB)))
    ram, disk = made.tiers
    assert ram.left_bytes == 0
    experts = [part.num_experts for part in (*ram.parts, *disk.parts) if part.num_experts]
    assert sum(experts) == 15_360
    assert "again and again" in made.notes[0]


@pytest.mark.parametrize(
    ("gpus", "ram_bytes", "is_told"),
    [((), 400 * GIB, True), ((a_gpu(),), 400 * GIB, False), ((a_gpu(),), 40 * GIB, True)],
)
def test_a_disk_that_turns_is_told_of_where_the_file_is_used_in_place(
    gpus: tuple[GpuFacts, ...], ram_bytes: int, is_told: bool
) -> None:
    machine = a_machine(*gpus, memory=MemoryInfo(ram_bytes, ram_bytes))
    assert not any("its disk turns" in note for note in plan(machine).notes)
    turning = replace(machine, disk=Disk(400 * GIB, is_rotational=True, read_gbps=0.1))
    assert any("its disk turns" in note for note in plan(turning).notes) is is_told


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        (("/models/made-up.gguf",), "cat /models/made-up.gguf > /dev/null"),
        (("/my models/it.gguf",), "cat '/my models/it.gguf' > /dev/null"),
        (
            ("/my models/it-00001-of-00002.gguf", "/my models/it-00002-of-00002.gguf"),
            "cat '/my models/it'-*-of-00002.gguf > /dev/null",
        ),
    ],
)
def test_a_note_about_the_file_names_it(files: tuple[str, ...], shown: str) -> None:
    machine = a_machine(disk=Disk(400 * GIB, is_rotational=True, read_gbps=0.1))
    (note,) = plan(machine, MadeUpModel(path=None, files=tuple(map(Path, files)))).notes
    assert shown in note
    assert note.endswith("in about 440 s")


@pytest.mark.parametrize(
    ("read_gbps", "file_mib", "is_told"),
    [(None, 17, False), (0.02, 17, False), (None, 400, True), (0.8, 400, False)],
)
def test_a_file_that_is_soon_read_is_not_warned_of(
    read_gbps: float | None, file_mib: int, is_told: bool
) -> None:
    machine = a_machine(disk=Disk(400 * GIB, is_rotational=True, read_gbps=read_gbps))
    model = MadeUpModel(dense_bytes=file_mib * MIB, experts_bytes=0, table_bytes=0)
    assert bool(plan(machine, model).notes) is is_told


def test_the_gpu_with_most_free_memory_is_taken() -> None:
    gpus = (a_gpu(free_bytes=9 * GIB), a_gpu(ordinal=1), a_gpu(ordinal=2, problem="too old"))
    assert plan(a_machine(*gpus)).value("device") == "cuda:1"
    assert plan(a_machine(*gpus), device="cuda:0").value("device") == "cuda:0"
    alike = plan(a_machine(a_gpu(), a_gpu(ordinal=1)))
    assert alike.value("device") == "cuda:0"


def test_a_screen_gets_more_room() -> None:
    made = plan(a_machine(a_gpu(drives_display=True)))
    assert made.value("vram_reserve_mib") == 1024


def test_a_context_is_halved_until_it_fits() -> None:
    model = MadeUpModel()
    made = plan(a_machine(a_gpu(free_bytes=5 * GIB)), model)
    assert made.value("max_context") == 8192
    asked = list(dict.fromkeys(wish.context_tokens for wish in model.asked))
    assert asked == [32_768, 16_384, 8192]
    model = MadeUpModel(context_tokens=4096)
    assert plan(a_machine(a_gpu()), model).value("max_context") == 4096


def test_what_was_given_is_kept_or_refused_never_changed() -> None:
    made = plan(a_machine(a_gpu()), max_context=100_000, port=9000, seed=3)
    chosen = {choice.name: choice for choice in made.choices}
    assert (chosen["max_context"].value, chosen["max_context"].reason) == (
        100_000,
        "by --max_context",
    )
    assert (chosen["port"].value, chosen["seed"].value) == (9000, 3)
    assert chosen["seed"].is_given
    model = MadeUpModel()
    with pytest.raises(OutOfMemory, match="does not fit"):
        plan(a_machine(a_gpu(free_bytes=5 * GIB)), model, max_context=32_768, vram_bytes=4 * GIB)
    assert {wish.context_tokens for wish in model.asked} == {32_768}


def test_settings_that_do_not_exist_are_not_chosen() -> None:
    wishes = LaunchWishes(given={}, origin_of={})
    made = plan_launch(a_machine(), MadeUpModel(), wishes, frozenset({"model", "device"}))
    assert [choice.name for choice in made.choices] == ["model", "device"]


OLD_DRIVER = GpuSurvey(
    seen=("NVIDIA Made-Up 24",),
    driver="550.1",
    problem="the NVIDIA driver supports CUDA 12.4, need 13.0",
    hint="update the NVIDIA driver, or --device host",
)
HOLDER = Holder(812, "python3", 20 * GIB)


@pytest.mark.parametrize(
    ("machine", "given_", "error", "message", "hint"),
    [
        (
            a_machine(gpus=OLD_DRIVER), {}, ConfigError,
            "NVIDIA Made-Up 24 cannot be used: the NVIDIA driver supports CUDA 12.4, need 13.0",
            "update the NVIDIA driver",
        ),
        (
            a_machine(), {"device": "cuda:0"}, ConfigError,
            "no device cuda:0: no NVIDIA driver was found", "install it",
        ),
        (
            a_machine(a_gpu()), {"device": "cuda:3"}, ConfigError,
            "no device cuda:3: found 1 GPU", "--device auto",
        ),
        (
            a_machine(a_gpu(problem="compute capability 6.1", hint="another GPU")),
            {"device": "cuda:0"}, ConfigError, "cuda:0 cannot be used: compute", "another GPU",
        ),
        (
            a_machine(a_gpu(free_bytes=2 * GIB, holders=(HOLDER,))), {}, OutOfMemory,
            "is in use: 22.00 GiB of 24.00 GiB are taken by process 812 (python3, 20.00 GiB)",
            "kill 812",
        ),
        (
            a_machine(a_gpu(free_bytes=2 * GIB)), {}, OutOfMemory,
            "cuda:0 is in use: 22.00 GiB of 24.00 GiB are taken by others", "--device host",
        ),
        (
            a_machine(a_gpu(total_bytes=4 * GIB, free_bytes=4 * GIB)), {}, OutOfMemory,
            "does not fit", "",
        ),
        (
            a_machine(a_gpu(), memory=MemoryInfo(7 * GIB, 32 * GIB)), {}, OutOfMemory,
            "n-gram table of Made-Up 60B need 8.00 GiB of page-locked RAM: "
            "7.00 GiB available of 32.00 GiB",
            "close other programs",
        ),
        (
            a_machine(a_gpu(), memory=MemoryInfo(30 * GIB, 32 * GIB)), {"arena_pin_gib": 25.0},
            OutOfMemory, "experts and the n-gram table of Made-Up 60B need 33.00 GiB",
            "--mmap-experts",
        ),
        (
            a_machine(
                a_gpu(),
                memory=MemoryInfo(7 * GIB, 32 * GIB),
                group_memory=MemoryInfo(7 * GIB, 32 * GIB),
            ),
            {}, OutOfMemory, "of 32.00 GiB, the limit of the control group", "container's limit",
        ),
        (
            a_machine(memory=MemoryInfo(GIB, 64 * GIB)), {}, OutOfMemory,
            "of RAM beside its weights", "--max-context",
        ),
        (
            a_machine(
                a_gpu(link=None), memlock=Memlock(8 * MIB, 8 * MIB, is_exempt=False)
            ),
            {}, OutOfMemory,
            "must be page-locked for cuda:0, but the memlock limit of this process is 8.0 MiB",
            "limits.conf",
        ),
        (
            a_machine(port=Port("127.0.0.1", 8080, "Address already in use", "process 7 (nginx)",
                                7, 8081)),
            {}, ConfigError,
            "cannot listen on 127.0.0.1 port 8080: Address already in use by process 7 (nginx)",
            "--port 8081, or end that process: kill 7",
        ),
        (
            a_machine(port=Port("10.0.0.9", 80, "Cannot assign requested address")), {},
            ConfigError, "cannot listen on 10.0.0.9 port 80", "another --port or --host",
        ),
        (
            a_machine(software=Software("3.12.1", missing=("uvicorn",))), {}, ConfigError,
            "the server needs uvicorn", "strata-cli[serve]",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_message_and_the_next_step(
    machine: Machine, given_: dict[str, Any], error: type[StrataError], message: str, hint: str
) -> None:
    with pytest.raises(error) as caught:
        plan(machine, **given_)
    assert message in caught.value.message
    assert hint in caught.value.hint


LOW = Memlock(8 * MIB, 8 * MIB, is_exempt=False)


@pytest.mark.parametrize(
    ("machine", "service"),
    [
        (a_machine(a_gpu(link=None), memlock=LOW), "system"),  # its unit raises the limit
        (a_machine(a_gpu(), memlock=LOW), ""),  # the driver was seen to lock without asking
        (a_machine(a_gpu(link=None), memlock=LOW._replace(hard_bytes=64 * GIB)), ""),
        (a_machine(a_gpu(link=None), memlock=LOW._replace(is_exempt=True)), ""),
        (a_machine(memlock=LOW), ""),  # the host locks nothing
    ],
)
def test_a_low_memlock_limit_matters_only_where_it_is_asked_for(
    machine: Machine, service: str
) -> None:
    plan(machine, service=service)


def test_others_on_the_gpu_are_noted_where_there_is_room_for_both() -> None:
    made = plan(a_machine(a_gpu(free_bytes=16 * GIB, holders=(HOLDER,))))
    assert made.notes == ("other processes have memory of NVIDIA Made-Up 24: python3 (812)",)


def test_a_cache_of_few_experts_is_told_how_to_grow() -> None:
    made = plan(a_machine(a_gpu(free_bytes=6 * GIB)))
    assert made.fit.num_resident < 15_360 // 20
    assert "a shorter --max-context or --prefill" in made.notes[0]


def test_a_users_service_is_told_of_lingering() -> None:
    assert "enable-linger" in plan(a_machine(), service="user").notes[0]


@given(
    free=st.integers(0, 100 * GIB),
    ram=st.integers(0, 100 * GIB),
    has_gpu=st.booleans(),
    context=st.integers(1, 400_000),
    table=st.integers(0, 40 * GIB),
)
def test_no_plan_gives_away_more_than_there_is(
    free: int, ram: int, has_gpu: bool, context: int, table: int
) -> None:
    gpus: tuple[GpuFacts, ...] = (a_gpu(total_bytes=100 * GIB, free_bytes=free),) if has_gpu else ()
    machine = a_machine(*gpus, memory=MemoryInfo(ram, 128 * GIB))
    model = MadeUpModel(context_tokens=context, table_bytes=table)
    try:
        made = plan(machine, model)
    except OutOfMemory:
        return
    for tier in made.tiers:
        assert tier.name == "disk" or tier.left_bytes >= 0
    assert 1 <= made.value("max_context") <= context
    num_experts = max(part.num_experts or 0 for tier in made.tiers for part in tier.parts)
    assert 0 <= num_experts <= model.num_experts
    assert plan(machine, model) == made


def test_a_slow_disk_is_told_as_time() -> None:
    machine = replace(a_machine(a_gpu()), disk=Disk(400 * GIB, is_rotational=True, read_gbps=0.1))
    load_s = plan(machine).load_s
    assert load_s is not None
    assert load_s > 400
