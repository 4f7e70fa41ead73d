"""What a streamed prompt asks of a GPU's driver, held against the compiled functions, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine import opening, profiling
from strata_cli.engine.device.cache_folder import CacheFolder
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.nvrtc import Compiler
from strata_cli.engine.prefill.feed import StreamTables
from strata_cli.errors import ConfigError
from tests.device.cubin_driver import CubinDriver, hopper
from tests.engine.streams import (
    NUM_EXPERTS,
    TURNS,
    Way,
    store_of,
    streamer_of,
)

pytestmark = pytest.mark.slow  # a first run compiles

TOP_K = 3
NUM_TOKENS = 128
WAYS = {
    "routed": Way(chunk=NUM_TOKENS, ring=16),
    "likely and keep, inline": Way(
        cache=60, chunk=64, ring=16, keep=9, is_likely=True, stream={"has_thread": False}
    ),
    "small ring": Way(chunk=NUM_TOKENS, ring=8),
    "ring of its own": Way(cache=0, chunk=NUM_TOKENS),
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[CubinDriver]:
    """A GPU that computes nothing."""
    try:
        Compiler()
    except ConfigError as error:
        pytest.skip(error.message)

    driver = CubinDriver()
    device = CudaDevice(hopper(driver), CudaOptions())
    monkeypatch.setattr(opening, "open_device", lambda *_, **__: device)
    monkeypatch.setattr(profiling, "open_cache", lambda *_: CacheFolder(None, "a test"))
    yield driver
    assert not driver.allocated
    assert not driver.registered
    assert driver.names()[-1] == "cuDevicePrimaryCtxRelease"


@pytest.mark.parametrize("way", WAYS)
def test_every_launch_fits_its_function_and_was_compiled_ahead(
    fused: Path, driver: CubinDriver, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def start(_tables: StreamTables) -> NDArray[np.int32]:
        """The routing that the GPU does not find."""
        return np.linspace(0, TOP_K * WAYS[way].chunk, NUM_EXPERTS + 1).astype(np.int32)

    monkeypatch.setattr(StreamTables, "start", start)
    with WAYS[way].open(fused, "cuda:0") as engine, engine.sequence() as sequence:
        driver.calls.clear()
        driver.launches.clear()
        sequence.prefill(TURNS[0][:NUM_TOKENS])
        assert "cuModuleLoadData" not in driver.names()
        assert {"relabel", "order_by_expert"} <= set(driver.launches)
        assert any("grouped" in name for name in driver.launches)
        copied = sum(counts.copied_bytes for counts in streamer_of(engine).counts)
        assert 0 < copied <= copied_bytes(driver)
        sequence.step(1)
        assert store_of(engine).cache.loan is None


def copied_bytes(driver: CubinDriver) -> int:
    """Of all copies, one by one and together."""
    sizes: list[int] = [size for args in driver.arguments("cuMemcpyBatchAsync") for size in args[2]]
    sizes += [args[2] for args in driver.arguments("cuMemcpyAsync")]
    return sum(sizes)
