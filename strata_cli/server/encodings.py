"""Zstandard, as clients may compress what they send: bounded in memory and in what comes out."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LARGEST_WINDOW = 25
"""Binary logarithm of the bytes that a frame may look back on, which the decoder must hold."""


class TooMuch(ValueError):  # noqa: N818 - says what was found
    """What comes out is larger than allowed."""


def decoded(data: bytes, max_bytes: int) -> bytes:
    """What was compressed, in one frame or several.

    Args:
        data: whole frames.
        max_bytes: of what comes out; no more is ever made.

    Raises:
        TooMuch: it is larger.
        ValueError: these are no whole frames, or they need too much memory.
    """
    parts, left = [], max_bytes
    while data:
        decoder = zstd.ZstdDecompressor(
            options={zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW}
        )
        try:
            part = decoder.decompress(data, max_length=left + 1)
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None
        if len(part) > left:
            raise TooMuch
        if not decoder.eof:
            raise ValueError("it ends too soon")
        parts.append(part)
        left -= len(part)
        data = decoder.unused_data
    return b"".join(parts)
