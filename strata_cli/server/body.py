"""Reads a request's body: JSON of limited size, within limited time, compressed or not."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct
from starlette.requests import Request

from strata_cli.json_objects import RepeatedKeyError, check_keys
from strata_cli.parsers import show_bytes
from strata_cli.server.encodings import TooMuch, decoded
from strata_cli.server.failures import (
    INVALID,
    NO_RETRY,
    TIMEOUT,
    TOO_LARGE,
    Failure,
    RequestFailed,
    bad_request,
)
from strata_cli.server.limits import Limits
from strata_cli.server.schemas import needed_body, needed_fields

WHITESPACE = b" \t\r\n"
"""Bytes that mean nothing around a JSON value."""


async def read_json(request: Request, limits: Limits, kind: type[Struct]) -> object:
    """The JSON value of a body; of an empty one {}, where no field is needed.

    Args:
        request: whose body it is.
        limits: of size and time.
        kind: the class of the fields, which are not checked here.

    Raises:
        RequestFailed: see read_body(); 400, it is not JSON, an object of it has a key
            twice, or it is empty and a field is needed.
        ClientDisconnect: the client went away.
    """
    data = await read_body(request, limits)
    if not is_empty(data):
        return _decode(data)
    if needed_fields(kind):
        raise bad_request(empty_body(kind), code="invalid_json")
    return {}


def is_empty(data: bytes) -> bool:
    """Whether a body says nothing."""
    return not data.strip(WHITESPACE)


def empty_body(kind: type[Struct]) -> str:
    """What is said of an empty body of this kind."""
    return f"the body is empty; it must be {needed_body(kind)}"


async def read_body(request: Request, limits: Limits) -> bytes:
    """The bytes of a body that is declared as JSON, decompressed.

    Raises:
        RequestFailed: 413 too large, 408 too slow, 415 not declared as JSON or in another encoding
            than zstd, 400 not what its encoding says.
        ClientDisconnect: the client went away.
    """
    _check_type(request.headers.get("content-type"))
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            data = await _read(request, limits.max_body_bytes)
    except TimeoutError:
        raise RequestFailed(
            Failure(
                status=408,
                kind=TIMEOUT,
                message=f"the body did not arrive within {limits.body_timeout_s:g} s",
                headers={**NO_RETRY, "connection": "close"},
            )
        ) from None
    return _decompressed(data, request.headers.get("content-encoding", ""), limits.max_body_bytes)


def _check_type(content_type: str | None) -> None:
    """Pages can send other types anywhere unasked; for JSON their browser asks the server first."""
    kind = (content_type or "application/json").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise RequestFailed(
        Failure(
            status=415,
            kind=INVALID,
            message="the body must be JSON; send it with content-type: application/json",
        )
    )


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(data)


def _decompressed(data: bytes, encoding: str, max_bytes: int) -> bytes:
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return data
    if name != "zstd":
        raise RequestFailed(
            Failure(
                status=415,
                kind=INVALID,
                message=f"bodies encoded as {name[:40]!r} are not read; try: zstd, or none",
                headers={"accept-encoding": "zstd, identity"},
            )
        )
    try:
        return decoded(data, max_bytes)
    except TooMuch:
        raise _too_large(max_bytes) from None
    except ValueError as error:
        raise bad_request(f"the body is not valid zstd: {error}", code="invalid_zstd") from None


def _decode(data: bytes) -> object:
    try:
        value = msgspec.json.decode(data)
        check_keys(data)
        return value
    except RepeatedKeyError as error:
        raise bad_request(f"the key {error}; try: name it once", code="duplicate_key") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _too_large(max_bytes: int) -> RequestFailed:
    return RequestFailed(
        Failure(
            status=413,
            kind=TOO_LARGE,
            message=f"the body is larger than the {show_bytes(max_bytes)} that are read; "
            "try: a smaller request, or raise max_body_bytes",
            headers={"connection": "close"},
        )
    )
