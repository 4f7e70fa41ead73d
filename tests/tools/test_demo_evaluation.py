"""The figures of the demo model's card: how they are computed, and that the card holds them."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.engine.kernels.head import log_softmax_row
from strata_cli.models import DEMO_MODEL_PATH
from tests.engine.passes import read_in_the_open
from tools.demo_model.evaluation.decisions import (
    Orders,
    answer,
    claim_report,
    read_prompts,
    task_report,
    turn_ids,
)
from tools.demo_model.evaluation.measures import (
    Judged,
    calibration_error,
    fit_temperature,
    judge,
    least_calibration_error,
    ranked_right,
    risk_threshold,
    select,
)
from tools.demo_model.evaluation.reading import PromptReader, shared_tokens
from tools.demo_model.evaluation.routing import expert_shares, routed_experts
from tools.demo_model.evaluation.sampling import reshuffled, rotations
from tools.demo_model.evaluation.texts import byte_counts, read_bits, windows
from tools.demo_model.tasks.drawing import Example, Turn, make_choice, make_claim

TEXT = "A small chess engine with a terminal interface. It reads and writes games."
ANIMALS = ("ant", "bee", "cow", "dog")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(EngineOptions(model=DEMO_MODEL_PATH, device="host")) as engine:
        yield engine


def choice(rng: Random) -> Turn:
    return make_choice("Which section?", "games", ["mail", "net", "python"], rng)


def judged(confidence: list[float], hit: list[int]) -> Judged:
    return Judged(np.array(confidence), np.array(hit, dtype=bool))


def test_the_likeliest_option_is_judged_with_its_probability() -> None:
    scores = [np.log([0.2, 0.1, 0.1]), np.log([0.3, 0.3])]
    found = judge(scores, [0, 1])
    assert found.confidence == pytest.approx([0.5, 0.5])
    assert found.hit.tolist() == [True, False]


def test_the_fitted_temperature_is_the_one_that_made_the_answers() -> None:
    rng = np.random.default_rng(0)
    scores = [rng.normal(0, 3, 4) for _ in range(4000)]
    shares = [np.exp(score / 2) / np.exp(score / 2).sum() for score in scores]
    right = [int(rng.choice(4, p=share)) for share in shares]
    assert fit_temperature(scores, right) == pytest.approx(2, rel=0.08)


def test_calibration_error_is_the_gap_within_bins() -> None:
    assert calibration_error(judged([0.5] * 30, [1, 0] * 15)) == pytest.approx(0)
    assert calibration_error(judged([0.9] * 30, [1, 0] * 15)) == pytest.approx(0.4)
    low_and_high = judged([0.1] * 14 + [0.9] * 16, [1] * 14 + [0] * 16)
    assert calibration_error(low_and_high) == pytest.approx(0.9), "gaps do not cancel"


def test_chance_alone_gives_an_error_that_more_prompts_lessen() -> None:
    few, many = (least_calibration_error(judged([0.8] * n, [1] * n)) for n in (150, 1500))
    assert 0.05 < few < 0.15
    assert many == pytest.approx(few / 10**0.5, rel=0.2)


def test_the_threshold_keeps_the_risk_and_as_many_answers_as_it_can() -> None:
    known = judged([0.9, 0.8, 0.7, 0.6, 0.5], [1, 1, 0, 1, 0])
    assert risk_threshold(known, 0.25) == 0.6
    assert risk_threshold(known, 0.1) == 0.8
    assert select(known, 0.6) == (0.8, 0.25)


def test_equal_confidences_are_answered_together_or_not_at_all() -> None:
    known = judged([0.9, 0.9, 0.9], [1, 1, 0])
    assert risk_threshold(known, 0.05) == float("inf")
    assert select(known, float("inf")) == (0, 0)


def test_ranking_ignores_an_inclination() -> None:
    holds, fails = np.array([-0.1, -0.2]), np.array([-0.15, -0.3])
    assert ranked_right(holds, fails) == ranked_right(holds - 5, fails - 5) == 0.75


def test_a_reshuffled_order_is_no_rotation_and_keeps_the_right_option() -> None:
    rng = Random(0)
    turn = Turn("choice", "?", ANIMALS, 2)
    for _ in range(50):
        other = reshuffled(turn, rng)
        assert other.options not in {rotated.options for rotated in rotations(turn)}
        assert other.options[other.answer] == "cow"


def test_levels_keep_their_order() -> None:
    assert rotations(Turn("score", "?", ANIMALS, 0)) == [Turn("score", "?", ANIMALS, 0)]


def test_shared_tokens_leave_each_prompt_one() -> None:
    assert shared_tokens([[1, 2, 3], [1, 2, 3, 4]]) == [1, 2]
    assert shared_tokens([[1, 2, 3], [1, 5, 3]]) == [1]
    assert shared_tokens([[1, 2]]) == [1]


def test_orders_are_summed_up_by_option() -> None:
    raw, other = np.log([0.6, 0.4]), np.log([0.1, 0.9])
    found = answer(0, [raw, other], [])
    assert found.changed == 1
    assert np.argmax(found.raw) == 0
    assert np.argmax(found.averaged) == 1
    assert found.mass == pytest.approx(1)
    assert found.changed_averaged is None
    assert answer(0, [raw], []).changed is None


def test_reports_leave_out_what_was_not_read() -> None:
    alone = [answer(0, [np.log([0.6, 0.4])], [])] * 3
    report = task_report(alone, [])
    assert report["raw"] == {"accuracy": 1.0, "half_width": 0.0}
    assert "averaged" not in report


def test_claims_are_summed_up_by_question() -> None:
    rng = Random(1)
    examples = [
        Example("x", "s", (make_claim("Is it?", number % 2 == 0, rng),)) for number in range(40)
    ]
    answered = []
    for example in examples:
        turn = example.turns[0]
        yes = 0.9 if turn.options[turn.answer] == "Yes" else 0.8
        shares = [yes if option == "Yes" else 1 - yes for option in turn.options]
        answered.append(answer(turn.answer, [np.log(shares)], []))
    expected = {"prompts": 40, "accuracy": 0.5, "yes": 1.0, "centred": 1.0, "ranked": 1.0}
    assert claim_report(examples, answered) == {"Is it?": expected}


def test_shared_reads_equal_fresh_ones(engine: Engine) -> None:
    rng = Random(2)
    turns = [choice(rng), make_claim("Is this a game?", True, rng), choice(rng)]
    groups = [
        [turn_ids(engine, TEXT * (n + 1), t) for t in rotations(turn)]
        for n, turn in enumerate(turns)
    ]
    with PromptReader(engine) as reader:
        shared = list(reader.read_groups(groups))
        tokens = reader.tokens
    assert tokens < 0.6 * sum(len(prompt) for group in groups for prompt in group)
    for group, rows in zip(groups, shared, strict=True):
        for prompt, row in zip(group, rows, strict=True):
            with engine.sequence() as sequence:
                fresh = log_softmax_row(sequence.prefill(prompt))
            assert np.array_equal(fresh.view(np.uint32), row.view(np.uint32))


def test_the_model_finds_the_chess_engine_in_every_order(engine: Engine) -> None:
    example = Example("x", TEXT, (choice(Random(3)),))
    with PromptReader(engine) as reader:
        (found,) = read_prompts(engine, reader, [example], Orders(True, 1), lambda _: None)
    assert found.right == np.argmax(found.raw) == np.argmax(found.averaged)
    assert found.changed == 0
    assert found.changed_averaged is False
    assert found.mass > 0.9


def test_bits_are_those_of_the_tokens_behind_the_first(engine: Engine) -> None:
    (ids,) = windows(engine, TEXT, 1024)
    assert byte_counts(engine, ids).sum() == len(TEXT.encode())
    bits = read_bits(engine, ids)
    assert len(bits) == len(ids) - 1
    with engine.sequence() as sequence:
        last = log_softmax_row(sequence.prefill(ids[:-1]))[ids[-1]]
    assert bits[-1] == pytest.approx(-last / np.log(2), rel=1e-6)


def test_windows_hold_every_token_once(engine: Engine) -> None:
    (whole,) = windows(engine, TEXT, 1024)
    parts = list(windows(engine, TEXT, 7))
    assert [token for part in parts for token in part] == whole
    assert all(len(part) == 7 for part in parts[:-1])


def test_expert_shares_count_what_the_router_chose(engine: Engine) -> None:
    (ids,) = windows(engine, TEXT, 1024)
    chosen = routed_experts(engine, ids)
    for found, expected in zip(chosen, read_in_the_open(engine, ids).router_ids, strict=True):
        assert np.array_equal(found, expected)
    shares = expert_shares(engine, [ids])
    assert shares.shape == (engine.spec.num_layers, engine.spec.num_experts)
    assert shares.sum(axis=1) == pytest.approx(1)
    assert shares[3, 5] == pytest.approx((chosen[3] == 5).mean())
