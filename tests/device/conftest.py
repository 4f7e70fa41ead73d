"""The devices that the contract tests run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.device.base import Device, Stream
from tests.devices import EVERY_DEVICE, device_or_skip


@pytest.fixture(params=EVERY_DEVICE)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with device_or_skip(request.param) as opened:
        yield opened


@pytest.fixture
def stream(device: Device) -> Stream:
    return device.stream("compute")
