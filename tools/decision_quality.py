"""How good the embedded model's decisions are at raw, L0 and L1: the table of docs/decisions.md.

    python -m tools.decision_quality read DATA SAMPLES [--seconds 150]
    python -m tools.decision_quality show SAMPLES

DATA is the prepared data of the demo model's recipe (tools/demo_model/README.md), of which groups
that training never saw are read. SAMPLES is a file of JSON lines: reading goes on behind what is
there, so it may be done in parts. Both halves of a task's prompts come from these groups: the
temperature and the threshold are fitted on one, all figures are about the other.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from tqdm import tqdm

from strata_cli.decisions import questions
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.fitting import LEAST_STATES, Fit, Sample, fit, sample
from strata_cli.decisions.measures import Judged, calibration_error
from strata_cli.decisions.questions import Question
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tools.demo_model.evalset import evaluation_sets
from tools.demo_model.tables import load_tables
from tools.demo_model.tasks.drawing import Example, Turn

PAGE = Path(__file__).resolve().parent.parent / "docs" / "decisions.md"
MARKS = ("<!-- table: quality -->", "<!-- end -->")
TASKS = {
    "section10": ("Debian section of a package, 10 sections", 200),
    "section_yes_no": ("does a package belong to a section", 200),
    "debtags_yes_no": ("does a package have a debtag", 200),
    "kind_yes_no": ("is one thing a kind of another (WordNet)", 200),
    "section4": ("Debian section of a package, 4 of 10", 150),
    "wordnet4": ("category of a noun (WordNet), 4 of 12", 150),
    "unseen_use4": ("what a package is used for, 4 options: a facet not trained on", 150),
}
RELISTED_EVERY = 10
NUM_DRAWS = 200
HEADER = (
    "Task",
    "States",
    "Temperature",
    "Accuracy raw / L0",
    "Flips raw / L0, an order by itself",
    "ECE raw / L0 / L1 (by chance)",
    "Coverage at 5 % risk raw / L0 / L1 (risk of L1)",
)


@click.group()
def main() -> None:
    """Measure the embedded model's decisions."""


@main.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("samples", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", default=1e9, help="Stop after so long; go on by the same command.")
def read(data: Path, samples: Path, seconds: float) -> None:
    """Decide about every prompt that SAMPLES lacks."""
    until = time.monotonic() + seconds
    known = {(one["task"], one["number"]) for one in _lines(samples)}
    (tables,) = load_tables(data, "test")
    sets = evaluation_sets(tables)
    wanted = [
        (task, number, example)
        for task, (_, count) in TASKS.items()
        for number, example in enumerate(_drawn(sets[task], count))
        if (task, number) not in known
    ]
    options = EngineOptions(model=DEMO_MODEL_PATH, device="host", will_chat=True)
    with (
        Engine.open(options) as engine,
        Decider(engine) as decider,
        samples.open("a", encoding="utf-8") as file,
    ):
        for task, number, example in tqdm(wanted, unit=" prompts"):
            if time.monotonic() > until:
                break
            found = _answered(decider, example, is_relisted=number % RELISTED_EVERY == 0)
            file.write(json.dumps({"task": task, "number": number, **found}) + "\n")
            file.flush()


@main.command()
@click.argument("samples", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(samples: Path) -> None:
    """Write the table of SAMPLES into docs/decisions.md."""
    by_task = defaultdict(list)
    for one in _lines(samples):
        by_task[one["task"]].append(one)
    rows, fits = [HEADER, ("---",) * len(HEADER)], list[Fit]()
    for task, (name, _) in TASKS.items():
        found = sorted(by_task[task], key=lambda one: int(one["number"]))
        if len(found) >= LEAST_STATES:
            fits.append(_fit(found))
            rows.append(_row(name, fits[-1]))
    rows.append(_together(fits))
    relisted = [one["relisted"] for found in by_task.values() for one in found if "relisted" in one]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    note = (
        f"Listed the other way round, options got other probabilities at L0, in any bit, in "
        f"{sum(relisted)} of {len(relisted)} decisions: its answers do not flip."
    )
    text = PAGE.read_text("utf-8")
    pattern = re.compile(f"{MARKS[0]}.*?{MARKS[1]}", re.DOTALL)
    block = f"{MARKS[0]}\n{table}\n\n{note}\n{MARKS[1]}"
    PAGE.write_text(pattern.sub(lambda _: block, text), "utf-8")


def _drawn(examples: Sequence[Example], count: int) -> list[Example]:
    """Some prompts of a task in random order, the same ones every time."""
    return Random(7).sample(list(examples), min(count, len(examples)))


def _question(turn: Turn, options: Sequence[str]) -> Question:
    if turn.kind == "yes_no":
        return questions.yes_no(turn.text)
    return questions.choice(turn.text, options)


def _answered(decider: Decider, example: Example, *, is_relisted: bool) -> dict[str, Any]:
    (turn,) = example.turns
    question = _question(turn, turn.options)
    right = question.options.index(turn.options[turn.answer])
    (decision,) = decider.decide(example.state, [question]).decisions
    kept = sample(decision, right)
    found: dict[str, Any] = {
        "raw": kept.raw.tolist(),
        "l0": kept.l0.tolist(),
        "right": right,
        "flips": kept.flips,
    }
    if is_relisted and turn.kind == "choice":
        again = _question(turn, turn.options[::-1])
        (other,) = decider.decide(example.state, [again]).decisions
        found["relisted"] = other.probabilities != decision.probabilities
    return found


def _fit(found: Sequence[dict[str, Any]]) -> Fit:
    samples = [
        Sample(np.array(one["raw"]), np.array(one["l0"]), one["right"], tuple(one["flips"]))
        for one in found
    ]
    return fit(questions.yes_no("any"), samples)


def _by_chance(judged: Judged) -> float:
    """The calibration error that a perfectly calibrated model shows with so few answers."""
    drawn = np.random.default_rng(0).random((NUM_DRAWS, len(judged.hit))) < judged.confidence
    return float(np.mean([calibration_error(Judged(judged.confidence, hit)) for hit in drawn]))


def _together(fits: Sequence[Fit]) -> tuple[str, ...]:
    """A row about all answers of all tasks, each at its task's temperature."""
    errors = []
    for level in ("raw", "L0", "L1"):
        judged = [one.judged[level] for one in fits]
        both = Judged(
            np.concatenate([one.confidence for one in judged]),
            np.concatenate([one.hit for one in judged]),
        )
        errors.append((both.accuracy, calibration_error(both)))
    (raw, raw_ece), (l0, l0_ece), (_, l1_ece) = errors
    chance = _by_chance(both)
    return (
        "all of these together",
        f"{sum(one.num_fitted for one in fits)} + {sum(one.num_tested for one in fits)}",
        "",
        f"{raw:.3f} / {l0:.3f}",
        "",
        f"{raw_ece:.3f} / {l0_ece:.3f} / {l1_ece:.3f} ({chance:.3f})",
        "",
    )


def _row(name: str, found: Fit) -> tuple[str, ...]:
    raw, l0, l1 = (found.levels[level] for level in ("raw", "L0", "L1"))
    return (
        name,
        f"{found.num_fitted} + {found.num_tested}",
        f"{found.temperature:.2f}",
        f"{raw.accuracy:.3f} / {l0.accuracy:.3f}",
        f"{raw.flips:.3f} / {l0.flips:.3f}",
        f"{raw.ece:.3f} / {l0.ece:.3f} / {l1.ece:.3f} ({_by_chance(found.judged['L1']):.3f})",
        f"{raw.coverage:.2f} / {l0.coverage:.2f} / {l1.coverage:.2f} ({l1.risk:.3f})",
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


if __name__ == "__main__":
    main()
