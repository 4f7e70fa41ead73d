"""Errors as HTTP answers: which status each has, and the body that OpenAI's clients expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from strata_cli.errors import ConfigError, InputError, OutOfMemory, StrataError
from strata_cli.server.engine_errors import EngineGone

INVALID, NOT_FOUND, TOO_LARGE = "invalid_request_error", "not_found_error", "request_too_large"
AUTHENTICATION, PERMISSION = "authentication_error", "permission_error"
SERVER, OVERLOADED, TIMEOUT = "server_error", "overloaded_error", "timeout_error"

NO_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One error answer.

    Attributes:
        status: HTTP's.
        kind: the body's "type".
        message: what failed, with the numbers, and what to try.
        param: the field of the request that is wrong, or None.
        code: a word for programs, or None.
        headers: sent with it.
        detail: what System One's body has besides; None: nothing.
    """

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    detail: Any = None

    def body(self) -> bytes:
        """The JSON body."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        more = {} if self.detail is None else {"detail": self.detail}
        return orjson.dumps({"error": error, **more})


SYSTEM_ONE_PATH = "/v1/systemone"
CONTEXT_EXCEEDED = "context_length_exceeded"


def for_system_one(failure: Failure) -> Failure:
    """The same for System One's clients, who want 422 and the place of what is wrong in a body."""
    if failure.code == CONTEXT_EXCEEDED:
        detail: Any = {"error_type": "tokens_exceeded", "message": failure.message}
        return replace(failure, status=413, detail=detail)
    if failure.status == 400:
        detail = [{"loc": ["body"], "msg": failure.message, "type": failure.code or "value_error"}]
        return replace(failure, status=422, detail=detail)
    detail = failure.detail or {"error_type": failure.kind, "message": failure.message}
    return replace(failure, detail=detail)


class RequestFailed(Exception):  # noqa: N818 - says what happened; Failure says how it is told
    """Ends a request with an error answer.

    Attributes:
        failure: the answer.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def bad_request(
    message: str, param: str | None = None, *, code: str | None = None
) -> RequestFailed:
    """A request that cannot be served as it is; to be raised."""
    return RequestFailed(Failure(status=400, kind=INVALID, message=message, param=param, code=code))


def failure_of(error: StrataError) -> Failure:
    """What the server says about an error of ours.

    Wrong input is the client's business. What may go better in a moment is 503; whatever else a run
    fails for is 500.
    """
    message = f"{error.message}; try: {error.hint}" if error.hint else error.message
    if isinstance(error, InputError | ConfigError):
        return Failure(status=400, kind=INVALID, message=message)
    if isinstance(error, EngineGone | OutOfMemory):
        return Failure(status=503, kind=SERVER, message=message, headers={"retry-after": "1"})
    return Failure(status=500, kind=SERVER, message=message)


INTERNAL = Failure(
    status=500, kind=SERVER, message="internal error; the server's log says more", code="internal"
)
