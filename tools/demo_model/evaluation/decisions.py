"""Reads decision prompts in several orders of their options and sums up what came out."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine
from tools.demo_model.evaluation.measures import (
    Scores,
    calibration_error,
    fit_temperature,
    half_width,
    judge,
    least_calibration_error,
    normalised,
    ranked_right,
    risk_threshold,
    select,
)
from tools.demo_model.evaluation.reading import Progress, PromptReader
from tools.demo_model.evaluation.sampling import Task, reshuffled, rotations
from tools.demo_model.prompt import decision_prompt
from tools.demo_model.tasks.drawing import Example, Turn

Kind = Literal["raw", "averaged"]

KINDS: tuple[Kind, Kind] = ("raw", "averaged")
DIGITS = 4
MIN_ASKED = 20  # prompts with one yes/no question, for figures of its own


class Orders(NamedTuple):
    """Whether all rotations of the options are shown, and to how many prompts a reshuffle's too."""

    rotated: bool
    reshuffled: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt's scores [n] by option, in the order in which the prompt lists them.

    Attributes:
        right: the right option.
        raw: of the prompt as drawn.
        averaged: mean over all rotations; equal to `raw` where only that was read.
        mass: probability of all labels together, of the prompt as drawn.
        changed: share of the other rotations in which another option comes out on top; None
            where they were not read.
        changed_averaged: whether another option comes out on top when the rotations of a
            reshuffled order are averaged; None where that was not read.
    """

    right: int
    raw: Scores
    averaged: Scores
    mass: float
    changed: float | None
    changed_averaged: bool | None


class TaskResult(NamedTuple):
    """A task's figures, and the answers to its test prompts."""

    report: dict[str, Any]
    test: list[Answered]


def turn_ids(engine: Engine, state: str, turn: Turn) -> list[int]:
    """Return the tokens of a decision prompt."""
    text = decision_prompt(state, turn.question())
    return engine.tokenizer.encode(text, parse_special=True)


def label_scores(engine: Engine, turn: Turn, first: Turn, logprobs: NDArray[np.float32]) -> Scores:
    """Return the log-probabilities of `turn`'s labels, ordered as the options of `first`."""
    ids = [engine.tokenizer.encode(label, parse_special=False) for label in turn.labels()]
    assert all(len(label) == 1 for label in ids), "a label is one token"
    found = logprobs[[label[0] for label in ids]].astype(np.float64)
    scores: Scores = found[[turn.options.index(option) for option in first.options]]
    return scores


def answer(right: int, rotated: Sequence[Scores], again: Sequence[Scores]) -> Answered:
    """Sum up one prompt from the scores of its rotations, and those of a reshuffled order's."""
    averaged = np.mean(rotated, axis=0)
    top = np.argmax(rotated[0])
    changed = [bool(np.argmax(scores) != top) for scores in rotated[1:]]
    flipped = np.argmax(np.mean(again, axis=0)) != np.argmax(averaged) if again else None
    return Answered(
        right,
        normalised(rotated[0]),
        normalised(averaged),
        float(np.exp(rotated[0]).sum()),
        float(np.mean(changed)) if changed else None,
        None if flipped is None else bool(flipped),
    )


def read_prompts(
    engine: Engine, reader: PromptReader, examples: Sequence[Example], orders: Orders,
    progress: Progress,
) -> list[Answered]:  # fmt: skip
    """Read the first question of every example."""
    rng = Random(3)
    shown: list[tuple[list[Turn], list[Turn]]] = []
    for number, example in enumerate(examples):
        turn = example.turns[0]
        again = rotations(reshuffled(turn, rng)) if number < orders.reshuffled else []
        shown.append((rotations(turn) if orders.rotated else [turn], again))
    groups = [
        [turn_ids(engine, example.state, turn) for turn in rotated + again]
        for example, (rotated, again) in zip(examples, shown, strict=True)
    ]
    found = []
    for (rotated, again), rows in zip(shown, reader.read_groups(groups), strict=True):
        first = rotated[0]
        scores = [
            label_scores(engine, turn, first, row)
            for turn, row in zip(rotated + again, rows, strict=True)
        ]
        found.append(answer(first.answer, scores[: len(rotated)], scores[len(rotated) :]))
        progress(1)
    return found


def accuracy(answered: Sequence[Answered], kind: Kind) -> float:
    """Return the share of prompts whose likeliest option is right."""
    return float(judge(*scores_of(answered, kind)).hit.mean())


def scores_of(answered: Sequence[Answered], kind: Kind) -> tuple[list[Scores], list[int]]:
    """Return the scores of one kind, and the right options."""
    return [getattr(one, kind) for one in answered], [one.right for one in answered]


def confidence_report(
    test: Sequence[Answered], valid: Sequence[Answered], kind: Kind
) -> dict[str, float]:
    """Return what needs validation prompts: temperature, calibration, coverage at 5 % risk."""
    scores, right = scores_of(test, kind)
    known_scores, known_right = scores_of(valid, kind)
    temperature = fit_temperature(known_scores, known_right)
    plain, cooled = judge(scores, right), judge(scores, right, temperature)
    threshold = risk_threshold(judge(known_scores, known_right))
    chosen = select(plain, threshold)
    return {
        "temperature": round(temperature, 3),
        "ece": round(calibration_error(plain), DIGITS),
        "ece_least": round(least_calibration_error(plain), DIGITS),
        "ece_cooled": round(calibration_error(cooled), DIGITS),
        "coverage": round(chosen.coverage, DIGITS),
        "risk": round(chosen.risk, DIGITS),
    }


def task_report(test: Sequence[Answered], valid: Sequence[Answered]) -> dict[str, Any]:
    """Sum up a task; what was not read is left out."""
    report: dict[str, Any] = {"prompts": len(test), "validation_prompts": len(valid)}
    report["mass"] = round(float(np.mean([one.mass for one in test])), DIGITS)
    changed = [one.changed for one in test if one.changed is not None]
    flipped = [one.changed_averaged for one in test if one.changed_averaged is not None]
    for kind in KINDS if changed else KINDS[:1]:
        share = accuracy(test, kind)
        found = {
            "accuracy": round(share, DIGITS),
            "half_width": round(half_width(share, len(test)), DIGITS),
        }
        if valid:
            found |= confidence_report(test, valid, kind)
        report[kind] = found
    if changed:
        report["raw"]["flips"] = round(float(np.mean(changed)), DIGITS)
    if flipped:
        report["averaged"]["flips"] = round(float(np.mean(flipped)), DIGITS)
        report["averaged"]["flip_prompts"] = len(flipped)
    return report


def claim_report(examples: Sequence[Example], answered: Sequence[Answered]) -> dict[str, Any]:
    """Return, for every yes/no question asked often, how often Yes won, and how well it ranks.

    `ranked` is the share of pairs of a prompt that deserves Yes and one that deserves No in which
    the first got more probability of Yes: it does not change with an inclination to one answer.
    `centred` is the accuracy when Yes is what the upper half of a question's prompts is answered.
    """
    by_text: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for example, one in zip(examples, answered, strict=True):
        turn = example.turns[0]
        yes = turn.options.index("Yes")
        by_text[turn.text].append((turn.answer == yes, float(one.averaged[yes])))
    report = {}
    for text, pairs in sorted(by_text.items()):
        holds = np.array([held for held, _ in pairs])
        scores = np.array([score for _, score in pairs])
        if len(pairs) >= MIN_ASKED and 0 < holds.sum() < len(pairs):
            said = scores > np.log(0.5)
            report[text] = {
                "prompts": len(pairs),
                "accuracy": round(float((said == holds).mean()), DIGITS),
                "yes": round(float(said.mean()), DIGITS),
                "centred": round(float(((scores > np.median(scores)) == holds).mean()), DIGITS),
                "ranked": round(ranked_right(scores[holds], scores[~holds]), DIGITS),
            }
    return report


def measure_task(engine: Engine, task: Task, progress: Progress) -> TaskResult:
    """Read a task's prompts and sum them up."""
    rotated = task.plan.valid > 0
    with PromptReader(engine) as reader:
        valid = read_prompts(engine, reader, task.valid, Orders(rotated), progress)
        orders = Orders(rotated, task.plan.reshuffled)
        test = read_prompts(engine, reader, task.test, orders, progress)
        report = task_report(test, valid) | {"tokens": reader.tokens}
    if task.test[0].turns[0].kind == "yes_no":
        report["questions"] = claim_report(task.test, test)
    return TaskResult(report, test)
