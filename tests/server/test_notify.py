from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_cli.errors import ConfigError
from strata_cli.server.notify import Notifier

PID = 4711


class Manager:
    """A service manager's end of the socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(10)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)

    def hears(self) -> list[str]:
        return self._socket.recv(4096).decode().split("\n")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    name = f"@strata-test-{os.getpid()}"
    manager = Manager(str(tmp_path / "notify") if request.param == "path" else name)
    yield manager
    manager.close()


def test_the_manager_hears_what_the_service_does(manager: Manager) -> None:
    notifier = Notifier.from_environment({"NOTIFY_SOCKET": manager.address})
    notifier.status("loading: 3 of 17 GB")
    notifier.extend_timeout(1.5)
    notifier.ready("answering on 127.0.0.1:8080")
    notifier.watchdog()
    notifier.stopping()
    assert manager.hears() == ["STATUS=loading: 3 of 17 GB"]
    assert manager.hears() == ["EXTEND_TIMEOUT_USEC=1500000"]
    assert manager.hears() == ["READY=1", "STATUS=answering on 127.0.0.1:8080"]
    assert manager.hears() == ["WATCHDOG=1"]
    assert manager.hears() == ["STOPPING=1"]


def test_a_status_cannot_smuggle_in_another_message(manager: Manager) -> None:
    Notifier(manager.address).status("model\nREADY=1\r\n  é")
    assert manager.hears() == ["STATUS=model READY=1 é"]


def test_signs_of_life_come_until_they_are_cancelled(manager: Manager) -> None:
    async def two_beats() -> None:
        beat = asyncio.create_task(Notifier(manager.address, watchdog_s=0.002).beat())
        for _ in range(2):
            assert await asyncio.to_thread(manager.hears) == ["WATCHDOG=1"]
        assert not beat.done()
        beat.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beat

    asyncio.run(two_beats())


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": ""}, {"WATCHDOG_USEC": "1000"}])
def test_without_a_manager_nothing_happens(environ: dict[str, str]) -> None:
    notifier = Notifier.from_environment(environ)
    notifier.ready("all is well")
    asyncio.run(notifier.beat())


def test_a_manager_that_is_gone_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Notifier(str(tmp_path / "nobody")).ready("all is well")
    assert [record.message for record in caplog.records] == [
        "the service manager does not hear READY=1: [Errno 2] No such file or directory"
    ]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(PID)}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_PID": str(PID)}, None),
    ],
)
def test_a_watchdog_is_for_the_process_that_it_names(
    variables: dict[str, str], expected: float | None
) -> None:
    environ = {"NOTIFY_SOCKET": "/run/systemd/notify", **variables}
    assert Notifier.from_environment(environ, PID).watchdog_s == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"NOTIFY_SOCKET": "notify"}, "NOTIFY_SOCKET must be a path or an abstract name"),
        ({"WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC must be a whole number of microseconds"),
        ({"WATCHDOG_USEC": "0"}, "WATCHDOG_USEC must be a whole number of microseconds"),
        ({"WATCHDOG_USEC": "٣"}, "WATCHDOG_USEC must be a whole number of microseconds"),
    ],
)
def test_variables_that_systemd_would_not_set_are_refused(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Notifier.from_environment(variables, PID)
