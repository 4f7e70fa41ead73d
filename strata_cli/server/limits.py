"""What one client may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a request.

    Attributes:
        max_body_bytes: of JSON.
        max_messages: turns of a chat.
        max_prompts: prompts of one completion request.
        body_timeout_s: for a body to arrive.
        request_timeout_s: from the body's arrival to the end of the answer, waiting included; 0:
            no limit.
        keep_alive_s: between signs of life to a client that waits for a stream.
    """

    max_body_bytes: int = 32 * MIB
    max_messages: int = 2048
    max_prompts: int = 2048
    body_timeout_s: float = 30.0
    request_timeout_s: float = 3600.0
    keep_alive_s: float = 10.0
