"""The devices that kernels are tested on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from strata_cli.engine.device import host_memory, open_device
from tests.devices import EVERY_DEVICE, device_or_skip
from tests.kernels.lab import Lab


@pytest.fixture(scope="module", autouse=True)
def _memory_is_looked_at_once() -> Iterator[None]:
    """Not for each of thousands of small tensors, which would take a fifth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "host_memory", cache(host_memory.host_memory))
        yield


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
