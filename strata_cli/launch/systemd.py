"""Installs and starts the service through systemctl."""

from __future__ import annotations

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from strata_cli.errors import ConfigError, StrataError, path_text

UNIT_NAME = "strata.service"
SYSTEM_FOLDER = Path("/etc/systemd/system")
LOG_LINES = 12
POLL_S = 0.25  # between two looks at a service that starts


class Ran(NamedTuple):
    """How a command ended.

    Attributes:
        code: of its end.
        output: stdout and stderr.
    """

    code: int
    output: str


Run = Callable[[Sequence[str]], Ran]


class ServiceError(StrataError):
    """systemd did not start the service; the message has what it, or the service, said."""


def run_command(command: Sequence[str]) -> Ran:
    """Run a command to its end.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ConfigError(
            f"cannot run {command[0]}: {error.strerror}",
            hint="leave out --systemd to run the server in the foreground",
        ) from error
    return Ran(done.returncode, done.stdout)


class Services:
    """A service manager: the system's or the user's own.

    Args:
        scope: "system" or "user".
        run: runs a command.
        folder: for units; None: where the manager looks for them.
        wait: waits so many seconds.
    """

    def __init__(
        self,
        scope: str,
        run: Run = run_command,
        folder: Path | None = None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scope = scope
        self._run = run
        self._wait = wait
        self._folder = folder or (SYSTEM_FOLDER if scope == "system" else _user_folder())

    @property
    def path(self) -> Path:
        """Of the unit file."""
        return self._folder / UNIT_NAME

    def check(self) -> None:
        """Refuse where a unit could not be installed, or its service runs already.

        Raises:
            ConfigError: systemd does not run here, this user may not, or the service runs.
        """
        if self.scope == "system" and os.geteuid() != 0:
            raise ConfigError(
                "only root may install a system service",
                hint="sudo strata launch ... --systemd system, or --systemd user",
            )
        state = self._systemctl("is-system-running").output.strip().splitlines()
        if not state or state[-1] == "offline" or "not been booted" in state[-1]:
            raise ConfigError(
                "systemd does not run this machine, so it cannot run a service"
                f"{f': {state[-1]}' if state else ''}",
                hint="leave out --systemd to run the server in the foreground",
            )
        if "Failed to connect" in state[-1]:
            raise ConfigError(
                f"the {self.scope}'s service manager cannot be reached: {state[-1]}",
                hint="log in as that user, or loginctl enable-linger and log in again",
            )
        if self._systemctl("is-active", UNIT_NAME).output.strip() in ("active", "activating"):
            raise ConfigError(
                f"{UNIT_NAME} runs already",
                hint=f"end it first: {self._said('stop')}",
            )

    def install(self, text: str) -> None:
        """Write the unit, and let the manager read and enable it. Does not start it.

        Raises:
            ConfigError: the file cannot be written.
            ServiceError: the manager refuses it.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            beside = self.path.with_name(f".{UNIT_NAME}.new")
            beside.write_text(text, "utf-8")
            beside.chmod(0o644)
            os.replace(beside, self.path)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path_text(self.path)}: {error.strerror}",
                hint="--systemd user installs a service for this user alone",
            ) from error
        self._must("daemon-reload")
        self._must("enable", UNIT_NAME)

    def start(self, say: Callable[[str], None]) -> None:
        """Start the service; blocks until it is ready, however long the model takes to load.

        Args:
            say: told what the service says of itself, whenever that changes.

        Raises:
            ServiceError: it ended before it was ready; has the last lines of its log. It is not
                started again then.
        """
        self._systemctl(
            "reset-failed", UNIT_NAME
        )  # or the last failure would be taken for this one
        done = self._systemctl("start", "--no-block", UNIT_NAME)
        last = ""
        while not done.code:
            state = self._state()
            if state["ActiveState"] == "active":
                return
            if state["ActiveState"] == "failed" or state["SubState"] == "auto-restart":
                break
            if state["StatusText"] not in ("", last):
                last = state["StatusText"]
                say(last)
            self._wait(POLL_S)
        self._systemctl("stop", UNIT_NAME)
        log = self._run(
            ["journalctl", *self._scope(), "-u", UNIT_NAME, "-n", str(LOG_LINES), "--no-pager"]
        )
        told = "\n".join(filter(None, (done.output.strip(), log.output.strip())))
        raise ServiceError(
            f"{UNIT_NAME} did not start{f': {told}' if told else ''}",
            hint=f"mend that, then {self._said('start')}",
        )

    def advice(self) -> tuple[str, ...]:
        """How to look after the service."""
        log = " ".join(("journalctl", *self._scope(), "-u", "strata", "-f"))
        return (self._said("status"), log, self._said("stop"), self._said("disable"))

    def _state(self) -> dict[str, str]:
        names = ("ActiveState", "SubState", "StatusText")
        answer = self._systemctl("show", "-p", ",".join(names), UNIT_NAME).output
        pairs = dict(line.partition("=")[::2] for line in answer.splitlines())
        return {name: pairs.get(name, "") for name in names}

    def _must(self, *words: str) -> None:
        done = self._systemctl(*words)
        if done.code:
            raise ServiceError(
                f"systemctl {' '.join(words)} failed: {done.output.strip()}",
                hint=f"systemd-analyze verify {self.path}",
            )

    def _systemctl(self, *words: str) -> Ran:
        return self._run(["systemctl", *self._scope(), *words])

    def _scope(self) -> tuple[str, ...]:
        return ("--user",) if self.scope == "user" else ()

    def _said(self, verb: str) -> str:
        return " ".join(("systemctl", *self._scope(), verb, "strata"))


def owner_of(folder: Path) -> str:
    """Name of the user that a folder belongs to; empty for root."""
    uid = folder.stat().st_uid
    try:
        return "" if uid == 0 else pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _user_folder() -> Path:
    return Path.home() / ".config" / "systemd" / "user"
