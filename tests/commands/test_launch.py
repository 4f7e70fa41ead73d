"""The command, on machines that are made up, with its last step held back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from strata_cli.commands import launch as module
from strata_cli.commands.launch import launch
from strata_cli.commands.main import LazyCommand, LazyGroup, run
from strata_cli.config import StrataConfig
from strata_cli.engine.device.base import MemoryInfo
from strata_cli.launch.machine import Machine, Port
from strata_cli.launch.systemd import Ran, Services
from strata_cli.models import DEMO_MODEL_PATH
from tests.launch.made_up import GIB, a_gpu, a_machine

GROUP = LazyGroup("strata", lazy={"launch": LazyCommand("strata_cli.commands.launch", "")})


class Stage:
    """Where a test runs the command.

    Attributes:
        machine: that is found.
        probed: what was asked of the probe.
        became: commands that the process would have become.
    """

    def __init__(self) -> None:
        self.machine: Machine = a_machine()
        self.probed: list[tuple[Path, str, int, str]] = []
        self.became: list[Sequence[str]] = []

    def probe(self, model: Path, host: str, port: int, *, device: str) -> Machine:
        self.probed.append((model, host, port, device))
        return self.machine


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    stage = Stage()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "probe_machine", stage.probe)
    monkeypatch.setattr(module, "become", stage.became.append)
    return stage


def test_one_command_plans_writes_and_starts(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.machine = a_machine(a_gpu())
    assert run(GROUP, ["launch", "embedded"]) == 0
    output, told = capsys.readouterr()
    assert "all that the model was made for" in output
    assert "VRAM  23.00 GiB available" in output
    assert f"settings are in {tmp_path / 'strata.toml'}" in told
    config = StrataConfig.load({"config": tmp_path / "strata.toml"}, {})
    assert (config.model, config.device, config.max_context) == (None, "cuda:0", 2048)
    (command,) = stage.became
    assert command[-3:] == ("serve", "--config", str(tmp_path / "strata.toml"))


def test_a_dry_run_writes_and_starts_nothing(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(GROUP, ["launch", "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {entry["name"]: entry["value"] for entry in report["settings"]}
    assert (values["model"], values["device"]) == ("embedded", "host")
    assert [tier["name"] for tier in report["tiers"]] == ["RAM", "disk"]
    assert report["file"] == str(tmp_path / "strata.toml")
    assert report["command"][-3] == "serve"
    assert list(tmp_path.iterdir()) == []
    assert stage.became == []


def test_flags_variables_and_the_users_lines_are_kept(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("# mine\nprefill = 128 # small\nmax_context = 64\nseed = 5\n", "utf-8")
    monkeypatch.setenv("STRATA_THREADS", "2")
    monkeypatch.setenv("STRATA_SEED", "6")
    assert run(GROUP, ["launch", "--config", str(file), "--max-context", "512"]) == 0
    text = file.read_text("utf-8")
    assert text.startswith("# mine\nprefill = 128 # small\nmax_context = 512\nseed = 6\n")
    assert "threads = 2 # STRATA_THREADS" in text
    assert (tmp_path / "mine.toml.bak").read_text("utf-8").startswith("# mine\nprefill = 128")
    output = capsys.readouterr().out
    assert f"in {file}" in output
    assert "--max-context" in output


def test_a_key_is_shown_and_written_nowhere(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("STRATA_API_KEY", "hush-hush")
    assert run(GROUP, ["launch"]) == 0
    assert run(GROUP, ["launch", "--dry-run", "--systemd", "user"]) == 2
    output, told = capsys.readouterr()
    assert "STRATA_API_KEY does not reach a service" in told
    assert "hush" not in output + told + (tmp_path / "strata.toml").read_text("utf-8")
    monkeypatch.delenv("STRATA_API_KEY")
    with (tmp_path / "strata.toml").open("a", encoding="utf-8") as file:
        file.write('api_key = "hush-hush" # mine\n')
    assert run(GROUP, ["launch", "--dry-run", "--systemd", "user"]) == 0
    output, told = capsys.readouterr()
    assert "hush" not in output + told


WITHOUT_EXTRAS = """
import sys

absent = ("tomlkit", "msgspec", "starlette", "uvicorn", "prometheus_client")
sys.modules.update(dict.fromkeys(absent))
from strata_cli.commands.main import run, strata
sys.exit(run(strata, ["launch", *sys.argv[1:]]))
"""


def test_without_the_servers_packages_the_doctor_says_so_and_nothing_starts(tmp_path: Path) -> None:
    def ends(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_EXTRAS, *words, "--device", "host"]
        root = Path(__file__).parents[2]
        environ = {**os.environ, "PYTHONPATH": str(root)}
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )

    done = ends("--check")
    assert done.returncode == 1
    assert "without msgspec, prometheus_client, starlette, tomlkit, uvicorn" in done.stdout
    assert "strata-cli[serve]" in done.stdout
    done = ends()
    assert done.returncode == 2
    assert done.stderr.startswith("strata: error: the server needs msgspec, prometheus_client")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "strata.toml").write_text("seed = 1\n", "utf-8")
    done = ends()
    assert done.returncode == 2
    assert "needs the package tomlkit" in done.stderr


def test_paths_given_here_mean_the_same_where_the_server_starts(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATA_TRACE", "trace.jsonl")
    assert run(GROUP, ["launch", "--expert-profile", "profile.npz"]) == 0
    config = StrataConfig.load({"config": tmp_path / "strata.toml"}, {})
    assert config.expert_profile == tmp_path / "profile.npz"
    assert config.trace == str(tmp_path / "trace.jsonl")


def test_a_model_whose_name_no_file_can_say_is_refused(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.gguf"))
    odd.symlink_to(DEMO_MODEL_PATH)
    assert run(GROUP, ["launch", str(odd)]) == 2
    assert "model cannot be written into a settings file" in capsys.readouterr().err
    assert not (tmp_path / "strata.toml").exists()


def test_the_file_remembers_its_model(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "strata.toml").write_text('model = "gone.gguf"\n', "utf-8")
    assert run(GROUP, ["launch"]) == 2
    assert run(GROUP, ["launch", "embedded", "--dry-run"]) == 0
    assert run(GROUP, ["launch", "embedded"]) == 0
    assert 'model = "embedded"' in (tmp_path / "strata.toml").read_text("utf-8")


def test_what_cannot_work_is_one_error_and_nothing_is_written(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.machine = a_machine(port=Port("127.0.0.1", 8080, "Address already in use"))
    assert run(GROUP, ["launch"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("strata: error: cannot listen on 127.0.0.1 port 8080: Address already")
    assert "\n  try: " in told
    stage.machine = a_machine(memory=MemoryInfo(1 << 20, GIB))
    assert run(GROUP, ["launch"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert stage.became == []


def test_other_machines_need_a_key(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(GROUP, ["launch", "--host", "0.0.0.0"]) == 2
    assert "0.0.0.0 lets other machines use the server" in capsys.readouterr().err
    assert stage.probed == []
    assert run(GROUP, ["launch", "--host", "0.0.0.0", "--allow-no-key"]) == 0
    assert "allow_no_key = true" in (tmp_path / "strata.toml").read_text("utf-8")


def test_no_gpu_is_looked_for_where_none_is_wanted(stage: Stage) -> None:
    assert run(GROUP, ["launch", "--dry-run", "--device", "host", "--port", "9001"]) == 0
    ((_, host, port, device),) = stage.probed
    assert (host, port, device) == ("127.0.0.1", 9001, "host")


@pytest.mark.parametrize(
    "words",
    [
        ["--json"],
        ["--systemd", "both"],
        ["--max-context", "-1"],
        ["--service-user", "me", "--systemd", "user"],
        ["--check", "--dry-run"],
    ],
)
def test_a_wrong_command_line_ends_with_2(stage: Stage, words: list[str]) -> None:
    assert run(GROUP, ["launch", *words]) == 2
    assert stage.probed == []


def test_the_doctor_reports_and_changes_nothing(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(GROUP, ["launch", "--check"]) == 0
    assert "plan       runs on host" in capsys.readouterr().out
    stage.machine = a_machine(port=Port("127.0.0.1", 8080, "Address already in use"))
    assert run(GROUP, ["launch", "--check", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    failed = [check for check in report["checks"] if check["state"] == "fail"]
    assert [check["name"] for check in failed] == ["port"]
    assert failed[0]["advice"]
    assert run(GROUP, ["launch", "gone.gguf", "--check"]) == 1
    assert "no such file" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_service_is_installed_and_started(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands: list[str] = []

    def systemctl(command: Sequence[str]) -> Ran:
        commands.append(" ".join(command))
        if "show" in command:
            return Ran(0, "ActiveState=active\nSubState=running\nStatusText=\n")
        return Ran(0, "inactive\n" if "is-active" in command else "running\n")

    def services(scope: str) -> Services:
        return Services(scope, systemctl, tmp_path / "units")

    monkeypatch.setattr(module, "Services", services)
    assert run(GROUP, ["launch", "--systemd", "user"]) == 0
    unit = (tmp_path / "units" / "strata.service").read_text("utf-8")
    assert f"serve --config {tmp_path / 'strata.toml'}\n" in unit
    assert "systemctl --user start --no-block strata.service" in commands
    assert stage.became == []
    output, told = capsys.readouterr()
    assert "systemctl --user status strata" in output
    assert "ready when the model is loaded" in told


def test_the_command_offers_no_setting_that_it_does_not_use() -> None:
    options: list[Any] = [param.name for param in launch.params]
    assert {"host", "port", "device", "max_context"} <= set(options)
    assert "top_k" not in options
