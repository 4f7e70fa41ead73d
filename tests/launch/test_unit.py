from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_cli.errors import ConfigError
from strata_cli.launch.unit import UnitOptions, exec_word, unit_text

TRUE = shutil.which("true") or "/bin/true"
COMMAND = (TRUE, "-m", "strata_cli", "serve", "--config", "/srv/my models/strata.toml")


def options(scope: str, user: str = "daemon") -> UnitOptions:
    return UnitOptions(
        command=COMMAND,
        scope=scope,
        description="Strata: Made-Up 60B at 50 %",
        user=user,
        is_gpu=True,
        environment=(
            ("CUDA_VISIBLE_DEVICES", "1,0"),
            ("STRANGE", "5 $ % \\"),
        ),
        writable=(Path("/srv/my models"),),
    )


@pytest.mark.parametrize("scope", ["user", "system"])
def test_a_unit_is_ready_when_the_server_says_so_and_ends_in_ten_seconds(scope: str) -> None:
    lines = unit_text(options(scope)).splitlines()
    for line in (
        "Type=notify",
        "NotifyAccess=main",
        "WatchdogSec=60",
        "TimeoutStopSec=10",
        "LimitMEMLOCK=infinity",
        "Restart=on-failure",
        "RestartPreventExitStatus=2",
        "StandardOutput=journal",
    ):
        assert lines.count(line) == 1
    assert f'ExecStart={TRUE} -m strata_cli serve --config "/srv/my models/strata.toml"' in lines
    assert "Description=Strata: Made-Up 60B at 50 %%" in lines
    assert "Environment=CUDA_VISIBLE_DEVICES=1,0" in lines
    assert 'Environment="STRANGE=5 $ %% \\\\"' in lines


def test_a_system_service_is_locked_up_but_sees_its_gpu() -> None:
    lines = unit_text(options("system")).splitlines()
    assert "User=daemon" in lines
    assert "NoNewPrivileges=yes" in lines
    assert "ProtectSystem=strict" in lines
    assert 'ReadWritePaths=-"/srv/my models"' in lines
    assert "ExecStartPre=+-/usr/bin/nvidia-modprobe -c 0 -u" in lines
    assert "WantedBy=multi-user.target" in lines
    names = {line.partition("=")[0] for line in lines}
    assert not names & {"PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock"}
    assert not names & {"MemoryDenyWriteExecute", "ProcSubset", "SystemCallFilter"}


def test_no_private_folder_hides_a_model_among_temporary_files() -> None:
    usual = options("system")
    assert "PrivateTmp=yes" in unit_text(usual).splitlines()
    for changed in (
        replace(usual, readable=(Path("/tmp/model.gguf"),)),
        replace(usual, command=(TRUE, "--config", "/var/tmp/strata.toml")),
    ):
        assert "PrivateTmp" not in unit_text(changed)


def test_a_service_of_root_keeps_what_root_may() -> None:
    lines = unit_text(options("system", user="")).splitlines()
    assert not [line for line in lines if line.startswith(("User=", "CapabilityBoundingSet="))]


def test_a_users_service_asks_for_nothing_that_its_manager_may_not_do() -> None:
    lines = unit_text(options("user")).splitlines()
    refused = ("User=", "Protect", "Private", "RestrictS", "ExecStartPre=", "Cap", "NoNew")
    assert not [line for line in lines if line.startswith(refused)]
    assert "WantedBy=default.target" in lines


def test_an_argument_that_no_unit_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="line break"):
        exec_word("/srv/a\nExecStartPre=/bin/evil")


def test_nothing_in_an_argument_is_expanded() -> None:
    assert exec_word("/srv/$HOME/100%") == '"/srv/$$HOME/100%%"'
    assert exec_word("") == '""'


def unescaped(word: str) -> str:
    """What systemd makes of one word, by its own description."""
    if word.startswith('"'):
        word = word[1:-1]
        out, rest = "", word
        while rest:
            if rest[0] == "\\":
                out, rest = out + rest[1], rest[2:]
            else:
                out, rest = out + rest[0], rest[1:]
        word = out
    return word.replace("%%", "%").replace("$$", "$")


@given(word=st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"])))
def test_every_argument_arrives_as_it_was(word: str) -> None:
    assert unescaped(exec_word(word)) == word


VERIFY = shutil.which("systemd-analyze")


@pytest.mark.skipif(VERIFY is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("scope", ["user", "system"])
def test_systemd_has_nothing_to_say_against_it(scope: str, tmp_path: Path) -> None:
    unit = tmp_path / "strata-test.service"
    unit.write_text(unit_text(options(scope)), "utf-8")
    done = subprocess.run(
        [str(VERIFY), "verify", f"--{scope}", "--man=no", str(unit)],
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if "strata-test" in line]
    assert (done.returncode, told) == (0, [])
