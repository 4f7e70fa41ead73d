"""Kernels that only a GPU has: what the host makes in another way, launch by launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from strata_cli.engine.device.base import Kernel
from strata_cli.engine.kernels.few import FEW_SOURCE
from strata_cli.engine.kernels.products import Unit


def _not_on_the_host(_begin: int, _end: int, *_: Any) -> None:
    """The host has kernels of its own for that."""


@lru_cache(maxsize=1024)
def gpu_kernel(unit: Unit) -> Kernel:
    """The kernel of a compiled function; it is never launched on the host."""
    name, source, defines = unit.function, unit.source, unit.defines
    keeps_cache = source == FEW_SOURCE  # measured
    return Kernel(
        name, _not_on_the_host, _not_on_the_host, source, name, defines, keeps_cache=keeps_cache
    )
