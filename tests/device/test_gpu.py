"""What only a real GPU can show: a lost context, memory given back, several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata_cli.engine.device import open_device
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.cuda_driver import find_gpu
from strata_cli.errors import ConfigError
from tests.device.kernels import AFFINE

pytestmark = pytest.mark.gpu
GIB = 1 << 30
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _needs_a_gpu() -> None:
    try:
        find_gpu(0)
    except ConfigError as error:
        pytest.skip(error.message)


def run_python(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def output(process: subprocess.Popen[bytes]) -> str:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return out.decode()


LOST = """
from strata_cli.engine.device import open_device
from strata_cli.engine.device.base import Launch
from strata_cli.errors import DeviceError
from tests.device.kernels import AFFINE
with open_device("cuda:0") as device:
    stream = device.stream("compute")
    nowhere = 16
    stream.launch(AFFINE, Launch(items=1), nowhere, 1, 1, 1)
    try:
        stream.synchronize()
    except DeviceError as error:
        print(error)
"""


def test_a_lost_gpu_says_so_and_the_next_process_runs() -> None:
    said = output(run_python(LOST))
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in said
    assert "start again" in said
    with open_device("cuda:0") as device:
        device.stream("compute").synchronize()


def test_closing_gives_the_memory_back() -> None:
    with open_device("cuda:0") as device:
        before = device.memory().free_bytes
        held = [device.allocate(GIB), device.allocate_pinned(GIB)]
        assert device.memory().free_bytes <= before - GIB
    with open_device("cuda:0") as device:
        assert device.memory().free_bytes > before - GIB // 8
    assert held


ALLOCATING = """
from strata_cli.engine.device import open_device
with open_device("cuda:0", vram_bytes=1 << 30) as device:
    buffers = [device.allocate(64 << 20) for _ in range(16)]
    print(device.memory().free_bytes)
"""


def test_processes_share_a_gpu_within_their_budgets() -> None:
    processes = [run_python(ALLOCATING) for _ in range(3)]
    assert [output(process).strip() for process in processes] == ["0"] * 3


def test_compiled_kernels_are_found_in_the_cache(tmp_path: Path) -> None:
    written = []
    for _ in range(2):
        with CudaDevice(find_gpu(0), CudaOptions(cache_folder=tmp_path)) as device:
            device.prepare([AFFINE])
        (entry,) = tmp_path.iterdir()
        written.append(entry.stat().st_mtime_ns)
    assert written[0] == written[1]
