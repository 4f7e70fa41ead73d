"""What samples say, as the table of docs/decisions.md."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from strata_cli.decisions import questions
from strata_cli.decisions.fitting import LEAST_STATES, Fit, Sample, fit
from strata_cli.decisions.measures import Judged, calibration_error, judge
from tools.decision_quality.asking import TASKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "decisions.md"
END_MARK = "<!-- end -->"
LEVELS = ("raw", "L0", "L1")
NUM_DRAWS = 200
ANY_QUESTION = questions.yes_no("any")  # a fit is told what it is about, and does not look
HEADER = (
    "Task",
    "States",
    "Temperature",
    "Accuracy raw / L0 without prior / L0",
    "Another answer when relisted, raw / L0 (relistings)",
    "ECE raw / L0 / L1 (by chance)",
    "Coverage at 5 % risk raw / L0 / L1 (risk of L1)",
    "Other answer of a single order, raw / L0",
)

Line = dict[str, Any]


def write_table(samples: Iterable[Line], page: Path) -> None:
    """Write the table of samples between its marks in a page.

    Raises:
        ClickException: no task has states enough.
    """
    by_task: dict[str, list[Line]] = defaultdict(list)
    for one in samples:
        by_task[one["task"]].append(one)
    rows, fits, lines = [HEADER, ("---",) * len(HEADER)], list[Fit](), list[Line]()
    for task in TASKS:
        found = sorted(by_task[task], key=lambda one: int(one["number"]))
        if fitted := fits_of(task, found):
            rows.append(_row(TASKS[task].title, fitted, found))
            fits += fitted
            lines += found
    if not fits:
        raise click.ClickException(f"no task has {LEAST_STATES} states: read more")
    rows.append(_row("all of these together", fits, lines))
    put(page, "quality", "\n".join(f"| {' | '.join(row)} |" for row in rows))


def put(page: Path, name: str, table: str) -> None:
    """Write a table between its marks in a page."""
    mark = f"<!-- table: {name} -->"
    pattern = re.compile(f"{mark}.*?{END_MARK}", re.DOTALL)
    block = f"{mark}\n{table}\n{END_MARK}"
    page.write_text(pattern.sub(lambda _: block, page.read_text("utf-8")), "utf-8")


def fits_of(task: str, found: Sequence[Line]) -> list[Fit]:
    """Two fits for each question of a task that has states enough, or for all questions together.

    The second swaps the halves, so every state is judged by what the other half was fitted to.
    """
    groups: dict[str, list[Line]] = defaultdict(list)
    for one in found:
        groups[one["question"] if TASKS[task].has_questions else task].append(one)
    fits = []
    for group in groups.values():
        samples = [_sample(one) for one in group[: len(group) // 2 * 2]]
        if len(samples) >= LEAST_STATES:
            swapped = [samples[place ^ 1] for place in range(len(samples))]
            fits += [fit(ANY_QUESTION, samples), fit(ANY_QUESTION, swapped)]
    return fits


def _sample(one: Line) -> Sample:
    flips = one["flips"]
    return Sample(
        np.array(one["raw"]),
        np.array(one["l0"]),
        one["right"],
        None if flips is None else (flips[0], flips[1]),
    )


def _row(title: str, fits: Sequence[Fit], found: Sequence[Line]) -> tuple[str, ...]:
    judged = {level: _together(fits, level) for level in LEVELS}
    right = [one["right"] for one in found]
    accuracies = [
        judge([np.array(one[level]) for one in found], right).accuracy
        for level in ("raw", "plain", "l0")
    ]
    temperatures = [one.temperature for one in fits]
    errors = " / ".join(f"{calibration_error(judged[level]):.3f}" for level in LEVELS)
    return (
        title,
        f"{len(judged['L1'].hit):,}",
        f"{min(temperatures):.2f} to {max(temperatures):.2f}",
        " / ".join(f"{one:.3f}" for one in accuracies),
        _relisted(found),
        f"{errors} ({_by_chance(judged['L1']):.3f})",
        _coverage(fits),
        _single_orders(found),
    )


def _together(fits: Sequence[Fit], level: str) -> Judged:
    """The answers of several fits to the states that they were not fitted on."""
    judged = [one.judged[level] for one in fits]
    return Judged(
        np.concatenate([one.confidence for one in judged]),
        np.concatenate([one.hit for one in judged]),
    )


def _by_chance(judged: Judged) -> float:
    """The calibration error that a perfectly calibrated model shows with so few answers."""
    drawn = np.random.default_rng(0).random((NUM_DRAWS, len(judged.hit))) < judged.confidence
    return float(np.mean([calibration_error(Judged(judged.confidence, hit)) for hit in drawn]))


def _relisted(found: Sequence[Line]) -> str:
    """How often another listing of the options had another answer; at L0 another bit counts."""
    changed = [one for line in found for one in line.get("relisted", ())]
    if not changed:
        return "-"
    raw, l0 = (sum(pair[level] for pair in changed) / len(changed) for level in (0, 1))
    return f"{raw:.3f} / {l0:.3f} ({len(changed):,})"


def _coverage(fits: Sequence[Fit]) -> str:
    shares = []
    for level in LEVELS:
        given = [one.levels[level].coverage * one.num_tested for one in fits]
        wrong = [one.levels[level].risk * some for one, some in zip(fits, given, strict=True)]
        shares.append(f"{sum(given) / sum(one.num_tested for one in fits):.2f}")
    return f"{' / '.join(shares)} ({sum(wrong) / max(sum(given), 1):.3f})"


def _single_orders(found: Sequence[Line]) -> str:
    raw, l0 = np.mean([one["flips"] for one in found], axis=0).tolist()
    return f"{raw:.3f} / {l0:.3f}"
