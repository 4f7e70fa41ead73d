"""What a model launches on a GPU, held against the compiled functions, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from strata_cli.engine import opening
from strata_cli.engine.device import filling
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.nvrtc import Compiler
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.planning import Homes
from strata_cli.errors import ConfigError
from tests.device.cubin_driver import CubinDriver, hopper
from tests.engine.passes import read_together
from tests.model.oracle import MODELS, load_oracle

pytestmark = pytest.mark.slow  # a first run compiles

IDS = load_oracle("tinyA-q8_0")["p300.ids"].tolist()
RECORDED = {"cuLaunchKernel", "cuLaunchKernelEx", "cuMemcpyAsync", "cuMemsetD8Async"}
PIECE_BYTES = 100_000
WAITING = {"cuEventQuery", "cuStreamQuery"}


@dataclass(frozen=True)
class Paper:
    """An engine on a GPU that computes nothing, and the driver that was asked to."""

    engine: Engine
    driver: CubinDriver


@pytest.fixture(scope="module")
def paper() -> Iterator[Paper]:
    try:
        Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    driver = CubinDriver()
    options = EngineOptions(
        model=MODELS["tinyA-q8_0"],
        device="cuda:0",
        prefill=200,
        max_context=1_000,
        homes=Homes(experts=ExpertHome.MIXED),
    )
    with pytest.MonkeyPatch.context() as patch:
        device = CudaDevice(hopper(driver), CudaOptions())
        patch.setattr(filling, "PIECE_BYTES", PIECE_BYTES)
        patch.setattr(opening, "open_device", lambda *_, **__: device)
        with Engine.open(options) as engine:
            yield Paper(engine, driver)
    assert not driver.allocated
    assert not driver.registered
    assert driver.names()[-1] == "cuDevicePrimaryCtxRelease"


def test_weights_arrive_in_whole_pieces(paper: Paper) -> None:
    """The half of the experts that is not mapped, and everything else."""
    whole = paper.engine._forward.weights.buffers[0].nbytes
    copies = [args[2] for args in paper.driver.arguments("cuMemcpyAsync")]
    pieces = copies[: -(-whole // PIECE_BYTES)]
    assert sum(pieces) == whole
    assert set(pieces[:-1]) == {PIECE_BYTES}


def test_every_launch_fits_its_function_and_was_compiled_ahead(paper: Paper) -> None:
    engine, driver = paper.engine, paper.driver
    driver.calls.clear()
    with engine.sequence() as one, engine.sequence() as two:
        for length in (1, 2, 9, 33, 64, 300):
            one.reset()
            one.prefill(IDS[:length], logits="all")
        snapshot = one.snapshot()
        one.step(5)
        one.restore(snapshot)
        read_together(engine, [(one, IDS[:40]), (two, IDS[:1])])
        assert one.state_hash().position == 340
    assert len(set(driver.launches)) > 30
    assert "cuModuleLoadData" not in driver.names()


def test_a_step_is_one_launch_of_a_recorded_graph(paper: Paper) -> None:
    engine, driver = paper.engine, paper.driver
    with engine.sequence() as sequence:
        sequence.prefill(IDS[:10])
        driver.calls.clear()
        sequence.step(1)
        names = driver.names()
        begin, end = names.index("cuStreamBeginCapture"), names.index("cuStreamEndCapture")
        assert set(names[begin + 1 : end]) <= RECORDED
        assert names.count("cuLaunchKernel") + names.count("cuLaunchKernelEx") > 100
        assert names.count("cuGraphLaunch") == 1
        for token in (2, 3):
            driver.calls.clear()
            assert np.isfinite(sequence.step(token)).all()
            asked = [name for name in driver.names() if name not in WAITING]
            assert asked == ["cuGraphLaunch", "cuEventRecord"]
