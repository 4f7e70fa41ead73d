"""Temperatures: fitted, told what they are worth, kept, and refused where they do not belong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest

from strata_cli.decisions import questions
from strata_cli.decisions.calibration import Calibration, calibration_as_json, parse_calibration
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.fitting import Sample, fit, sample
from strata_cli.decisions.labelled import option_index, right_answers
from strata_cli.decisions.measures import (
    Judged,
    calibration_error,
    cooled,
    fit_temperature,
    judge,
    risk_threshold,
    select,
)
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.engine import Engine
from strata_cli.engine.model.fingerprint import model_hash
from strata_cli.errors import InputError
from strata_cli.models import DEMO_MODEL_PATH
from tests.decisions.asking import OPTIONS, QUESTION, STATE

CHOICE = questions.choice(QUESTION, OPTIONS, "section")
YES_NO = questions.yes_no("Is this a game?", "game")
SCALE = questions.scale("How fast?", 0, 10, id="speed")
LEVELS = questions.levels("How fast?", ["slow", "fast"], "pace")


def samples(count: int, overconfidence: float) -> list[Sample]:
    """Answers whose log-probabilities are so many times too large."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        true = rng.dirichlet(np.ones(4))
        right = int(rng.choice(4, p=true))
        said = cooled(true, 1 / overconfidence)
        found.append(Sample(said, said, right, (0.25, 0.125)))
    return found


def test_a_temperature_undoes_overconfidence() -> None:
    found = fit(CHOICE, samples(2000, 3.0))
    assert found.temperature == pytest.approx(3.0, rel=0.1)
    assert found.num_fitted == found.num_tested == 1000
    raw, l0, l1 = (found.levels[level] for level in ("raw", "L0", "L1"))
    assert raw.accuracy == l0.accuracy == l1.accuracy
    assert l1.ece < 0.05 < 0.15 < l0.ece
    assert (raw.flips, l0.flips, l1.flips) == (0.25, 0.125, 0.125)


def test_orders_flip_where_there_is_more_than_one(engine: Engine) -> None:
    with Decider(engine) as decider:
        found = decider.decide(STATE, [CHOICE, YES_NO, SCALE, LEVELS]).decisions
    assert [one.diagnostics["permutations"] for one in found] == [4, 2, 1, 1]
    assert [sample(one, 0).flips is None for one in found] == [False, False, True, True]


def test_few_states_are_refused() -> None:
    with pytest.raises(InputError, match="99 labelled states are too few: 100 are the least"):
        fit(CHOICE, samples(99, 1.0))
    assert fit(CHOICE, samples(100, 1.0)).num_tested == 50


@pytest.mark.parametrize(
    ("rights", "warnings"),
    [
        ([0, 0, 1, 1, 2, 2, 3, 3], []),
        (
            [0, 1],
            [
                "none of the 50 states that were fitted on has the label 'games', and 50 of the 50 "
                "others have: shuffle the lines of the file, and calibrate again",
                "none of the 50 states that the figures are about has the label 'mail', and 50 of "
                "the 50 others have: shuffle the lines of the file, and calibrate again",
            ],
        ),
        (
            [0] * 99 + [3],
            [
                "none of the 50 states that were fitted on has the label 'fonts', and 1 of the 50 "
                "others have: label more states so, and calibrate again",
            ],
        ),
        ([1], ["all states have the label 'games': what is fitted and measured says nothing"]),
    ],
)
def test_a_half_without_a_label_is_warned_of(rights: list[int], warnings: list[str]) -> None:
    found = [
        one._replace(right=right)
        for one, right in zip(samples(100, 1.0), itertools.cycle(rights), strict=False)
    ]
    told = [one for one in fit(CHOICE, found).warnings if not one.startswith("a temperature of")]
    assert len(told) == len(warnings)
    for one, expected in zip(told, warnings, strict=True):
        assert one.startswith(expected)


def test_measures_of_a_case_done_by_hand() -> None:
    judged = Judged(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, True, False, True]))
    assert calibration_error(judged) == pytest.approx((0.1 + 0.2 + 0.7 + 0.4) / 4)
    assert risk_threshold(judged, 0.05) == 0.8
    assert risk_threshold(judged, 0.25) == 0.6
    assert select(judged, 0.65) == pytest.approx((0.75, 1 / 3))
    assert select(judged, np.inf) == (0.0, 0.0)
    same = Judged(np.array([0.9, 0.9]), np.array([True, False]))
    assert risk_threshold(same, 0.05) == np.inf
    assert judge([np.array([0.5, 0.5]), np.array([0.1, 0.2, 0.7])], [0, 1]).hit.tolist() == [1, 0]


def test_cooling_keeps_order_and_sum_whatever_the_order_of_options() -> None:
    values = np.array([0.6, 0.3, 0.1, 0.0])
    warm = cooled(values, 2.5)
    assert warm.tolist() == cooled(values[::-1].copy(), 2.5)[::-1].tolist()
    assert warm.sum() == pytest.approx(1, abs=1e-15)
    assert warm[0] > warm[1] > warm[2] > warm[3] == 0
    assert fit_temperature([np.array([1.0, 0.0])] * 4, [0, 0, 1, 0]) == 10.0


@pytest.mark.parametrize(
    ("question", "label", "index"),
    [
        (CHOICE, "games", 1),
        (YES_NO, "Yes", 0),
        (YES_NO, "no", 1),
        (YES_NO, True, 0),
        (YES_NO, False, 1),
        (LEVELS, "fast", 1),
        (LEVELS, 0, 0),
        (SCALE, 10, 4),
        (SCALE, 3.9, 1),
        (SCALE, "4 to 6", 2),
    ],
)
def test_labels(question: questions.Question, label: object, index: int) -> None:
    assert option_index(question, label) == index


@pytest.mark.parametrize(
    ("question", "label"),
    [
        *((CHOICE, "web"), (CHOICE, 1), (CHOICE, None), (YES_NO, "maybe"), (YES_NO, 1)),
        *((LEVELS, 2), (LEVELS, 0.5), (LEVELS, True), (SCALE, 10.1), (SCALE, "5")),
    ],
)
def test_labels_that_are_none_of_the_answers(question: questions.Question, label: object) -> None:
    with pytest.raises(InputError, match="is none of the answers"):
        option_index(question, label)


def test_labels_of_several_questions_go_by_id() -> None:
    both = [CHOICE, YES_NO]
    assert right_answers(both, {"labels": {"game": True, "section": "mail"}}) == [0, 0]
    assert right_answers([YES_NO], {"label": False}) == [1]
    for asked, fields, message in (
        ([CHOICE], {}, "label is missing"),
        (both, {"label": "mail"}, "labels is no object"),
        (both, {"labels": {"section": "mail"}}, "the label of 'game' is missing"),
    ):
        with pytest.raises(InputError, match=message):
            right_answers(asked, fields)


def calibration(temperature: float = 2.0) -> Calibration:
    temperatures = {question.key: temperature for question in (CHOICE, YES_NO, SCALE)}
    return Calibration("c.json", "abc" * 21 + "d", "content_free", temperatures)


def test_a_file_keeps_what_was_fitted() -> None:
    known = calibration()
    entries = {key: {"text": key} for key in known.temperatures}
    data = calibration_as_json(known, "model", entries)
    assert parse_calibration(data, "c.json") == known
    assert orjson.loads(data)["questions"][CHOICE.key] == {"temperature": 2.0, "text": CHOICE.key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"{", "is no calibration"),
        (lambda _: b"[]", "is no calibration"),
        (lambda data: data.replace(b"strata calibration", b"else"), "is no calibration"),
        (lambda data: data.replace(b'"version": 1', b'"version": 2'), "of version 2, and 1 is"),
        (lambda data: data.replace(b": 2.0", b": 0.0"), "has a temperature of 0.0"),
        (lambda data: data.replace(b": 2.0", b": true"), "has a temperature of True"),
        (lambda data: data.replace(b"questions", b"answers"), "is no calibration"),
    ],
)
def test_a_damaged_file_is_refused(change: Callable[[bytes], bytes], message: str) -> None:
    known = calibration()
    data = calibration_as_json(known, "model", {key: {} for key in known.temperatures})
    with pytest.raises(InputError, match=message):
        parse_calibration(change(data), "c.json")


def test_another_model_prior_or_question_is_refused(engine: Engine) -> None:
    known = calibration()
    known.check(known.model_hash, "content_free")
    with pytest.raises(InputError, match="was made for another model: abcabcabcabc, and this one"):
        known.check("0" * 64, "content_free")
    with pytest.raises(InputError, match="was made with --prior content_free, and this is none"):
        known.check(known.model_hash, "none")
    rules = DecisionRules(level="L1", calibration=known)
    with (
        Decider(engine, rules) as decider,
        pytest.raises(InputError, match="was made for other questions than 'How fast"),
    ):
        decider.decide(STATE, [LEVELS])


def test_l1_is_l0_at_a_temperature_whatever_id_and_order(engine: Engine) -> None:
    rules = DecisionRules(level="L1", calibration=calibration())
    listed = questions.choice(QUESTION, OPTIONS[::-1], "another")
    with Decider(engine) as plain, Decider(engine, rules) as warm:
        before = plain.decide(STATE, [CHOICE, YES_NO, SCALE]).decisions
        after = warm.decide(STATE, [listed, YES_NO, SCALE]).decisions
    for l0, l1 in zip(before, after, strict=True):
        logs = {option: np.log(value) / 2 for option, value in l0.probabilities.items()}
        total = np.exp(list(logs.values())).sum()
        for option, value in l1.probabilities.items():
            assert value == pytest.approx(np.exp(logs[option]) / total, abs=1e-12)
        assert (l1.level, l1.top) == ("L1", l0.top)
        assert l1.diagnostics["temperature"] == 2.0
        assert l1.diagnostics["raw_probs"] == l0.diagnostics["raw_probs"]
    assert after[1].answer == before[1].answer
    centres = [1, 3, 5, 7, 9]
    assert after[2].answer == pytest.approx(np.dot(list(after[2].probabilities.values()), centres))
    assert replace(before[0], question=listed).confidence > after[0].confidence


def test_a_models_hash_follows_from_its_bytes(tmp_path: Path) -> None:
    other = tmp_path / "m.gguf"
    data = bytearray(DEMO_MODEL_PATH.read_bytes())
    other.write_bytes(data)
    assert model_hash(other) == model_hash(DEMO_MODEL_PATH)
    data[-5] ^= 1
    other.write_bytes(data)
    assert model_hash(other) != model_hash(DEMO_MODEL_PATH)
