"""The devices that kernels are tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.device import open_device
from tests.devices import EVERY_DEVICE, device_or_skip
from tests.kernels.lab import Lab


@pytest.fixture(scope="module", params=EVERY_DEVICE)
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with device_or_skip(request.param, threads=3) as device:
        yield Lab(device, device.stream("test"))


@pytest.fixture(scope="module")
def host_lab() -> Iterator[Lab]:
    """For what only the host has: pieces of a launch."""
    with open_device("host", threads=1) as device:
        yield Lab(device, device.stream("test"))


@pytest.fixture(scope="module")
def gpu_lab() -> Iterator[Lab]:
    """For comparing a GPU with the host; tests that use it are marked gpu."""
    with device_or_skip("cuda:0") as device:
        yield Lab(device, device.stream("test"))
