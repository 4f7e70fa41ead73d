"""One arithmetic on a GPU: long prompts in any chunks, company, places and repeats, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strata_cli.engine.engine import Engine
from strata_cli.engine.experts.placing import ExpertHome
from strata_cli.engine.forward.planning import Homes, TableHome
from strata_cli.engine.model.expected import Shape
from strata_cli.engine.model.quants import BLOCK, QuantType
from tests.engine.passes import read_together
from tests.engine.readings import (
    Reading,
    assert_same,
    bits,
    cut,
    open_engine,
    read_in_parts,
    text,
)
from tests.model.tiny_model import write_tiny_model

pytestmark = pytest.mark.gpu

LENGTH = 9_000
IDS = text(LENGTH)
REPEATS = 500


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with all 28 tensor types, an index in every attention layer."""
    dealt: list[QuantType] = []

    def in_turn(name: str, shape: Shape) -> QuantType:
        fitting = [qtype for qtype in QuantType if shape[-1] % BLOCK[qtype].weights == 0]
        dealt.append(min(fitting, key=dealt.count))
        return dealt[-1]

    path = write_tiny_model(
        tmp_path_factory.mktemp("models") / "long.gguf",
        context=LENGTH + 100,
        hidden=256,
        streams=2,
        rank=256,
        ff=256,
        shared_ff=256,
        experts_count=12,
        recurrent=(True, False, True, False),
        ple_layer=0,
        budget=64,
        type_of=in_turn,
    )
    assert set(dealt) == set(QuantType)
    return path


@pytest.fixture(scope="module")
def engine(path: Path, gpu: str) -> Iterator[Engine]:
    with open_engine(path, device=gpu, prefill=1_024) as engine:
        yield engine


@pytest.fixture(scope="module")
def whole(path: Path, gpu: str) -> Reading:
    """Every token in one chunk."""
    with open_engine(path, device=gpu, prefill=LENGTH) as engine:
        reading = read_in_parts(engine, [IDS])
    assert np.isfinite(reading.logits).all()
    assert len(np.unique(reading.logits.argmax(axis=1))) > 5, "all tokens look alike"
    return reading


@pytest.mark.parametrize("chunk", [1, 7, 64, 192, 1_024, 8_192])
def test_the_chunk_does_not_change_a_bit(path: Path, gpu: str, whole: Reading, chunk: int) -> None:
    ids = IDS if chunk >= 64 else IDS[:300]
    with open_engine(path, device=gpu, prefill=chunk) as engine:
        reading = read_in_parts(engine, [ids])
    assert np.array_equal(bits(reading.logits), bits(whole.logits[: len(ids)]))
    if len(ids) == LENGTH:
        assert reading.state == whole.state


def test_uneven_cuts_do_not_change_a_bit(engine: Engine, whole: Reading) -> None:
    assert_same(read_in_parts(engine, cut(IDS, [1, 1_000, 31, 33, 2, 511, 129])), whole)


def test_steps_give_the_bits_of_a_prompt(engine: Engine, whole: Reading) -> None:
    with engine.sequence() as sequence:
        for start in (0, 8_500):
            if start > sequence.position:
                sequence.prefill(IDS[sequence.position : start], logits="none")
            for index in range(start, start + 200):
                assert np.array_equal(sequence.step(IDS[index]), whole.logits[index])


def test_neighbours_do_not_change_a_bit(engine: Engine, whole: Reading) -> None:
    """Rows of another sequence before, between and after."""
    other = IDS[::-1]
    with engine.sequence() as one, engine.sequence() as two:
        alone = read_in_parts(engine, [other[:700]])
        for start, stop in ((0, 1), (1, 40), (40, 500), (500, 700)):
            part, more = (one, IDS[start:stop]), (two, other[start:stop])
            for_one, for_two = read_together(engine, [part, more])
            assert np.array_equal(bits(for_one), bits(whole.logits[start:stop]))
            assert np.array_equal(bits(for_two), bits(alone.logits[start:stop]))


def test_a_snapshot_resumes_at_any_grid_position(engine: Engine, whole: Reading) -> None:
    with engine.sequence() as sequence:
        for position in (64, 128, 1_024, 4_096, 8_192, 8_960):
            sequence.prefill(IDS[sequence.position : position], logits="none")
            snapshot = sequence.snapshot()
            sequence.prefill(IDS[::-1][:40], logits="none")  # another branch
            sequence.restore(snapshot)
            logits = sequence.prefill(IDS[position : position + 40], logits="all")
            assert np.array_equal(bits(logits), bits(whole.logits[position : position + 40]))
            sequence.restore(snapshot)
        sequence.prefill(IDS[sequence.position :], logits="none")
        assert sequence.state_hash() == whole.state


@pytest.mark.parametrize("experts", ExpertHome)
@pytest.mark.parametrize("table", [TableHome.DEVICE, TableHome.MAPPED])
def test_the_place_of_weights_does_not_change_a_bit(
    path: Path, gpu: str, whole: Reading, experts: ExpertHome, table: TableHome
) -> None:
    homes = Homes(experts=experts, ngram_table=table)
    with open_engine(path, device=gpu, prefill=4_096, homes=homes) as engine:
        assert_same(read_in_parts(engine, [IDS]), whole)
        with engine.sequence() as sequence:
            steps = np.stack([sequence.step(token) for token in IDS[:40]])
            assert np.array_equal(bits(steps), bits(whole.logits[:40]))


def test_repeats_give_the_same_bits(engine: Engine, whole: Reading) -> None:
    """A prompt of a chunk and a half, and a step."""
    ids = IDS[:1_500]
    with engine.sequence() as sequence:
        for repeat in range(REPEATS):
            sequence.reset()
            last = sequence.prefill(ids)
            assert np.array_equal(bits(last), bits(whole.logits[1_499])), f"repeat {repeat}"
            step = sequence.step(IDS[1_500])
            assert np.array_equal(bits(step), bits(whole.logits[1_500])), f"repeat {repeat}"
