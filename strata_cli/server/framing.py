"""The bytes of messages: a length of four bytes, the most significant first, and MessagePack."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from strata_cli.errors import StrataError
from strata_cli.server.protocol import FromWorker, Message, ProtocolError, ToWorker

LENGTH_BYTES = 4
LARGEST_BYTES = 64 << 20

M = TypeVar("M")


def encode(message: Message) -> bytes:
    """A message's bytes, length included.

    Raises:
        ProtocolError: it is too long.
    """
    body = _ENCODER.encode(message)
    if len(body) > LARGEST_BYTES:
        raise _too_long(len(body))
    return len(body).to_bytes(LENGTH_BYTES) + body


def body_length(prefix: bytes) -> int:
    """How many bytes follow the LENGTH_BYTES of a message's length.

    Raises:
        ProtocolError: too many.
    """
    length = int.from_bytes(prefix)
    if length > LARGEST_BYTES:
        raise _too_long(length)
    return length


class Decoder(Generic[M]):
    """Makes messages of one direction from the bytes behind their lengths."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind, dec_hook=_read)

    def decode(self, body: bytes) -> M:
        """The message.

        Raises:
            ProtocolError: it is unknown, or no such message has these fields.
        """
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, StrataError) as error:
            raise ProtocolError(
                f"{len(body)} bytes are no message of this protocol: {error}",
                hint="server and worker must be of one version of strata",
            ) from None


def worker_decoder() -> Decoder[ToWorker]:
    """What the worker receives."""
    return Decoder(ToWorker)


def server_decoder() -> Decoder[FromWorker]:
    """What the server receives."""
    return Decoder(FromWorker)


def _too_long(length: int) -> ProtocolError:
    return ProtocolError(
        f"a message of {length} bytes is longer than the {LARGEST_BYTES} allowed",
        hint="ask for less at once, such as fewer log-probabilities",
    )


def _write(value: object) -> bytes:
    """Paths need not be text: they travel as their bytes."""
    if isinstance(value, Path):
        return os.fsencode(value)
    raise NotImplementedError(f"a message cannot hold {type(value).__name__}")


def _read(kind: Callable[..., object], value: object) -> object:
    if kind is Path and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise NotImplementedError(f"no message holds {kind!r}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_write)
