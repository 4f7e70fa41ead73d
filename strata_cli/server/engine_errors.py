"""Errors of the engine's worker: how they cross to the server, and what the server raises."""

from __future__ import annotations

from strata_cli.errors import (
    ConfigError,
    DeviceError,
    InputError,
    ModelError,
    OutOfMemory,
    StrataError,
)
from strata_cli.server.protocol import FailureKind

# The narrowest first: the first that fits names the kind.
_KINDS: tuple[tuple[type[StrataError], FailureKind], ...] = (
    (ConfigError, "setting"),
    (InputError, "input"),
    (ModelError, "model"),
    (OutOfMemory, "out_of_memory"),
    (DeviceError, "device"),
)


class EngineFailed(StrataError):  # noqa: N818 - says what happened, as its siblings do
    """A request failed in the engine, which goes on."""


class EngineGone(StrataError):  # noqa: N818 - see above
    """The engine ended, or was ended, before a request was done; the next request restarts it."""


def out_of_host_memory(when: str) -> OutOfMemory:
    """What Python's MemoryError is to the user."""
    return OutOfMemory(
        f"the host's memory ran out {when}",
        hint="lower --max-context, --parallel or --prompt-cache-mib, or close other programs",
    )


def kind_of(error: Exception) -> FailureKind:
    """What an error is to the other process."""
    return next((kind for cls, kind in _KINDS if isinstance(error, cls)), "internal")


def error_of(kind: FailureKind, message: str, hint: str) -> StrataError:
    """The error that a kind stands for; EngineFailed where it has no class of its own."""
    cls = next((cls for cls, name in _KINDS if name == kind), EngineFailed)
    return cls(message, hint=hint)
