"""Segments that a pass takes together: where their table leads, and the bits of one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, Part, Sequence
from strata_cli.engine.forward.batch import Batch, Segment
from strata_cli.engine.forward.segments import segment_rows, wants_table
from strata_cli.engine.forward.state import AttentionState, GdnState
from strata_cli.engine.kernels import cache_segments
from strata_cli.engine.kernels.segments import SEGMENT_WORDS
from strata_cli.engine.prefill import chunks
from strata_cli.engine.prefill.branches import plan_batches
from tests.engine.readings import TEXT, Truth, bits, open_engine

SUFFIXES = [TEXT[7 * i + n : 7 * i + 2 * n] for i, n in enumerate((12, 1, 9, 17, 4))]


@pytest.fixture
def two(engine: Engine) -> Iterator[tuple[Sequence, Sequence]]:
    """At positions 63 and 17: within a block of four tokens, and one behind its start."""
    with engine.sequence() as first, engine.sequence() as second:
        first.prefill(TEXT[:63])
        second.prefill(TEXT[3:20])
        yield first, second


def test_the_table_leads_sequences_to_their_own_state(
    engine: Engine, two: tuple[Sequence, Sequence]
) -> None:
    states = [sequence._state for sequence in two]
    segments = [Segment(states[0], 0, 40), Segment(states[1], 40, 43)]
    table = segment_rows(engine.spec, engine._forward.workspace, segments)
    assert table.shape == (len(states[0].layers) + 1, 2, SEGMENT_WORDS)
    assert (table[:, :, :3] == [[0, 40, 63], [40, 3, 17]]).all()
    for index, layer in enumerate(states[1].layers):
        row = table[index, 1].tolist()
        if isinstance(layer, GdnState):
            assert row[3:5] == row[5:7] == [layer.conv.address, layer.matrix.address]
        else:
            assert row[3:7] == row[7:11]
            assert row[3:5] == [layer.keys.address, layer.values.address]
            assert row[5:7] == [layer.index_keys.address, layer.pooled.address]
    ngram = states[1].ngram
    assert ngram is not None
    assert table[-1, 1, 3:7].tolist() == 2 * [ngram.history.address, ngram.conv.address]


def test_the_table_leads_branches_past_their_sequence(
    engine: Engine, two: tuple[Sequence, Sequence]
) -> None:
    state, workspace = two[0]._state, engine._forward.workspace
    room = engine._branch_room()
    table = segment_rows(
        engine.spec, workspace, [Segment(state, 0, 9, room), Segment(state, 9, 40, room)]
    )
    keys, pooled, index_keys = (
        workspace.take_all(name) for name in ("branch_keys", "branch_pooled", "index_k")
    )
    for index, layer in enumerate(state.layers):
        row = table[index, 1].tolist()
        if isinstance(layer, GdnState):
            assert row[3:7] == [layer.conv.address, layer.matrix.address, 0, 0]
            continue
        assert isinstance(layer, AttentionState)
        assert row[3] == layer.keys.address
        assert row[7] + 63 * keys.rows(0, 1).nbytes == keys.rows(9, 10).address
        assert row[9] + 63 * index_keys.rows(0, 1).nbytes == index_keys.rows(9, 10).address
        # Position 63 ends block 15: the first one that a branch completes.
        assert row[10] + 15 * pooled.rows(0, 1).nbytes == pooled.rows(9, 10).address


def test_the_host_takes_segments_one_by_one(engine: Engine, two: tuple[Sequence, Sequence]) -> None:
    segments = (Segment(two[0]._state, 0, 40), Segment(two[1]._state, 40, 43))
    is_gpu = engine._stream.shared_bytes > 0
    assert wants_table(engine._stream, Batch(43, segments), 2) is is_gpu
    assert not wants_table(engine._stream, Batch(43, segments), 1)


def test_batches_have_no_more_suffixes_than_a_table() -> None:
    assert list(plan_batches([3] * 7, 100, 3)) == [range(3), range(3, 6), range(6, 7)]
    assert list(plan_batches([3] * 7, 6, 3)) == [range(i, min(i + 2, 7)) for i in (0, 2, 4, 6)]


@pytest.mark.parametrize("enough", [1, 1 << 30], ids=["attention too", "but attention"])
def test_together_is_as_one_by_one(
    model: Path, device_name: str, truth: Truth, monkeypatch: pytest.MonkeyPatch, enough: int
) -> None:
    monkeypatch.setattr(cache_segments, "ENOUGH_BLOCKS", enough)
    found = []
    for is_together in (True, False):
        with monkeypatch.context() as patch, open_engine(model, device=device_name) as engine:
            if not is_together:
                patch.setattr(chunks, "wants_table", lambda *_: False)
            found.append(_rows(engine))
    together, one_by_one = found
    for row, other in zip(together, one_by_one, strict=True):
        assert np.array_equal(bits(row), bits(other))
    for suffix, row in zip(SUFFIXES, together, strict=False):
        assert np.array_equal(bits(row), bits(truth(TEXT[:63] + suffix).logits))


def _rows(engine: Engine) -> list[NDArray[np.float32]]:
    """Branches of one and of two sequences, passes and steps of both, and a read behind them."""
    with engine.sequence() as first, engine.sequence() as second:
        first.prefill(TEXT[:63])
        second.prefill(TEXT[3:20])
        rows = first.score(SUFFIXES)
        for group in engine.score_together([(first, SUFFIXES), (second, SUFFIXES[:2])]):
            rows += group
        for pieces in ((TEXT[50:90], [9]), ([3], [4]), ([5], [6]), (TEXT[5:9], TEXT[1:3])):
            parts = [Part(one, ids) for one, ids in zip((first, second), pieces, strict=True)]
            for row in engine.read_together(parts):
                assert row is not None
                rows.append(row)
        return [*rows, first.prefill(TEXT[20:29]), second.step(7)]
