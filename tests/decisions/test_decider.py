"""An answer depends on state, question, model and build; on nothing else, in any bit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import anyjev
import numpy as np
import pytest

from strata_cli.decisions import questions
from strata_cli.decisions.backend import EngineBackend
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.rules import DEFAULT_RULES, DecisionRules, Level
from strata_cli.engine.engine import Engine
from strata_cli.engine.model.chat_template import ChatTemplate
from strata_cli.errors import InputError
from tests.decisions.asking import OPTIONS, QUESTION, STATE, open_tiny

CHOICE = questions.choice(QUESTION, OPTIONS, "section")
YES_NO = questions.yes_no("Does this package belong to the section games?", "game")
SCALE = questions.scale("How fast is it?", 0, 10, id="speed")
NO_PRIOR = DecisionRules(prior="none")
ANEW = DecisionRules(prior="none", reuse=False)
LEVELS = questions.levels("How fast is it?", ["slow", "fast"], "pace")
ALL = [CHOICE, YES_NO, SCALE, LEVELS]


def test_the_likeliest_option_is_right_and_probabilities_sum_to_one(engine: Engine) -> None:
    with Decider(engine) as decider:
        choice, yes_no, scale, levels = decider.decide(STATE, ALL).decisions
    assert choice.answer == choice.top == "games"
    assert yes_no.answer is (yes_no.probabilities["Yes"] >= 0.5)
    for decision in (choice, yes_no, scale, levels):
        assert sum(decision.probabilities.values()) == pytest.approx(1, abs=1e-12)
        assert list(decision.probabilities) == list(decision.question.options)
    expected = np.dot(list(scale.probabilities.values()), [1, 3, 5, 7, 9])
    assert scale.answer == pytest.approx(expected)
    assert levels.answer == pytest.approx(levels.probabilities["fast"])


def test_every_listing_of_the_options_gives_equal_probabilities(engine: Engine) -> None:
    found = set()
    with Decider(engine) as decider:
        for listing in itertools.islice(itertools.permutations(OPTIONS), 0, 24, 5):
            question = questions.choice(QUESTION, listing)
            (decision,) = decider.decide(STATE, [question]).decisions
            assert tuple(decision.probabilities) == listing
            found.add(tuple(sorted(decision.probabilities.items())))
    assert len(found) == 1


def test_one_read_of_the_state_changes_no_bit(engine: Engine) -> None:
    rules = DecisionRules(reuse=False)
    with Decider(engine) as decider, Decider(engine, rules) as anew:
        shared, fresh = (one.decide(STATE, [CHOICE]) for one in (decider, anew))
    assert shared.as_dict() == fresh.as_dict()
    assert fresh.tokens.reused_tokens == 0
    assert fresh.tokens.read_tokens == shared.tokens.prompt_tokens
    assert shared.tokens.reused_tokens > shared.tokens.prompt_tokens / 2


def test_a_long_state_is_read_once_for_all_questions(engine: Engine) -> None:
    state = STATE * 60
    with Decider(engine, NO_PRIOR) as decider:
        tokens = decider.decide(state, ALL).tokens
    length = len(engine.tokenizer.encode(state, parse_special=False))
    assert tokens.prompt_tokens > 8 * length
    assert tokens.read_tokens < 1.9 * length


def test_each_of_many_prompts_is_rendered_once_and_the_state_read_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered, render = list[str](), ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, **more: Any) -> str:
        rendered.append(messages[-1]["content"])
        return render(self, messages, **more)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    names = [f"ship {name}" for name in ("a b", "a c", "a d", *"efghij")]
    many, state = questions.choice(QUESTION, names), STATE * 20
    with Decider(engine, NO_PRIOR) as decider, Decider(engine, ANEW) as anew:
        found = decider.decide(state, [many])
        assert len(rendered) == len(set(rendered)) == len(names) + 1  # and one to compare with
        assert anew.decide(state, [many]).as_dict() == found.as_dict()
        longer = decider.decide(state * 2, [many])
    length = len(engine.tokenizer.encode(state, parse_special=False))
    assert longer.tokens.read_tokens - found.tokens.read_tokens < 1.1 * length


def test_neither_traffic_nor_other_questions_nor_ids_move_an_answer(engine: Engine) -> None:
    renamed = questions.choice(QUESTION, OPTIONS, "another id")
    with Decider(engine) as decider:
        alone = decider.decide(STATE, [CHOICE]).decisions[0]
        for other in range(3):
            decider.decide(f"State {other}", [CHOICE])
        among = decider.decide(STATE, [LEVELS, renamed, YES_NO]).decisions[1]
    assert replace(among, question=CHOICE) == alone


def test_values_are_those_of_anyjev(engine: Engine) -> None:
    with EngineBackend(engine, reuse=False) as backend, Decider(engine) as decider:
        theirs = anyjev.Decider(backend, prior="content_free", canonical_order=True).decide(
            STATE, [question.spec for question in (YES_NO, LEVELS)]
        )
        ours = decider.decide(STATE, [YES_NO, LEVELS]).as_dict()
    for id, expected in theirs.to_dict()["questions"].items():
        diagnostics = ours["questions"][id].pop("diagnostics")
        assert diagnostics["answer_mass"] == theirs[id].diagnostics["answer_mass"]
        for key, value in expected.items():
            assert ours["questions"][id][key] == pytest.approx(value, abs=1e-15), key


def test_raw_reads_one_prompt_with_options_as_listed(engine: Engine) -> None:
    rules = DecisionRules(level="raw")
    with Decider(engine, rules) as decider:
        there = decider.decide(STATE, [CHOICE]).decisions[0]
        back = decider.decide(STATE, [questions.choice(QUESTION, OPTIONS[::-1])]).decisions[0]
    assert there.level == "raw"
    assert there.probabilities == there.diagnostics["raw_probs"]
    assert there.probabilities["games"] != back.probabilities["games"]


def test_a_batch_prior_depends_on_traffic_and_says_so(engine: Engine) -> None:
    rules = DecisionRules(prior="batch")
    assert rules.depends_on_traffic
    assert not DEFAULT_RULES.depends_on_traffic
    with Decider(engine, rules) as decider:
        first = decider.decide(STATE, [YES_NO]).decisions[0]
        for other in range(7):
            decider.decide(f"State {other}", [YES_NO])
        later = decider.decide(STATE, [YES_NO]).decisions[0]
    assert first.diagnostics["prior_method"] == "none"
    assert later.diagnostics["prior_method"] == "batch"
    assert first.probabilities != later.probabilities


@pytest.mark.parametrize(
    ("state", "asked", "message"),
    [
        (" \n", [CHOICE], "the state is empty"),
        (STATE, [], "no question"),
        (STATE, [CHOICE, YES_NO, CHOICE], "two questions have the id 'section'"),
        (STATE * 200, [CHOICE], r"state and question take \d+ tokens"),
    ],
)
def test_what_cannot_be_decided_is_refused(
    engine: Engine, state: str, asked: list[questions.Question], message: str
) -> None:
    with Decider(engine) as decider, pytest.raises(InputError, match=message):
        decider.decide(state, asked)


def test_labels_of_several_tokens_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with open_tiny(tmp_path_factory) as engine, Decider(engine) as decider:
        with pytest.raises(InputError, match="'Yes' is not a single token") as caught:
            decider.decide(STATE, [YES_NO])
        assert "labelled by Yes and No" in caught.value.hint


def test_labels_that_collide_are_refused(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with Decider(engine) as decider:
        tokenizer = decider._backend.tokenizer
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: [35])
        with pytest.raises(InputError, match="label tokens collide"):
            decider.decide(STATE, [CHOICE])


@pytest.mark.parametrize("question", [CHOICE, YES_NO, SCALE])
@pytest.mark.parametrize("level", ["raw", "L0"])
def test_states_side_by_side_are_as_if_alone(
    engine: Engine, question: questions.Question, level: Level
) -> None:
    states = [STATE, "A mail agent.", "Fonts. " * 90, STATE, "A library.", f"{STATE} Again."]
    rules = DecisionRules(level=level, prior="none")
    with Decider(engine, rules) as decider, Decider(engine, rules, lanes=4) as several:
        alone = [decider.decide(state, [question]).decisions for state in states]
        first = several.decide_many(states, [question])
        again = several.decide_many(states[::-1], [question])[::-1]
    assert [found.decisions for found in first] == alone
    assert [found.decisions for found in again] == alone
    tokens, has_orders = first[0].tokens, level == "L0" and question is not SCALE
    assert tokens.read_tokens < tokens.prompt_tokens * (0.7 if has_orders else 1)
    assert first[1].tokens.read_tokens == 0


def test_many_states_with_a_bad_one_are_refused_together(engine: Engine) -> None:
    with Decider(engine, lanes=2) as decider:
        for states, message in ((["s", " "], "is empty"), (["s", STATE * 200], "do not fit")):
            with pytest.raises(InputError, match=message):
                decider.decide_many(states, [YES_NO])
        several = decider.decide_many(["s", "t"], [YES_NO, SCALE])
        assert [len(one.decisions) for one in several] == [2, 2]
