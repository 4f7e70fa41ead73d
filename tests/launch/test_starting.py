from __future__ import annotations

import os
import resource
import sys
import zipfile
from pathlib import Path

import pytest

from strata_cli.launch import starting
from strata_cli.launch.planning import LaunchPlan, LaunchWishes, plan_launch
from strata_cli.launch.starting import become, serve_command, unit_options
from tests.launch.made_up import MadeUpModel, a_gpu, a_machine

NAMES = frozenset({"model", "device", "max_context", "expert_profile_save", "trace"})


def plan_of(**given: object) -> LaunchPlan:
    wishes = LaunchWishes(given=given, origin_of={})
    return plan_launch(a_machine(a_gpu()), MadeUpModel(), wishes, NAMES)


def test_the_server_is_started_as_this_program_was(tmp_path: Path) -> None:
    settings = tmp_path / "strata.toml"
    script = tmp_path / "strata"
    script.write_text("#!/usr/bin/env python3\n", "utf-8")
    end = ("serve", "--config", str(settings))
    packages = (sys.executable, "-m", "strata_cli", *end)
    assert serve_command(settings, str(script)) == packages
    assert serve_command(settings, str(tmp_path / "gone")) == packages
    assert serve_command(settings, str(script), is_service=True) == (
        sys.executable, "-P", "-m", "strata_cli", *end,
    )  # fmt: skip
    one_file = tmp_path / "strata.pyz"
    with zipfile.ZipFile(one_file, "w") as archive:
        archive.writestr("__main__.py", "")
    assert serve_command(settings, str(one_file)) == (sys.executable, str(one_file), *end)


def test_the_server_may_lock_as_much_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    ran: list[tuple[str, tuple[str, ...]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1 << 30))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    monkeypatch.setattr(os, "execv", lambda *args: ran.append(args))
    with open(os.devnull, "rb") as file:
        os.set_inheritable(file.fileno(), True)
        become(("/bin/true", "serve"))
        assert not os.get_inheritable(file.fileno())
    assert limits == [(1 << 30, 1 << 30)]
    assert ran == [("/bin/true", ("/bin/true", "serve"))]


def test_a_service_runs_as_the_owner_of_its_folder_and_writes_where_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "owner_of", lambda folder: f"owner of {folder.name}")
    settings = tmp_path / "strata.toml"
    plan = plan_of(expert_profile_save=Path("/srv/profiles/a.npz"), trace="1")
    options = unit_options(plan, "system", settings, None, {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert options.user == f"owner of {tmp_path.name}"
    assert options.readable == (Path("/models/made-up.gguf"),)
    assert options.writable == (Path("/srv/profiles"),)
    assert options.is_gpu
    assert options.environment == (("CUDA_VISIBLE_DEVICES", "1,0"),)
    assert options.description == "Strata: Made-Up 60B, 41.00 GiB"
    assert options.command[-1] == str(settings)
    assert unit_options(plan, "system", settings, "root", {}).user == ""
    assert unit_options(plan, "system", settings, "strata", {}).user == "strata"
