"""Scratch that lies over other scratch: no part of a pass relies on what another may overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine.device.base import Tensor
from strata_cli.engine.engine import Engine
from strata_cli.engine.forward.workspace import Part, Workspace, lay_out, scratch_plan
from strata_cli.engine.kernels import moe
from tests.engine.readings import (
    TEXT,
    Reading,
    Truth,
    assert_same,
    bits,
    open_engine,
    read_in_parts,
)
from tests.engine.streams import TURNS, Talk, Way, assert_same_talk, talk

POISON = 0xFF  # as float32, NaN


@pytest.fixture(scope="module")
def talked(fused: Path, device_name: str) -> Talk:
    with open_engine(fused, device=device_name) as engine:
        return talk(engine)


@contextmanager
def poisoned(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Part]]:
    """Inside, every part of a pass finds nothing but NaN in its scratch; gives the parts seen."""
    workspace, stream, seen = engine._forward.workspace, engine._stream, list[Part]()
    plan = scratch_plan(engine.spec, workspace.num_tokens, workspace.logit_rows)
    part_of = {scratch.name: scratch.part for scratch in plan}
    start = sum(scratch.nbytes for scratch in plan if scratch.part is None)
    _, end = lay_out(plan)
    shared = Tensor.over(workspace._buffer, (end - start,), np.uint8, start)

    def watched(name: str) -> Any:
        take = getattr(Workspace, name)

        def call(self: Workspace, scratch: str, *args: int) -> Tensor:
            part = part_of[scratch]
            if part is not None and (not seen or seen[-1] is not part):
                seen.append(part)
                stream.fill(shared, POISON)
            tensor: Tensor = take(self, scratch, *args)
            return tensor

        return call

    with monkeypatch.context() as patch:
        for name in ("take", "take_shaped", "take_all"):
            patch.setattr(Workspace, name, watched(name))
        yield seen


def test_no_part_finds_what_it_needs_in_shared_memory(
    model: Path, truth: Truth, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks of many and few tokens, steps, suffixes."""
    opened = open_engine(model, device=device_name, prefill=70)
    with opened as engine, poisoned(engine, monkeypatch) as seen:
        whole = read_in_parts(engine, [TEXT[:140], TEXT[140:149], TEXT[149:]])
        assert set(seen) == set(Part)
        with engine.sequence() as sequence:
            sequence.prefill(TEXT[:50])
            row = sequence.step(TEXT[50])
            suffixes = sequence.score([TEXT[51:60], TEXT[51:99]])
    for length, logits in ((51, row), (60, suffixes[0]), (99, suffixes[1])):
        assert np.array_equal(bits(logits), bits(truth(TEXT[:length]).logits))
    assert np.array_equal(bits(whole.logits[-1]), bits(truth(TEXT).logits))
    assert whole.state == truth(TEXT).state


@pytest.mark.parametrize("way", ["streamed", "shared with the host", "whole"])
def test_streamed_experts_do_not_rely_on_it_either(
    fused: Path, talked: Talk, device_name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {
        "streamed": Way(),
        "shared with the host": Way(chunk=40, stream_min=1000, cpu=0.5),
        "whole": Way(chunk=len(TURNS[0])),
    }
    if way == "shared with the host" and device_name != "host":
        pytest.skip("its bits differ from a GPU's")
    opened = ways[way].open(fused, device_name)
    with opened as engine, poisoned(engine, monkeypatch):
        assert_same_talk(talk(engine), talked)


def test_parts_lie_over_each_other_and_over_nothing_else(engine: Engine) -> None:
    plan = scratch_plan(engine.spec, 100, 10)
    offsets, end = lay_out(plan)
    for at, (one, start) in enumerate(zip(plan, offsets, strict=True)):
        assert start % 256 == 0
        assert start + one.nbytes <= end
        for other, other_start in zip(plan[:at], offsets[:at], strict=True):
            is_over = start < other_start + other.nbytes and other_start < start + one.nbytes
            may_be = one.part is not other.part and None not in (one.part, other.part)
            assert may_be or not is_over, (one.name, other.name)
    assert {scratch.part for scratch in plan} == {None, *Part}


def test_a_planted_reliance_is_caught(
    model: Path, whole: Reading, device_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read's gate taken for granted by the experts: the poison shows in the result."""
    combine = moe.combine

    def relying(stream: Any, expert_out: Tensor, *rest: Any) -> None:
        stale = engine._forward.workspace._tensors["stream_gate"]
        expert_out = Tensor(stale.buffer, stale.offset_bytes, expert_out.shape, expert_out.dtype)
        combine(stream, expert_out, *rest)

    opened = open_engine(model, device=device_name, prefill=70)
    with opened as engine, poisoned(engine, monkeypatch):
        monkeypatch.setattr(moe, "combine", relying)
        with pytest.raises(AssertionError):
            assert_same(read_in_parts(engine, [TEXT]), whole)
