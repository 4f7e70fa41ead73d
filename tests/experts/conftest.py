"""The devices that streams of experts are tested on, and a small model for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Device, Stream
from strata_cli.engine.model.tensors import ModelFile
from strata_cli.errors import ConfigError
from tests.experts.tiny_store import open_tiny


@pytest.fixture(params=["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    try:
        opened = open_device(request.param)
    except ConfigError as error:
        pytest.skip(f"no {request.param}: {error.message}")
    with opened:
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
