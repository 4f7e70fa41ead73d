"""Who may use the server: where it listens, the key, and the Host and Origin of requests.

Without a key, whoever reaches the port may use the server. A browser on this machine reaches it on
behalf of any page it shows, so the names by which the server is addressed (Host) and the pages that
ask (Origin) are checked: a page can neither send here itself nor have its own name point here.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from strata_cli.errors import ConfigError, quoted
from strata_cli.server.failures import AUTHENTICATION, PERMISSION, Failure

PUBLIC_PATHS = frozenset({"/health", "/api/health", "/openapi.json"})
"""Answered without a key: they say whether the server lives, and nothing of what it does."""

EXTENSION_SCHEMES = ("chrome-extension", "moz-extension", "app")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_CONTAINER_HOST = "host.docker.internal"
_HOST = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRules:
    """Who may ask what.

    Attributes:
        listen: the address that the server binds.
        api_key: asked of everybody; None: nobody needs one.
        allowed_hosts: further names of this server: exact, ``.suffix`` or ``*``.
        trusted_origins: pages that may ask, as ``https://name:port``.
        cors_origins: pages that may ask and read the answers of /v1; ``*`` is all.
    """

    listen: str
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    trusted_origins: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()


def check_bind(listen: str, *, has_key: bool, allow_no_key: bool) -> None:
    """Refuse to listen to other machines without a key, unless that was asked for.

    Raises:
        ConfigError: names the ways out.
    """
    if is_loopback(listen) or has_key or allow_no_key:
        return
    raise ConfigError(
        f"host {listen} lets other machines use the server, and there is no key",
        hint="set STRATA_API_KEY, listen on 127.0.0.1, or say --allow-no-key",
    )


def refusal(
    rules: AccessRules, method: str, path: str, headers: Mapping[str, str]
) -> Failure | None:
    """Why a request is not let in; None when it is.

    Args:
        rules: who may ask.
        method: of the request.
        path: without query.
        headers: names in lower case.
    """
    if rules.api_key is not None:
        return None if path in PUBLIC_PATHS else _key_refusal(rules.api_key, headers)
    host, origin = headers.get("host"), headers.get("origin")
    if host and not is_host_allowed(rules, host):
        return _forbidden(
            f"host {quoted(host)} is not a name of this server", "allowed_hosts", host_name(host)
        )
    if origin and method not in SAFE_METHODS and not is_origin_allowed(rules, origin, host):
        return _forbidden(
            f"pages of origin {quoted(origin)} may not use this server", "trusted_origins", origin
        )
    return None


def is_host_allowed(rules: AccessRules, host: str) -> bool:
    """Whether a Host header names this server."""
    name = host_name(host)
    if name is None:
        return False
    if _is_local_name(name) or _address(name) is not None or name == rules.listen.lower():
        return True
    if not is_loopback(rules.listen) and name in _machine_names():
        return True
    hosts_of_origins = {urlsplit(origin).hostname for origin in rules.trusted_origins}
    return name in hosts_of_origins or any(
        _matches(name, pattern.lower()) for pattern in rules.allowed_hosts
    )


def is_origin_allowed(rules: AccessRules, origin: str, host: str | None) -> bool:
    """Whether a page may have requests sent here.

    A page of another address is no page of ours, though the server itself may be addressed so.
    """
    if origin in rules.trusted_origins or is_cors_origin(rules, origin):
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname
    except ValueError:
        return False
    if parts.scheme in EXTENSION_SCHEMES:
        return True
    if parts.scheme not in ("http", "https") or name is None:
        return False
    if host is not None and parts.netloc.lower() == host.lower():
        return True
    address = _address(name)
    if address is not None:
        return address.is_loopback
    return _is_local_name(name) or any(
        _matches(name, pattern.lower()) for pattern in rules.allowed_hosts
    )


def is_cors_origin(rules: AccessRules, origin: str) -> bool:
    """Whether a page may read what /v1 answers."""
    return origin in rules.cors_origins or "*" in rules.cors_origins


def host_name(host: str) -> str | None:
    """The name in a Host header: without port and brackets, in lower case; None if it is none."""
    match = _HOST.fullmatch(host.strip())
    if match is None:
        return None
    return match["name"].strip("[]").lower().removesuffix(".")


def is_loopback(listen: str) -> bool:
    """Whether only this machine reaches an address that is listened to."""
    address = _address(listen)
    return address.is_loopback if address is not None else _is_local_name(listen.lower())


def has_key(expected: str, headers: Mapping[str, str]) -> bool:
    """Whether a request carries the key; takes equally long for every wrong one."""
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    matches = [hmac.compare_digest(_digest(key), _digest(expected)) for key in given]
    return any(matches)


def _digest(text: str) -> bytes:
    """Of equal length whatever the text, so that a comparison tells no length."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _key_refusal(expected: str, headers: Mapping[str, str]) -> Failure | None:
    if has_key(expected, headers):
        return None
    is_given = "authorization" in headers or "x-api-key" in headers
    return Failure(
        status=401,
        kind=AUTHENTICATION,
        message=(
            "the key is wrong"
            if is_given
            else "a key is needed; send Authorization: Bearer KEY or x-api-key: KEY"
        ),
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def _forbidden(problem: str, setting: str, value: str | None) -> Failure:
    return Failure(
        status=403,
        kind=PERMISSION,
        message=f"{problem}; if it should be, add {value or 'it'} to {setting}",
        code=f"not_in_{setting}",
    )


def _is_local_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _machine_names() -> frozenset[str]:
    name = socket.gethostname().lower()
    return frozenset({name, f"{name}.local", _CONTAINER_HOST})


def _matches(name: str, pattern: str) -> bool:
    if pattern == "*":
        return True
    return name.endswith(pattern) if pattern.startswith(".") else name == pattern
