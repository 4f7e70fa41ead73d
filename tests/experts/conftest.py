"""The devices that streams of experts are tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device
from strata_cli.errors import ConfigError


@pytest.fixture(params=["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    try:
        opened = open_device(request.param)
    except ConfigError as error:
        pytest.skip(f"no {request.param}: {error.message}")
    with opened:
        yield opened
