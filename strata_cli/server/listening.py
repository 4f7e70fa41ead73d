"""The sockets that the server listens on, opened before anything slow is begun."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from strata_cli.errors import ConfigError, StrataError

BACKLOG = 2048
NEXT_PORTS = 20  # tried for a suggestion


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of a host.

    Args:
        host: a name or an address.
        port: 0: any free one, the same for all addresses.

    Raises:
        ConfigError: the host is none of this machine's.
        StrataError: the port is taken, or not ours to take.
    """
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host, port):
            if sockets and port == 0:
                address = (address[0], sockets[0].getsockname()[1], *address[2:])
            sockets.append(_open(family, address))
    except OSError as error:
        for opened in sockets:
            opened.close()
        raise _explained(error, host, port) from error
    return sockets


def url(host: str, sockets: Sequence[socket.socket]) -> str:
    """Where a client finds the server."""
    port = sockets[0].getsockname()[1]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    name = f"[{reachable}]" if ":" in reachable else reachable
    return f"http://{name}:{port}"


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no name of a host"
        raise ConfigError(
            f"cannot listen on {host}: {reason}", hint="--host 127.0.0.1 is this machine alone"
        ) from None
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _open(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    # asyncio switches off the delay of small packets only where the protocol is named: 40 ms a
    # request on a kept connection.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except BaseException:
        opened.close()
        raise
    return opened


def _explained(error: OSError, host: str, port: int) -> StrataError:
    if error.errno == errno.EADDRINUSE:
        free = _free_port(host, port)
        other = f" or take another one: --port {free}" if free else ""
        return StrataError(
            f"port {port} of {host} is taken by another program",
            hint=f"end that program{other}",
        )
    if error.errno == errno.EACCES:
        return StrataError(
            f"port {port} of {host} is reserved for the system", hint="--port 8080, or above 1023"
        )
    return ConfigError(
        f"cannot listen on port {port} of {host}: {error.strerror}",
        hint="--host 127.0.0.1 is this machine alone",
    )


def _free_port(host: str, taken: int) -> int | None:
    for port in range(taken + 1, min(taken + NEXT_PORTS, 65_535) + 1):
        try:
            family, address = _addresses(host, port)[0]
            _open(family, address).close()
        except (OSError, StrataError):
            continue
        return port
    return None
