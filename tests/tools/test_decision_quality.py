"""The table of decisions' quality follows from the samples that were read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from strata_cli.decisions import questions
from strata_cli.decisions.decider import Decider
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tools.decision_quality.__main__ import main
from tools.decision_quality.asking import Labelled, side_by_side
from tools.decision_quality.priors import Read, Way, l0, prior_table, read_questions
from tools.decision_quality.reading import lines, read_all
from tools.decision_quality.table import fits_of

OPTIONS = ["fonts", "games", "mail"]
MARKS = ("<!-- table: quality -->", "<!-- end -->")


def lines_of(task: str, count: int, seed: int, question: str = "q") -> list[dict[str, Any]]:
    """Answers of a judge that is less sure than it is right."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        sure = float(rng.uniform(0.5, 0.8))
        line = {"task": task, "number": number, "question": question, "flips": [0.5, 0.25]}
        for level in ("raw", "l0", "plain"):
            line[level] = [sure, 1 - sure]
        found.append(line | {"right": int(rng.random() > sure + 0.15)})
    return found


@pytest.fixture(scope="module")
def engine() -> Any:
    options = EngineOptions(model=DEMO_MODEL_PATH, device="host", threads=1, will_chat=True)
    with Engine.open(options) as engine:
        yield engine


def test_a_table_is_written_between_its_marks(tmp_path: Path) -> None:
    found = lines_of("section4", 121, 3) + lines_of("kind_yes_no", 99, 4)
    found[0]["relisted"] = [[True, False], [False, False]]
    samples, page = tmp_path / "samples", tmp_path / "page.md"
    samples.write_text("".join(json.dumps(line) + "\n" for line in found))
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    result = CliRunner().invoke(main, ["show", str(samples), "--page", str(page)])
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.startswith(f"before\n{MARKS[0]}\n| Task |")
    assert "| the same, 4 sections | 120 | " in text  # pairs: one in each half
    assert "0.500 / 0.000 (2)" in text
    assert text.count("0.500 / 0.250") == 3
    assert "kind of another" not in text  # too few
    assert "| all questions with a temperature of their own | 120 |" in text
    assert "| all of these together | 120 |" in text
    assert text.endswith(f"\n{MARKS[1]}\nafter\n")
    assert "old" not in text


def test_no_table_comes_from_too_few_samples(tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines_of("section4", 99, 3)))
    result = CliRunner().invoke(main, ["show", str(samples)])
    assert result.exit_code == 1
    assert "no task has 100 states" in result.output


def test_each_state_is_judged_by_what_the_other_half_was_fitted_to() -> None:
    first, second = fits_of("section4", lines_of("section4", 200, 5))
    assert first.num_tested == second.num_tested == 100
    assert first.temperature != second.temperature
    assert max(first.temperature, second.temperature) < 1  # it was less sure than right
    assert not set(first.judged["L0"].confidence) & set(second.judged["L0"].confidence)


def test_questions_are_fitted_by_themselves_where_the_task_has_them() -> None:
    both = lines_of("debtag_yes_no", 100, 1, "a") + lines_of("debtag_yes_no", 100, 2, "b")
    assert len(fits_of("debtag_yes_no", both)) == 4
    for line in both:
        line["task"] = "kind_yes_no"
    assert len(fits_of("kind_yes_no", both)) == 2


def test_the_usual_prior_is_that_of_l0(engine: Engine) -> None:
    asked = questions.choice("Which section is it?", OPTIONS)
    states = [Labelled(asked, text, 1) for text in ("A chess game.", "A mail tool.")]
    (read,) = read_questions(engine, states)
    with Decider(engine) as decider:
        for one, answer in zip(states, l0(read, Way(3)), strict=True):
            (decision,) = decider.decide(one.state, [asked]).decisions
            assert answer.tolist() == list(decision.probabilities.values())


def test_a_prior_that_says_nothing_changes_nothing() -> None:
    spec, even = questions.yes_no("any").spec, np.full((2, 2), 0.5)
    table = np.array([[0.9, 0.1], [0.3, 0.7]])
    read = Read(spec, [[0, 1], [1, 0]], [even] * 16, [table], [0])
    assert [one.tolist() for one in l0(read, Way(16))] == [one.tolist() for one in l0(read, Way(0))]
    assert prior_table({"section10": [read]}).count("1.000 / 0.197") == 4


def test_groups_have_one_question() -> None:
    asked = [questions.choice(text, OPTIONS) for text in ("A?", "B?")]
    states = [(number, Labelled(asked[number % 2], "", 0)) for number in range(5)]
    groups = [[number for number, _ in group] for group in side_by_side(states, 2)]
    assert groups == [[0, 2], [1, 3], [4]]


def test_reading_goes_on_behind_what_is_there(tmp_path: Path, engine: Engine) -> None:
    asked = questions.choice("Which section is it?", OPTIONS)
    states = {"section4": [Labelled(asked, text, 1) for text in ("A chess game.", "A mail tool.")]}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert list(read_all(engine, states, whole, 1e18)) == [2]
    first, _ = lines(whole)
    assert [other for _, other in first["relisted"]] == [False, False]
    parts.write_text(json.dumps(first) + "\n")
    assert list(read_all(engine, states, parts, 1e18)) == [1]
    found = [{**line, "relisted": None} for line in lines(parts)]
    assert found == [{**line, "relisted": None} for line in lines(whole)]
    assert list(read_all(engine, states, parts, 1e18)) == []
