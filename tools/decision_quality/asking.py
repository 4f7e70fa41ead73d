"""What is asked: questions, and states of held-out groups whose right answer is known."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from strata_cli.decisions import questions
from strata_cli.decisions.questions import Question
from tools.demo_model.debian import Package
from tools.demo_model.evalset import drawn, facet_choices
from tools.demo_model.labels import (
    CATEGORY_LABELS,
    CATEGORY_QUESTIONS,
    FACETS,
    HELD_OUT_FACET,
    SECTION_CLAIMS,
    SECTION_LABELS,
    SECTION_QUESTIONS,
    TESTED_SECTIONS,
    TESTED_TAGS,
    tag_label,
)
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import Example, some
from tools.demo_model.tasks.packages import package_state
from tools.demo_model.tasks.words import draw_kind_claim, word_state

Record = TypeVar("Record")

FEW_SECTIONS = ("games", "science", "net", "sound")
FEW_CATEGORIES = ("noun.animal", "noun.food", "noun.person", "noun.artifact")
PER_SECTION, PER_CATEGORY, PER_ANSWER = 200, 350, 200
LEAST_PER_ANSWER = 60


class Labelled(NamedTuple):
    """A state, what is asked about it, and the place of the right answer among the options."""

    question: Question
    state: str
    right: int


class Task(NamedTuple):
    """States of one kind of question.

    Attributes:
        title: of its row.
        draw: draws them from records that training never saw.
        has_questions: each question has states enough for a temperature of its own; otherwise the
            task has one temperature.
    """

    title: str
    draw: Callable[[Sequence[Tables], Random], Iterator[Labelled]]
    has_questions: bool = True


def section10(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """One question with ten sections."""
    return _sections(splits, TESTED_SECTIONS, rng)


def section4(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """One question with the sections of most packages."""
    return _sections(splits, FEW_SECTIONS, rng)


def _sections(splits: Sequence[Tables], names: Sequence[str], rng: Random) -> Iterator[Labelled]:
    labels = {name: SECTION_LABELS[name][0] for name in names}
    question = questions.choice(SECTION_QUESTIONS[0], sorted(labels.values()))
    for name, label in labels.items():
        packages = [package for tables in splits for package in tables.by_section[name]]
        for package in some(packages, PER_SECTION, rng):
            yield Labelled(question, package_state(package), question.options.index(label))


def category4(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """One question with four categories of nouns."""
    labels = {name: CATEGORY_LABELS[name][0] for name in FEW_CATEGORIES}
    question = questions.choice(CATEGORY_QUESTIONS[0], sorted(labels.values()))
    for name, label in labels.items():
        synsets = [synset for tables in splits for synset in tables.by_category[name]]
        for synset in some(synsets, PER_CATEGORY, rng):
            yield Labelled(question, word_state(synset), question.options.index(label))


def section_yes_no(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """A question for each section that has packages enough, Yes and No equally often."""
    for section in TESTED_SECTIONS:
        question = questions.yes_no(SECTION_CLAIMS[0].format(SECTION_LABELS[section][0]))
        belonging = [package for tables in splits for package in tables.by_section[section]]
        others = [
            package
            for tables in splits
            for other in TESTED_SECTIONS
            for package in tables.by_section[other]
            if other != section
        ]
        yield from _claims(question, belonging, others, rng)


def debtag_yes_no(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """A question for each tested debtag, Yes and No equally often; No where the facet is known."""
    for tag in TESTED_TAGS:
        facet = tag.split("::")[0]
        question = questions.yes_no(FACETS[facet][1].format(tag_label(tag)))
        having = [package for tables in splits for package in tables.by_tag[tag]]
        known = [package for tables in splits for package in tables.by_facet[facet]]
        lacking = [package for package in known if tag not in package.tags]
        yield from _claims(question, having, lacking, rng)


def _claims(
    question: Question, right: list[Package], wrong: list[Package], rng: Random
) -> Iterator[Labelled]:
    count = min(PER_ANSWER, len(right), len(wrong))
    if count < LEAST_PER_ANSWER:
        return
    for place, packages in enumerate((right, wrong)):
        for package in some(packages, count, rng):
            yield Labelled(question, package_state(package), place)


def kind_yes_no(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """Claims about words, each a question of its own."""
    for tables in splits:
        yield from map(_labelled, drawn(tables, draw_kind_claim, 2, rng, "kind_yes_no"))


def unseen_use4(splits: Sequence[Tables], rng: Random) -> Iterator[Labelled]:
    """Choices of a facet that training left out, nearly each of its own options."""
    facet, text, _ = HELD_OUT_FACET
    for tables in splits:
        yield from map(_labelled, facet_choices(tables, {facet: text}, rng, "unseen_use4"))


def _labelled(example: Example) -> Labelled:
    (turn,) = example.turns
    right = turn.options[turn.answer]
    if turn.kind == "yes_no":
        return Labelled(questions.yes_no(turn.text), example.state, ("Yes", "No").index(right))
    question = questions.choice(turn.text, sorted(turn.options))
    return Labelled(question, example.state, question.options.index(right))


TASKS = {
    "section10": Task("Debian section of a package, 10 sections", section10),
    "section4": Task("the same, 4 sections", section4),
    "category4": Task("category of a noun (WordNet), 4 categories", category4),
    "section_yes_no": Task("does a package belong to a section, 7 questions", section_yes_no),
    "debtag_yes_no": Task("does a package have a debtag, 10 questions", debtag_yes_no),
    "kind_yes_no": Task("is one thing a kind of another, one question each", kind_yes_no, False),
    "unseen_use4": Task(
        "what a package is used for, 4 options each: a facet not trained on", unseen_use4, False
    ),
}


def drawn_states(splits: Sequence[Tables]) -> dict[str, list[Labelled]]:
    """The states of all tasks, each task's in random order; equal records give equal states."""
    found = {}
    for name, task in TASKS.items():
        rng = Random(7)
        found[name] = list(task.draw(splits, rng))
        rng.shuffle(found[name])
    return found


def side_by_side(
    states: Iterable[tuple[int, Labelled]], most: int
) -> Iterator[list[tuple[int, Labelled]]]:
    """Groups of numbered states with one question, in order of their first."""
    groups: dict[str, list[tuple[int, Labelled]]] = {}
    for number, one in states:
        group = groups.setdefault(one.question.key, [])
        group.append((number, one))
        if len(group) == most:
            yield groups.pop(one.question.key)
    yield from groups.values()
