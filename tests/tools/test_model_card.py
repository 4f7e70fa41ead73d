"""The model card: its tables are those of the stored results, and these of the shipped file."""

from __future__ import annotations

import hashlib

import pytest

from strata_cli.models import DEMO_MODEL_PATH
from tools.demo_model.card import CARD, RESULTS, TABLES, TASKS, Figures, effective, filled
from tools.demo_model.evaluation.sampling import PLANS

FIGURES = Figures.load(RESULTS)


def test_figures_are_those_of_the_shipped_file() -> None:
    digest = hashlib.sha256(DEMO_MODEL_PATH.read_bytes()).hexdigest()
    assert FIGURES.engine["model"]["sha256"] == digest


def test_every_planned_task_was_measured_and_is_shown() -> None:
    assert set(FIGURES.engine["tasks"]) == set(PLANS) == set(TASKS)
    for name, found in FIGURES.engine["tasks"].items():
        assert found["prompts"] <= PLANS[name].test


def test_the_card_holds_every_table_as_it_was_measured() -> None:
    card = CARD.read_text("utf-8")
    for name in TABLES:
        assert f"<!-- table: {name} -->" in card
    assert card == filled(card, FIGURES), "run python -m tools.demo_model.card"


def test_a_changed_table_is_written_anew() -> None:
    card = "a\n<!-- table: positions -->\nold\n<!-- end -->\nb"
    again = filled(card, FIGURES)
    assert "old" not in again
    assert again.startswith("a\n<!-- table: positions -->\n| Positions |")
    assert again.endswith("|\n<!-- end -->\nb")
    assert filled(again, FIGURES) == again


def test_an_empty_table_takes_nothing_with_it() -> None:
    empty = "<!-- table: positions -->\n<!-- end -->\n"
    assert filled(f"{empty}between\n{empty}", FIGURES).count("between") == 1
    assert filled(f"{empty}{empty}", FIGURES) == filled(empty, FIGURES) * 2


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(KeyError):
        filled("<!-- table: nothing -->\n<!-- end -->", FIGURES)


def test_effective_experts_are_all_when_even_and_one_when_alone() -> None:
    assert effective([0.25] * 4) == pytest.approx(4)
    assert effective([1.0, 0.0]) == pytest.approx(1)
