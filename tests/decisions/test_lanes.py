"""States side by side: each as if it were read alone, also behind an interrupt."""

from __future__ import annotations

import numpy as np
import pytest

from strata_cli.decisions.lanes import LaneGroup, Lanes
from strata_cli.engine.engine import Engine

HEAD = list(range(5, 30))


def groups_of(head: list[int]) -> list[LaneGroup]:
    return [LaneGroup([*head, 90 + lane], [[3, lane + 1], [7]]) for lane in range(2)]


def check(engine: Engine, lanes: Lanes, head: list[int]) -> None:
    groups = groups_of(head)
    for group, rows in zip(groups, lanes.score(groups), strict=True):
        for suffix, row in zip(group.suffixes, rows, strict=True):
            with engine.sequence() as alone:
                assert np.array_equal(alone.prefill(group.prefix + suffix), row)


@pytest.mark.parametrize("known", [[], [HEAD]])
def test_a_head_that_was_interrupted_is_read_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, known: list[list[int]]
) -> None:
    """The first one, and one that is what another and the next prompts begin with."""
    lanes = Lanes(engine, 2)
    for head in known:
        check(engine, lanes, head)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "_read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            lanes.score(groups_of(HEAD[:20]))
    for head in (HEAD[:20], HEAD):
        check(engine, lanes, head)
    lanes.close()
