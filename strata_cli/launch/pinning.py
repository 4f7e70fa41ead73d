"""Chooses how much of a model's experts is copied into page-locked memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from strata_cli.engine.device.sizes import gib
from strata_cli.launch.fits import Fit
from strata_cli.launch.machine import Machine

GIB = 1 << 30
HEADROOM_BYTES = 4 * GIB  # of RAM for everything else, pages of the model's file among it
LEAST_BYTES = GIB  # fewer experts are not worth the memory


class Pinning(NamedTuple):
    """How much is pinned, and why.

    Attributes:
        nbytes: most bytes of experts; None: all of them.
        reason: for people; empty where the engine's own choice is right.
    """

    nbytes: int | None
    reason: str = ""


def given_pinning(given: Mapping[str, Any]) -> Pinning | None:
    """What was chosen by hand; None: nothing was."""
    if given.get("mmap_experts"):
        return Pinning(0)
    share = given.get("arena_pin_gib")
    return None if share is None else Pinning(int(share * GIB))


def choose_pinning(machine: Machine, fit: Fit) -> Pinning:
    """All experts where the RAM has room for them, else whole GiB of them, or none."""
    room_bytes = machine.memory.free_bytes - HEADROOM_BYTES - fit.mapped_bytes
    if not fit.is_streamed or fit.pinned_bytes <= room_bytes:
        return Pinning(None)
    reason = f"{gib(machine.memory.free_bytes)} of RAM available, {gib(HEADROOM_BYTES)} left free"
    if room_bytes < LEAST_BYTES:
        return Pinning(0, reason)
    return Pinning(room_bytes // GIB * GIB, reason)
