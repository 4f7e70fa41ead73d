"""The devices that streams of experts are tested on, and a small model for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.model.tensors import ModelFile
from tests.devices import EVERY_DEVICE, device_or_skip
from tests.experts.tiny_store import open_tiny


@pytest.fixture(params=EVERY_DEVICE)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with device_or_skip(request.param) as opened:
        yield opened


@pytest.fixture
def reads(device: Device) -> Iterator[Stream]:
    stream = device.stream("reads")
    yield stream
    stream.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFile]:
    with open_tiny(tmp_path_factory.mktemp("model")) as opened:
        yield opened
