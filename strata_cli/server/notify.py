"""What a service tells systemd about itself: sd_notify's protocol, one datagram for each message.

Source: sd_notify(3). A process that no service manager started has no socket to write to; then
every call does nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from typing import Self

from strata_cli.errors import ConfigError, quoted

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE = "WATCHDOG_USEC"
WATCHDOG_PID_VARIABLE = "WATCHDOG_PID"

BEATS = 2  # watchdog messages in the time after which the manager gives up
SEND_TIMEOUT_S = 1.0  # the manager's queue may be full


class Notifier:
    """The way to the service manager, if one listens. Never raises: the service comes first.

    Args:
        address: of the manager's socket: a path, or "@" and an abstract name; None: nobody listens.
        watchdog_s: seconds without a sign of life after which the manager restarts the service;
            None: it does not watch.

    Attributes:
        watchdog_s: as given.
    """

    def __init__(self, address: str | None = None, watchdog_s: float | None = None) -> None:
        self._address = None if address is None else _socket_address(address)
        self.watchdog_s = watchdog_s if address is not None else None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], pid: int | None = None) -> Self:
        """The notifier that a service manager's variables describe.

        Args:
            environ: the process environment.
            pid: of this process; None: os.getpid(). A watchdog may be meant for another.

        Raises:
            ConfigError: a variable is not what systemd sets.
        """
        address = environ.get(SOCKET_VARIABLE) or None
        if address is not None and address[0] not in "/@":
            raise ConfigError(
                f"{SOCKET_VARIABLE} must be a path or an abstract name, got {quoted(address)}",
                hint="systemd sets it; unset it where no service manager listens",
            )
        return cls(address, _watchdog_s(environ, os.getpid() if pid is None else pid))

    def ready(self, status: str = "") -> None:
        """The service can answer: the manager starts what waits for it, and its watchdog."""
        self._send("READY=1", *_status(status))

    def status(self, text: str) -> None:
        """One line about what the service does, for ``systemctl status``."""
        self._send(*_status(text))

    def extend_timeout(self, seconds: float) -> None:
        """Starting or stopping goes on; the manager should wait so much longer from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def stopping(self, status: str = "") -> None:
        """The service has begun to end."""
        self._send("STOPPING=1", *_status(status))

    def watchdog(self) -> None:
        """A sign of life."""
        self._send("WATCHDOG=1")

    async def beat(self) -> None:
        """Give signs of life from the event loop until cancelled; returns where nobody watches.

        An event loop that hangs stops giving them, and the manager restarts the service.
        """
        while self.watchdog_s is not None:
            self.watchdog()
            await asyncio.sleep(self.watchdog_s / BEATS)

    def _send(self, *lines: str) -> None:
        if self._address is None or not lines:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(SEND_TIMEOUT_S)
                channel.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("the service manager does not hear %s: %s", lines[0], error)


def _socket_address(address: str) -> str:
    return "\0" + address[1:] if address.startswith("@") else address


def _watchdog_s(environ: Mapping[str, str], pid: int) -> float | None:
    wanted, meant_for = environ.get(WATCHDOG_VARIABLE), environ.get(WATCHDOG_PID_VARIABLE)
    if not wanted or (meant_for and meant_for != str(pid)):
        return None
    if not (wanted.isascii() and wanted.isdecimal()) or int(wanted) == 0:
        raise ConfigError(
            f"{WATCHDOG_VARIABLE} must be a whole number of microseconds, got {quoted(wanted)}",
            hint="systemd sets it from WatchdogSec=; unset it where no service manager watches",
        )
    return int(wanted) / 1e6


def _status(text: str) -> tuple[str, ...]:
    """A line break would begin another message."""
    return (f"STATUS={' '.join(text.split())}",) if text else ()
