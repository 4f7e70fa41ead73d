"""Decisions about Debian packages: sections, debtags, and the short line that fits."""

from collections.abc import Container, Sequence
from random import Random

from tools.demo_model.debian import Package
from tools.demo_model.labels import (
    FACETS,
    SECTION_CLAIMS,
    SECTION_LABELS,
    SECTION_QUESTIONS,
    TESTED_SECTIONS,
    tag_label,
)
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import (
    MAX_STATE,
    Example,
    Turn,
    clip,
    make_choice,
    make_claim,
    option_count,
    sentences,
    some,
    wording,
)

MIN_TAGGED = 12  # packages that a tag must have before prompts ask for it
CLAIM_TRIES = 3  # debtags looked at for a claim about a given package


def package_state(package: Package, rng: Random | None = None) -> str:
    """Word a package as a state; without a generator in the plain form that evaluation uses.

    Training varies length and completeness, so that no single sentence decides.
    """
    if rng is None:
        return clip(f"{package.synopsis}.\n" + " ".join(package.paragraphs), MAX_STATE)
    parts = [part for paragraph in package.paragraphs for part in sentences(paragraph)]
    if len(parts) > 2 and rng.random() < 0.3:
        parts.pop(rng.randrange(len(parts)))
    head = f"{package.synopsis}.\n"
    kind = rng.random()
    if kind < 0.15:
        head = ""
    elif kind < 0.25:
        parts = []
    elif kind < 0.35:
        head = f"{package.name}: {head}"
    return clip(head + " ".join(parts), rng.choice((200, 350, MAX_STATE, MAX_STATE))).strip()


def draw_package(tables: Tables, rng: Random) -> Package:
    """Draw a package; small sections come more often than their size, tested ones twice that."""
    names = list(SECTION_LABELS)
    shares = [
        len(tables.by_section[name]) ** 0.5 * (2 if name in TESTED_SECTIONS else 1)
        for name in names
    ]
    return rng.choice(tables.by_section[rng.choices(names, shares)[0]])


def section_turn(package: Package, rng: Random) -> Turn:
    """Ask for a package's section."""
    pool: Sequence[str] = list(SECTION_LABELS)
    if package.section in TESTED_SECTIONS and rng.random() < 0.5:
        pool = TESTED_SECTIONS
    others = [name for name in pool if name != package.section]
    wrong = [
        wording(SECTION_LABELS[name], rng) for name in some(others, option_count(rng) - 1, rng)
    ]
    right = wording(SECTION_LABELS[package.section], rng)
    return make_choice(wording(SECTION_QUESTIONS, rng), right, wrong, rng)


def section_claim(package: Package, rng: Random) -> Turn:
    """Ask whether a package belongs to a section."""
    holds = rng.random() < 0.5
    others = [name for name in SECTION_LABELS if name != package.section]
    label = wording(SECTION_LABELS[package.section if holds else rng.choice(others)], rng)
    return make_claim(wording(SECTION_CLAIMS, rng).format(label), holds, rng)


def facet_values(tables: Tables, facet: str) -> list[str]:
    """Return the tags of a facet that enough packages carry."""
    return [
        tag
        for tag, packages in tables.by_tag.items()
        if tag.startswith(facet + "::") and len(packages) >= MIN_TAGGED and is_worded(tag)
    ]


def facet_turn(tables: Tables, package: Package, rng: Random) -> Turn | None:
    """Ask for one of a package's debtags among values it lacks."""
    tags = [tag for tag in package.tags if tag.split("::")[0] in FACETS and tag_label(tag)]
    if not tags:
        return None
    tag = rng.choice(tags)
    facet = tag.split("::")[0]
    others = [other for other in facet_values(tables, facet) if other not in package.tags]
    if not others:
        return None
    wrong = [tag_label(other) for other in some(others, option_count(rng) - 1, rng)]
    wrong = [label for label in wrong if label != tag_label(tag)]
    return make_choice(FACETS[facet][0], tag_label(tag), wrong, rng) if wrong else None


def claim_weights(tables: Tables, facets: Container[str]) -> dict[str, float]:
    """Return how often the debtags of some facets are claimed.

    Without those that too few packages have, or too few of the facet lack.
    """
    weights = {}
    for tag in tables.by_tag:
        least = min(owners(tables, tag))
        if least >= MIN_TAGGED and tag.split("::")[0] in facets and is_worded(tag):
            weights[tag] = float(least**0.5)
    return weights


def is_worded(tag: str) -> bool:
    """Whether a debtag says something, not that its value is still to be given."""
    return bool(tag_label(tag)) and not tag.endswith("TODO")


def owners(tables: Tables, tag: str) -> tuple[int, int]:
    """Return how many packages have a debtag, and how many only have others of its facet."""
    having = len(tables.by_tag[tag])
    return having, len(tables.by_facet[tag.split("::")[0]]) - having


def tag_claim(tag: str, package: Package, rng: Random) -> Turn:
    """Ask whether a package has a debtag."""
    text = FACETS[tag.split("::")[0]][1].format(tag_label(tag))
    return make_claim(text, tag in package.tags, rng)


def facet_claim(tables: Tables, package: Package, rng: Random) -> Turn | None:
    """Ask whether a package has a debtag; only facets count that the package has at all.

    Takes only what has been claimed less often than its opposite, so that the question alone does
    not tell the answer, whatever packages claims are added to.
    """
    facets = {tag.split("::")[0] for tag in package.tags} & set(FACETS)
    weights = claim_weights(tables, facets)
    if not weights:
        return None
    for tag in rng.choices(list(weights), list(weights.values()), k=CLAIM_TRIES):
        holds = tag in package.tags
        if tables.claimed[tag, holds] <= tables.claimed[tag, not holds]:
            tables.claimed[tag, holds] += 1
            return tag_claim(tag, package, rng)
    return None


def draw_section(tables: Tables, rng: Random) -> Example | None:
    """Draw a section prompt, often with a follow-up question about the same package."""
    package = draw_package(tables, rng)
    turns: list[Turn | None] = [section_turn(package, rng)]
    while rng.random() < 0.35 and len(turns) < 4:
        make = rng.choice((section_turn, section_claim))
        turns.append(make(package, rng))
        turns.append(facet_turn(tables, package, rng))
    return example("section", package, turns, rng)


def draw_section_claim(tables: Tables, rng: Random) -> Example | None:
    """Draw yes/no questions about a package's section."""
    package = draw_package(tables, rng)
    turns: list[Turn | None] = [section_claim(package, rng)]
    while rng.random() < 0.5 and len(turns) < 4:
        turns.append(section_claim(package, rng))
    return example("section_claim", package, turns, rng)


def draw_debtags(tables: Tables, rng: Random) -> Example | None:
    """Draw debtag questions about one package: mostly choices, some claims."""
    facet = rng.choice([name for name in FACETS if tables.by_facet.get(name)])
    package = rng.choice(tables.by_facet[facet])
    turns: list[Turn | None] = []
    for _ in range(rng.choice((1, 1, 2, 3, 4))):
        make = facet_turn if rng.random() < 0.75 else facet_claim
        turns.append(make(tables, package, rng))
    return example("debtags", package, turns, rng)


def draw_debtag_claim(tables: Tables, rng: Random) -> Example | None:
    """Draw a claim about a debtag, then a package that has or lacks it; more claims may follow.

    The question comes first, so Yes and No are equally often right for every single question.
    """
    weights = claim_weights(tables, FACETS)
    if not weights:
        return None
    (tag,) = rng.choices(list(weights), list(weights.values()))
    package = rng.choice(tables.by_tag[tag])
    if rng.random() < 0.5:
        while tag in package.tags:
            package = rng.choice(tables.by_facet[tag.split("::")[0]])
    turns: list[Turn | None] = [tag_claim(tag, package, rng)]
    while rng.random() < 0.5 and len(turns) < 4:
        turns.append(facet_claim(tables, package, rng))
    return example("debtag_claim", package, turns, rng)


def draw_synopsis(tables: Tables, rng: Random) -> Example | None:
    """Ask which short line fits a long description; half of the wrong ones share its section."""
    package = draw_package(tables, rng)
    near = [other for other in tables.by_section[package.section] if other is not package]
    pool = near if rng.random() < 0.5 and len(near) > 10 else tables.packages
    wrong = [other.synopsis for other in some(pool, option_count(rng, 6) - 1, rng)]
    wrong = [line for line in wrong if line != package.synopsis]
    if not wrong or not package.paragraphs:
        return None
    state = clip(" ".join(package.paragraphs), rng.choice((200, 400, MAX_STATE)))
    texts = ("Which short line describes this package?", "Which summary fits this text best?")
    return Example(
        "synopsis", state, (make_choice(wording(texts, rng), package.synopsis, wrong, rng),)
    )


def example(kind: str, package: Package, turns: list[Turn | None], rng: Random) -> Example | None:
    """Build an example of the turns that could be drawn, no claim twice."""
    found: list[Turn] = []
    for turn in turns:
        claimed = {own.text for own in found if own.kind == "yes_no"}
        if turn is not None and turn.text not in claimed:
            found.append(turn)
    return Example(kind, package_state(package, rng), tuple(found)) if found else None
