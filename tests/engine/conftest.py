"""One tiny model for everything that is about sequences, on every device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_cli.engine.engine import Engine
from tests.devices import EVERY_DEVICE, device_or_skip
from tests.engine.readings import CONTEXT, TEXT, Reading, Truth, open_engine, read_in_parts
from tests.engine.streams import Talk, talk, write_streamed_model
from tests.model.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of both kinds, n-grams, blocks of four tokens, four of them attended to."""
    path = tmp_path_factory.mktemp("models") / "m.gguf"
    return write_tiny_model(
        path, context=CONTEXT, recurrent=(True, False, True, False), ple_layer=2
    )


@pytest.fixture(scope="session", params=EVERY_DEVICE)
def device_name(request: pytest.FixtureRequest) -> str:
    """A device that is there."""
    return _present(request.param)


@pytest.fixture(scope="session")
def gpu() -> str:
    """A GPU that is there; tests that use it are marked gpu."""
    return _present("cuda:0")


def _present(name: str) -> str:
    device_or_skip(name).close()
    return name


@pytest.fixture(scope="session")
def engine(model: Path, device_name: str) -> Iterator[Engine]:
    with open_engine(model, device=device_name) as engine:
        yield engine


@pytest.fixture(scope="session")
def whole(engine: Engine) -> Reading:
    """Every token of TEXT read in one chunk."""
    return read_in_parts(engine, [TEXT])


@pytest.fixture(scope="session")
def truth(engine: Engine) -> Truth:
    return Truth(engine)


@pytest.fixture(scope="session")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for streams of experts, their matrices one by one; see write_streamed_model."""
    return write_streamed_model(tmp_path_factory.mktemp("separate") / "m.gguf", fused=False)


@pytest.fixture(scope="session")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with gate and up matrices in one."""
    return write_streamed_model(tmp_path_factory.mktemp("fused") / "m.gguf", fused=True)


@pytest.fixture(scope="session")
def separate_talk(separate: Path, device_name: str) -> Talk:
    """What the separate one says where all experts are resident."""
    with open_engine(separate, device=device_name) as engine:
        return talk(engine)
