"""Installing a service, against a systemctl that a test speaks for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata_cli.errors import ConfigError
from strata_cli.launch.systemd import POLL_S, Ran, ServiceError, Services, owner_of, run_command

READY = "ActiveState=active\nSubState=running\nStatusText=answering\n"


def loading(text: str) -> str:
    return f"ActiveState=activating\nSubState=start\nStatusText={text}\n"


class Systemctl:
    """Answers by the first verb, and remembers the commands; a service's states come in turn."""

    def __init__(self, *states: str, **answers: tuple[int, str]) -> None:
        self.states = list(states or (READY,))
        self.answers = {"is-system-running": (0, "running\n"), "is-active": (3, "inactive\n")}
        self.answers |= {verb.replace("_", "-"): answer for verb, answer in answers.items()}
        self.commands: list[str] = []
        self.waited: list[float] = []

    def __call__(self, command: Sequence[str]) -> Ran:
        self.commands.append(" ".join(command))
        verb = next((word for word in command[1:] if not word.startswith("-")), command[0])
        if verb == "show":
            return Ran(0, self.states.pop(0))
        return Ran(*self.answers.get(command[0] if command[0] == "journalctl" else verb, (0, "")))


def test_a_users_service_is_written_enabled_and_started(tmp_path: Path) -> None:
    run = Systemctl()
    services = Services("user", run, tmp_path / "systemd" / "user")
    services.check()
    services.install("[Unit]\n")
    services.start(pytest.fail)
    unit = tmp_path / "systemd" / "user" / "strata.service"
    assert unit.read_text("utf-8") == "[Unit]\n"
    assert os.listdir(unit.parent) == ["strata.service"]
    assert run.commands == [
        "systemctl --user is-system-running",
        "systemctl --user is-active strata.service",
        "systemctl --user daemon-reload",
        "systemctl --user enable strata.service",
        "systemctl --user reset-failed strata.service",
        "systemctl --user start --no-block strata.service",
        "systemctl --user show -p ActiveState,SubState,StatusText strata.service",
    ]
    assert services.advice()[1] == "journalctl --user -u strata -f"


@pytest.mark.parametrize(
    ("answers", "message", "hint"),
    [
        ({"is_system_running": (1, "offline\n")}, "systemd does not run this", "leave out"),
        (
            {"is_system_running": (1, "Failed to connect to bus: No medium found\n")},
            "the user's service manager cannot be reached: Failed to connect",
            "enable-linger",
        ),
        ({"is_system_running": (1, "")}, "systemd does not run this", "foreground"),
        (
            {"is_active": (0, "active\n")},
            "strata.service runs already",
            "systemctl --user stop strata",
        ),
    ],
)
def test_what_keeps_a_service_from_being_installed_is_said_first(
    answers: dict[str, tuple[int, str]], message: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Services("user", Systemctl(**answers), tmp_path).check()
    assert hint in caught.value.hint


def test_only_root_installs_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root") as caught:
        Services("system", Systemctl(), tmp_path).check()
    assert "sudo" in caught.value.hint


def test_a_start_is_narrated_until_the_service_is_ready(tmp_path: Path) -> None:
    run = Systemctl(loading(""), loading("3 of 17 GB"), loading("3 of 17 GB"), loading("17"), READY)
    said: list[str] = []
    Services("user", run, tmp_path, run.waited.append).start(said.append)
    assert said == ["3 of 17 GB", "17"]
    assert run.waited == [POLL_S] * 4


FAILED = "ActiveState=failed\nSubState=failed\nStatusText=\n"
AGAIN = "ActiveState=activating\nSubState=auto-restart\nStatusText=\n"


@pytest.mark.parametrize("end", [FAILED, AGAIN])
def test_a_start_that_fails_shows_what_the_service_said(tmp_path: Path, end: str) -> None:
    run = Systemctl(loading(""), end, journalctl=(0, "strata: error: no such file: x\n"))
    with pytest.raises(ServiceError, match=r"did not start: .*no such file: x") as caught:
        Services("system", run, tmp_path, run.waited.append).start(pytest.fail)
    assert caught.value.hint == "mend that, then systemctl start strata"
    assert run.commands[-2:] == [
        "systemctl stop strata.service",
        "journalctl -u strata.service -n 12 --no-pager",
    ]


def test_a_start_that_the_manager_refuses_is_heard(tmp_path: Path) -> None:
    run = Systemctl(start=(5, "Unit strata.service not found.\n"), journalctl=(1, ""))
    with pytest.raises(ServiceError, match=r"did not start: Unit strata\.service not found"):
        Services("system", run, tmp_path).start(pytest.fail)


def test_a_manager_that_refuses_the_unit_is_heard(tmp_path: Path) -> None:
    run = Systemctl(daemon_reload=(1, "Access denied\n"))
    with pytest.raises(ServiceError, match="daemon-reload failed: Access denied"):
        Services("system", run, tmp_path).install("")


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        Services("system", Systemctl(), tmp_path / "file").install("")


def test_a_machine_without_systemctl_is_told_of_the_foreground() -> None:
    with pytest.raises(ConfigError, match="cannot run /no/systemctl"):
        run_command(["/no/systemctl"])
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 3"]) == Ran(3, "out\nerr\n")


def test_a_folder_has_an_owner(tmp_path: Path) -> None:
    name = owner_of(tmp_path)
    assert (name == "") == (os.geteuid() == 0)
