"""The devices that kernels are tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.device import open_device
from strata_cli.errors import ConfigError
from tests.kernels.lab import Lab


@pytest.fixture(scope="module", params=["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    try:
        device = open_device(request.param, threads=3)
    except ConfigError as error:
        pytest.skip(f"no {request.param}: {error.message}")
    with device:
        yield Lab(device, device.stream("test"))


@pytest.fixture(scope="module")
def host_lab() -> Iterator[Lab]:
    """For what only the host has: pieces of a launch."""
    with open_device("host", threads=1) as device:
        yield Lab(device, device.stream("test"))


@pytest.fixture(scope="module")
def gpu_lab() -> Iterator[Lab]:
    """For comparing a GPU with the host; tests that use it are marked gpu."""
    try:
        device = open_device("cuda:0")
    except ConfigError as error:
        pytest.skip(f"no cuda:0: {error.message}")
    with device:
        yield Lab(device, device.stream("test"))
