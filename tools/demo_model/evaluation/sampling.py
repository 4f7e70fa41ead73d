"""Which prompts are measured, and in which orders their options are shown."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from tools.demo_model.evalset import catalogs, evaluation_sets
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import Example, Turn, some


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of a task is read.

    Attributes:
        test: prompts of the test split.
        valid: prompts of the validation split, for the temperature and the threshold; 0 leaves
            out everything that needs them.
        reshuffled: how many of the test prompts are read a second time, their options reshuffled,
            in all rotations.
    """

    test: int
    valid: int = 0
    reshuffled: int = 0


FOUR, CLAIM, RAW = Plan(200, 60, 15), Plan(240, 60), Plan(120)
PLANS = {
    "section4": Plan(400, 100, 20),
    "section10": Plan(120, 40, 5),
    "section_yes_no": CLAIM,
    "wordnet4": Plan(400, 100, 20),
    "wordnet10": Plan(250, 40, 5),
    "hypernym4": FOUR,
    "kind_yes_no": CLAIM,
    "debtags4": FOUR,
    "debtags_yes_no": Plan(300, 100),
    "unseen_use4": FOUR,
    "definition4": RAW,
    "relation4": RAW,
    "synopsis4": RAW,
    "heading4": RAW,
    "next4": RAW,
    "topic4": RAW,
    "invented4": RAW,
    "valence": Plan(200),
    "lookup4": RAW,
    "lookup10": RAW,
    "lookup26": RAW,
    "catalog10": Plan(80),
    "catalog80": Plan(80),
}


@dataclass(frozen=True, slots=True)
class Task:
    """The prompts of one task, the same for every model that is measured."""

    name: str
    plan: Plan
    test: list[Example]
    valid: list[Example]


def sample_tasks(test: Tables, valid: Tables, names: Sequence[str]) -> list[Task]:
    """Return the named tasks with as many prompts as their plans say, drawn without order."""
    tested, validated = evaluation_sets(test), evaluation_sets(valid)
    for size in (10, 80):  # no part of the evaluation in training: too long for its windows
        name = f"catalog{size}"
        tested[name] = list(catalogs(test, size, Random(22), name))
    return [
        Task(
            name,
            PLANS[name],
            some(tested[name], PLANS[name].test, Random(1)),
            some(validated.get(name, []), PLANS[name].valid, Random(2)),
        )
        for name in names
    ]


def rotations(turn: Turn) -> list[Turn]:
    """Return a turn with its options in all rotations, its own order first.

    Levels have an order of their own, which stays.
    """
    shifts = 1 if turn.kind == "score" else len(turn.options)
    return [turn.rotated(shift) for shift in range(shifts)]


def reshuffled(turn: Turn, rng: Random) -> Turn:
    """Return a choice of three options or more in an order that is no rotation of its own."""
    assert len(turn.options) > 2, "two options have no orders but rotations"
    cycles = {rotated.options for rotated in rotations(turn)}
    while True:
        options = tuple(rng.sample(turn.options, len(turn.options)))
        if options not in cycles:
            return replace(turn, options=options, answer=options.index(turn.options[turn.answer]))
