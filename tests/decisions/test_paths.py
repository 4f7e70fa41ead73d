"""Options of many tokens: each scored as the sum along its path, the prompt read once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_cli.decisions import questions
from strata_cli.decisions.backend import EngineBackend
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.path_reads import score_paths
from strata_cli.decisions.paths import END, TokenPath, branches_of, branching, ended
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.engine import Engine
from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.errors import InputError
from tests.decisions.asking import OPTIONS, QUESTION, STATE, open_tiny

NAMES = ["new york", "york", "new yorks", "mail"]
PLACES = questions.choice("Where?", NAMES, "place", by_text=True)
RAW = DecisionRules(level="raw")


def step(engine: Engine, ids: list[int]) -> np.ndarray:
    with engine.sequence() as sequence:
        return log_softmax_row(sequence.prefill(ids)).astype(np.float64)


def test_beginnings_that_paths_share_are_read_once() -> None:
    followers = branching([(1, 2, 3), (1, 2, 4), (5,)])
    assert followers == {(): [1, 5], (1,): [2], (1, 2): [3, 4]}
    assert branches_of(followers) == [(1, 2)]


def test_an_end_is_scored_only_where_a_path_begins_another() -> None:
    assert ended([(1, 2), (1, 3)]) == [(1, 2), (1, 3)]
    assert ended([(1, 2), (1,)]) == [(1, 2, END), (1, END)]


def test_many_beginnings_are_asked_for_in_parts_the_root_first() -> None:
    asked: list[list[TokenPath]] = []

    def read(branches: Sequence[TokenPath]) -> list[NDArray[np.float32]]:
        asked.append(list(branches))
        return [np.zeros((max(len(branch), 1), 8), np.float32) for branch in branches]

    found = score_paths([(1, 2, 3), (4, 5), (6,), (4, 7, 1, 2)], read, 3, ())
    assert asked == [[()], [(1, 2)], [(4, 7, 1)]]
    found = score_paths([(1, 2, 3), (4, 5), (6,)], read, 3, ())
    assert asked[3:] == [[()], [(1, 2), (4,)]]
    assert found.scores == pytest.approx([-3 * math.log(8), -2 * math.log(8), -math.log(8)])
    assert found.mass == pytest.approx(8**-3 + 8**-2 + 8**-1)
    assert found.probabilities == pytest.approx(np.array([1, 8, 64]) / 73)


def test_an_option_scores_the_sum_of_its_steps_of_fresh_reads(engine: Engine) -> None:
    with EngineBackend(engine) as backend:
        prompt = "<|im_start|>user\nWhere?<|im_end|>\n<|im_start|>assistant\n"
        found = backend.score_paths(prompt, NAMES)
        ids = backend.tokenizer.prompt_ids(prompt)
        texts = [backend.tokenizer.prompt_ids(prompt + name)[len(ids) :] for name in NAMES]
    ends = sorted(engine.tokenizer.eos_ids)
    for text, score, tokens in zip(texts, found.scores, found.num_tokens, strict=True):
        steps = [step(engine, ids + text[:at])[token] for at, token in enumerate(text)]
        last = math.log(sum(math.exp(step(engine, ids + text)[end]) for end in ends))
        assert score == pytest.approx(sum(steps) + last, abs=1e-12)
        assert tokens == len(text)
    assert found.with_end


def test_neither_reuse_nor_listing_nor_traffic_moves_a_bit(engine: Engine) -> None:
    listed = questions.choice("Where?", NAMES[::-1], "place", by_text=True)
    letters = questions.choice(QUESTION, OPTIONS, "section")
    few = questions.choice("Where?", NAMES[:2], "few", by_text=True)
    with Decider(engine) as decider, Decider(engine, DecisionRules(reuse=False)) as anew:
        (one,) = decider.decide(STATE, [PLACES]).decisions
        decider.decide("Another state.", [PLACES])
        section, again = decider.decide(STATE, [letters, listed]).decisions
        (shared,) = decider.decide(STATE, [few]).decisions
        (fresh,) = anew.decide(STATE, [few]).decisions
        assert section.question is letters
    assert one.probabilities == again.probabilities
    assert shared == fresh
    assert one.answer == one.top
    assert list(again.probabilities) == NAMES[::-1]
    assert one.question.key == listed.key != questions.choice("Where?", NAMES).key


def test_the_prompt_is_read_once(engine: Engine) -> None:
    state = STATE * 20
    with Decider(engine, RAW) as decider:
        tokens = decider.decide(state, [PLACES]).tokens
    length = len(engine.tokenizer.encode(state, parse_special=False))
    assert tokens.read_tokens < 1.5 * length < tokens.prompt_tokens / 4


def test_what_the_numbers_rest_on_is_told(engine: Engine) -> None:
    with Decider(engine, RAW) as decider:
        (found,) = decider.decide(STATE, [PLACES]).decisions
    assert found.probabilities == found.diagnostics["raw_probs"]
    assert found.diagnostics["readout"] == "text"
    assert list(found.diagnostics["option_tokens"]) == NAMES
    assert found.diagnostics["answer_mass"] < 0.1
    mass, tokens = found.warnings
    assert mass.startswith("all options together hold ")
    assert tokens.startswith("options have 1 to ")


def test_more_options_than_letters_are_read_by_their_text(engine: Engine) -> None:
    many = questions.choice("Which?", [f"{i}" for i in range(27)])
    assert many.by_text
    with Decider(engine, RAW) as decider:
        (found,) = decider.decide(STATE, [many]).decisions
    assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-12)
    assert len(found.probabilities) == 27


def test_an_option_cannot_pass_for_the_template(engine: Engine) -> None:
    typed = questions.choice("Which?", ["<|im_end|>", "mail"], by_text=True)
    with Decider(engine, RAW) as decider:
        (found,) = decider.decide(STATE, [typed]).decisions
    assert found.diagnostics["option_tokens"]["<|im_end|>"] > 1


def test_what_cannot_be_scored_is_refused(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        Decider(engine, DecisionRules(prior="batch")) as decider,
        pytest.raises(InputError, match="place is answered by its options' text"),
    ):
        decider.decide(STATE, [PLACES])
    with Decider(engine) as decider, pytest.raises(InputError, match="do not fit the context"):
        decider.decide(STATE * 200, [PLACES])
    with open_tiny(tmp_path_factory) as tiny, Decider(tiny, RAW) as decider:
        (found,) = decider.decide("s", [PLACES]).decisions
        assert sum(found.probabilities.values()) == pytest.approx(1, abs=1e-12)
