"""What samples say, as the table of docs/decisions.md."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from strata_cli.decisions import questions
from strata_cli.decisions.fitting import LEAST_STATES, Fit, Sample, fit
from strata_cli.decisions.measures import Judged, calibration_bins, calibration_error, judge
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
    "Gap beyond chance raw / L0 / L1",
    "Coverage at 5 % risk raw / L0 / L1 (risk of L1)",
    "Other answer of a single order, raw / L0",
)

Line = dict[str, Any]


class Answered(NamedTuple):
    """A task's fits, see fits_of, and its samples."""

    task: str
    fits: list[Fit]
    lines: list[Line]


def write_table(samples: Iterable[Line], page: Path) -> None:
    """Write the table of samples between its marks in a page.

    Raises:
        ClickException: no task has states enough.
    """
    by_task: dict[str, list[Line]] = defaultdict(list)
    for one in samples:
        by_task[one["task"]].append(one)
    answered = []
    for task in TASKS:
        found = sorted(by_task[task], key=lambda one: int(one["number"]))
        if fits := fits_of(task, found):
            answered.append(Answered(task, fits, found))
    if not answered:
        raise click.ClickException(f"no task has {LEAST_STATES} states: read more")
    rows = [HEADER, ("---",) * len(HEADER)]
    rows += [_row(TASKS[one.task].title, [one]) for one in answered]
    if own := [one for one in answered if TASKS[one.task].has_questions]:
        rows.append(_row("all questions with a temperature of their own", own))
    rows.append(_row("all of these together", answered))
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


def _row(title: str, tasks: Sequence[Answered]) -> tuple[str, ...]:
    fits = [fit for task in tasks for fit in task.fits]
    found = [line for task in tasks for line in task.lines]
    right = [one["right"] for one in found]
    accuracies = [
        judge([np.array(one[level]) for one in found], right).accuracy
        for level in ("raw", "plain", "l0")
    ]
    judged = {level: _together(fits, level) for level in LEVELS}
    errors = [calibration_error(judged[level]) for level in LEVELS]
    beyond = [_beyond_chance([_together(task.fits, level) for task in tasks]) for level in LEVELS]
    temperatures = [one.temperature for one in fits]
    return (
        title,
        f"{len(judged['L1'].hit):,}",
        f"{min(temperatures):.2f} to {max(temperatures):.2f}",
        _slashed(accuracies),
        _relisted(found),
        f"{_slashed(errors)} ({_by_chance(judged['L1']):.3f})",
        _slashed(beyond),
        _coverage(fits),
        _single_orders(found),
    )


def _slashed(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


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


def _beyond_chance(tasks: Sequence[Judged]) -> float:
    """Root mean square of the gaps of each task's bins, what chance adds to the squares taken off.

    Source: Kumar, Liang and Ma 2019, the debiased estimator of the calibration error.
    """
    squares, count = 0.0, 0
    for judged in tasks:
        for one in calibration_bins(judged):
            chance = one.accuracy * (1 - one.accuracy) / (one.num_answers - 1)
            squares += one.num_answers * ((one.confidence - one.accuracy) ** 2 - chance)
        count += len(judged.hit)
    return math.sqrt(max(squares, 0.0) / count)


def _relisted(found: Sequence[Line]) -> str:
    """How often another listing of the options had another answer; at L0 another bit counts."""
    changed = [one for line in found for one in line.get("relisted", ())]
    if not changed:
        return "-"
    return f"{_slashed(np.mean(changed, axis=0).tolist())} ({len(changed):,})"


def _coverage(fits: Sequence[Fit]) -> str:
    shares = []
    for level in LEVELS:
        given = [one.levels[level].coverage * one.num_tested for one in fits]
        wrong = [one.levels[level].risk * some for one, some in zip(fits, given, strict=True)]
        shares.append(f"{sum(given) / sum(one.num_tested for one in fits):.2f}")
    return f"{' / '.join(shares)} ({sum(wrong) / max(sum(given), 1):.3f})"


def _single_orders(found: Sequence[Line]) -> str:
    return _slashed(np.mean([one["flips"] for one in found], axis=0).tolist())
