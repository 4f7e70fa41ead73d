"""Whether the server could listen where it is to, and who does so already."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from strata_cli.launch.machine import Port

PROC = Path("/proc")
LISTENING = "0A"  # of the states in /proc/net/tcp
MOST_TRIES = 100  # ports behind the wanted one


def probe_port(host: str, port: int, proc: Path = PROC) -> Port:
    """Try to listen at an address; gives it free again at once.

    Args:
        host: name or number.
        port: 0 is any, which is always free.
        proc: where the kernel lists sockets and processes.
    """
    problem = _try_to_listen(host, port)
    if not problem:
        return Port(host, port)
    pid, name = _holder(port, proc)
    holder = f"process {pid} ({name})" if pid else ""
    ports = range(port + 1, min(port + 1 + MOST_TRIES, 1 << 16))
    free_port = next((other for other in ports if not _try_to_listen(host, other)), 0)
    return Port(host, port, problem, holder, pid, free_port)


def _try_to_listen(host: str, port: int) -> str:
    """Why nobody can listen there; empty when one can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        return f"{host}: {getattr(error, 'strerror', None) or error}"
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _holder(port: int, proc: Path) -> tuple[int, str]:
    """Pid and name of the process that listens on a port, if it may be known."""
    inodes = set(_listening(port, proc))
    if not inodes:
        return 0, ""
    for folder in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        if inodes & set(_sockets(folder)):
            return int(folder.name), _name(folder)
    return 0, ""


def _listening(port: int, proc: Path) -> Iterator[str]:
    """Inodes of the sockets that listen on a port, of either version of the protocol."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def _sockets(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # not ours to look at, or gone
        for entry in (folder / "fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]


def _name(folder: Path) -> str:
    try:
        return (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "ended"
