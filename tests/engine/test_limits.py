"""What an engine refuses, in words, and what stays as it was then."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata_cli.engine.engine import Engine, EngineOptions, Sequence
from strata_cli.engine.experts.adapting import AdaptRules
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.errors import ConfigError, InputError, StateError
from tests.engine.readings import CONTEXT, TEXT, Truth, open_engine
from tests.engine.strategies import VOCAB

SMALL_CONTEXT = 37


def test_a_full_context_takes_no_more(model: Path, device_name: str, truth: Truth) -> None:
    ids = TEXT[:SMALL_CONTEXT]
    opened = open_engine(model, device=device_name, context=SMALL_CONTEXT)
    with opened as engine, engine.sequence() as sequence:
        assert engine.context_tokens == SMALL_CONTEXT
        with pytest.raises(InputError, match="38 tokens do not fit the context of 37") as caught:
            sequence.prefill([*ids, 1])
        assert caught.value.hint
        assert sequence.position == 0
        assert np.array_equal(sequence.prefill(ids), truth(ids).logits)
        with pytest.raises(InputError, match="38 tokens do not fit the context of 37"):
            sequence.step(1)
        assert sequence.state_hash() == truth(ids).state


def test_the_last_place_of_a_context_can_be_stepped_into(
    model: Path, device_name: str, truth: Truth
) -> None:
    ids = TEXT[:SMALL_CONTEXT]
    opened = open_engine(model, device=device_name, context=SMALL_CONTEXT)
    with opened as engine, engine.sequence() as sequence:
        sequence.prefill(ids[:-1])
        assert np.array_equal(sequence.step(ids[-1]), truth(ids).logits)


def test_a_context_beyond_the_model_is_refused(model: Path) -> None:
    with pytest.raises(InputError, match=f"{CONTEXT + 1} is more than the model's {CONTEXT}"):
        open_engine(model, device="host", context=CONTEXT + 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_context": -1},
        {"prefill": -5},
        {"vram_bytes": -1},
        {"expert_cache": -1},
        {"pinned_bytes": -1},
        {"tail_skip": -2},
        {"pool_threads": -1},
        {"link_share": 1.5},
        {"link_share": math.nan},
        {"adapt": AdaptRules(every=-1)},
        {"adapt": AdaptRules(swaps=-1)},
        {"adapt": AdaptRules(decay=2.0)},
    ],
    ids=str,
)
def test_options_that_nothing_can_be_made_of_are_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=rf"{name}.* must .*, got ") as caught:
        EngineOptions(model=Path("any"), **wrong)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", [field.name for field in fields(CacheRules)])
def test_negative_rules_of_a_session_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not be negative, got -1"):
        CacheRules(**{name: -1})


@pytest.mark.parametrize("wrong", [-1, VOCAB, 2**31, 2**63, -(2**40)])
def test_an_id_outside_the_vocabulary_is_named(engine: Engine, truth: Truth, wrong: int) -> None:
    with engine.sequence() as sequence:
        with pytest.raises(InputError, match=rf"{wrong} \(number 3 of 4\).* of {VOCAB}") as caught:
            sequence.prefill([1, 2, wrong, 3])
        assert str(VOCAB - 1) in caught.value.hint
        with pytest.raises(InputError, match=str(wrong)):
            sequence.step(wrong)
        assert sequence.state_hash() == truth([]).state


def test_the_first_and_the_last_id_are_tokens(engine: Engine) -> None:
    with engine.sequence() as sequence:
        assert np.isfinite(sequence.prefill([0, VOCAB - 1], logits="all")).all()


def test_no_tokens_are_refused(engine: Engine) -> None:
    with engine.sequence() as sequence, pytest.raises(InputError, match="no tokens"):
        sequence.prefill([])


def uses_of(sequence: Sequence) -> list[Callable[[], object]]:
    sequence.prefill([1, 2])
    sequence.step(3)
    snapshot = sequence.snapshot()
    return [
        lambda: sequence.prefill([1]),
        lambda: sequence.step(1),
        lambda: sequence.restore(snapshot),
        sequence.snapshot,
        sequence.state_hash,
        sequence.reset,
    ]


def test_a_closed_sequence_says_so(engine: Engine) -> None:
    sequence = engine.sequence()
    uses = uses_of(sequence)
    sequence.close()
    sequence.close()
    for use in uses:
        with pytest.raises(StateError, match="the sequence is closed"):
            use()


def test_a_closed_engine_says_so(model: Path, device_name: str) -> None:
    engine = open_engine(model, device=device_name)
    sequence, unused = engine.sequence(), engine.sequence()
    uses = uses_of(sequence)
    engine.close()
    engine.close()
    uses += [engine.sequence, lambda: unused.step(1)]
    for use in uses:
        with pytest.raises(StateError, match="the engine is closed"):
            use()
    sequence.close()
    sequence.close()
    unused.close()


def test_an_engine_takes_its_threads_along(model: Path) -> None:
    before = set(threading.enumerate())
    with open_engine(model, device="host") as engine, engine.sequence() as sequence:
        sequence.prefill([1, 2])
        assert set(threading.enumerate()) > before
    with pytest.raises(InputError):
        open_engine(model, device="host", context=CONTEXT + 1)
    assert set(threading.enumerate()) == before


def test_closing_a_sequence_leaves_queued_work_its_memory(engine: Engine, truth: Truth) -> None:
    """The pass may still run when its sequence is gone; nobody else's numbers change."""
    with engine.sequence() as steady:
        for _ in range(5):
            with engine.sequence() as gone:
                gone.prefill(TEXT[::-1], logits="none")
            steady.reset()
            assert np.array_equal(steady.prefill(TEXT[:60]), truth(TEXT[:60]).logits)
