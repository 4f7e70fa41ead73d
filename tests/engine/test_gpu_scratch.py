"""What launches of a GPU are given of a pass's scratch: no two pieces of one launch overlap."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from strata_cli.engine import opening
from strata_cli.engine.device.base import Kernel, KernelArgument, Launch, Tensor
from strata_cli.engine.device.cuda import CudaDevice, CudaOptions
from strata_cli.engine.device.cuda_stream import CudaStream
from strata_cli.engine.device.nvrtc import Compiler
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.workspace import Part, Workspace, scratch_plan
from strata_cli.errors import ConfigError
from tests.device.cubin_driver import CubinDriver, hopper
from tests.engine.readings import TEXT, open_engine

pytestmark = pytest.mark.slow  # a first run compiles


@pytest.fixture
def engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """On a GPU that computes nothing."""
    try:
        Compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    device = CudaDevice(hopper(CubinDriver()), CudaOptions())
    monkeypatch.setattr(opening, "open_device", lambda *_, **__: device)
    with open_engine(model, device="cuda:0", prefill=70) as opened:
        yield opened


def overlaps(workspace: Workspace, args: tuple[KernelArgument, ...]) -> list[tuple[int, int]]:
    """Pairs of arguments that share scratch and are not the same."""
    pieces = [
        (arg.offset_bytes, arg.offset_bytes + arg.nbytes)
        for arg in args
        if isinstance(arg, Tensor) and arg.buffer is workspace._buffer and arg.nbytes
    ]
    return [
        (one[0], other[0])
        for one, other in combinations(pieces, 2)
        if one[0] != other[0] and one[0] < other[1] and other[0] < one[1]
    ]


def run(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, int]]]:
    """Prompts of many and few tokens and steps; which kernels got overlapping scratch."""
    found: dict[str, list[tuple[int, int]]] = {}
    launch_it = CudaStream.launch

    def watched(stream: CudaStream, kernel: Kernel, launch: Launch, *args: KernelArgument) -> None:
        if pairs := overlaps(engine._forward.workspace, args):
            found.setdefault(kernel.name, []).extend(pairs)
        launch_it(stream, kernel, launch, *args)

    monkeypatch.setattr(CudaStream, "launch", watched)
    with engine.sequence() as sequence:
        sequence.prefill(TEXT[:150])
        sequence.step(TEXT[150])
    return found


def test_no_launch_gets_scratch_that_overlaps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(engine, monkeypatch) == {}


def test_a_norm_that_lies_over_its_inputs_is_caught(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it belonged to the part that reads it, whose scratch lies over the experts'."""
    workspace = engine._forward.workspace
    plan = scratch_plan(engine.spec, workspace.num_tokens, workspace.logit_rows)
    assert {one.part for one in plan if one.name == "expert_out"} == {Part.EXPERTS}
    experts, normed = workspace._tensors["expert_out"], workspace._tensors["normed"]
    workspace._tensors["normed"] = Tensor(
        normed.buffer, experts.offset_bytes + 4, normed.shape, normed.dtype
    )
    assert run(engine, monkeypatch)
