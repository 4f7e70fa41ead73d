"""The devices that tests run on; those that are not here are skipped."""

from __future__ import annotations

import pytest

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device
from strata_cli.errors import ConfigError

EVERY_DEVICE = ("host", pytest.param("cuda:0", marks=pytest.mark.gpu))


def device_or_skip(name: str, *, threads: int = 0) -> Device:
    """An opened device; the caller closes it."""
    try:
        return open_device(name, threads=threads)
    except ConfigError as error:
        pytest.skip(f"no {name}: {error.message}")
