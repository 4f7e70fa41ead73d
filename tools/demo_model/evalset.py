"""The fixed evaluation prompts: one question each, from groups that training never saw."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from tools.demo_model.labels import (
    CATEGORY_LABELS,
    CATEGORY_QUESTIONS,
    FACETS,
    HELD_OUT_FACET,
    SECTION_LABELS,
    SECTION_QUESTIONS,
    TESTED_CATEGORIES,
    TESTED_SECTIONS,
    TESTED_TAGS,
    tag_label,
    valence_level,
)
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import Draw, Example, is_sound, make_choice, make_claim, some
from tools.demo_model.tasks.lookups import catalog_state, draw_find
from tools.demo_model.tasks.packages import draw_section_claim, draw_synopsis, package_state
from tools.demo_model.tasks.passages import draw_heading, draw_invented, draw_next, draw_topic
from tools.demo_model.tasks.words import (
    draw_definition,
    draw_hypernym,
    draw_kind_claim,
    draw_relation,
    valence_turn,
    word_state,
)

PER_SECTION, PER_CATEGORY, PER_TAG, DRAWN = 80, 70, 60, 400


def sections(tables: Tables, count: int, rng: Random) -> Iterator[Example]:
    """Yield section prompts with `count` of the ten tested sections as options."""
    for section in TESTED_SECTIONS:
        for package in some(tables.by_section[section], PER_SECTION, rng):
            others = [name for name in TESTED_SECTIONS if name != section]
            wrong = [SECTION_LABELS[name][0] for name in some(others, count - 1, rng)]
            right = SECTION_LABELS[section][0]
            turn = make_choice(SECTION_QUESTIONS[0], right, wrong, rng)
            yield Example(f"section{count}", package_state(package), (turn,))


def categories(tables: Tables, count: int, rng: Random) -> Iterator[Example]:
    """Yield category prompts with `count` of the twelve tested categories as options."""
    for category in TESTED_CATEGORIES:
        for synset in some(tables.by_category[category], PER_CATEGORY, rng):
            others = [name for name in TESTED_CATEGORIES if name != category]
            wrong = [CATEGORY_LABELS[name][0] for name in some(others, count - 1, rng)]
            turn = make_choice(CATEGORY_QUESTIONS[0], CATEGORY_LABELS[category][0], wrong, rng)
            yield Example(f"wordnet{count}", word_state(synset), (turn,))


def facet_choices(
    tables: Tables, facets: dict[str, str], rng: Random, kind: str
) -> Iterator[Example]:
    """Yield choices of one debtag among three that the package lacks; facets: name -> question."""
    values: dict[str, set[str]] = {facet: set() for facet in facets}
    for tag in tables.by_tag:
        if tag.split("::")[0] in values and tag_label(tag):
            values[tag.split("::")[0]].add(tag_label(tag))
    found = []
    for package in tables.packages:
        for facet, question in facets.items():
            tags = [tag for tag in package.tags if tag.startswith(facet + "::")]
            own = [tag_label(tag) for tag in tags if tag_label(tag)]
            lacking = sorted(values[facet] - set(own))
            if own and len(lacking) >= 3:
                turn = make_choice(question, rng.choice(own), some(lacking, 3, rng), rng)
                found.append(Example(kind, package_state(package), (turn,)))
    yield from some(found, DRAWN, rng)


def tag_claims(tables: Tables, rng: Random) -> Iterator[Example]:
    """Yield balanced yes/no prompts about ten debtags; No only where the facet is known."""
    for tag in TESTED_TAGS:
        facet = tag.split("::")[0]
        having = tables.by_tag[tag]
        lacking = [package for package in tables.by_facet[facet] if tag not in package.tags]
        count = min(PER_TAG, len(having), len(lacking))
        for packages, holds in ((having, True), (lacking, False)):
            for package in some(packages, count, rng):
                turn = make_claim(FACETS[facet][1].format(tag_label(tag)), holds, rng)
                yield Example("debtags_yes_no", package_state(package), (turn,))


def drawn(tables: Tables, draw: Draw, options: int, rng: Random, kind: str) -> Iterator[Example]:
    """Yield DRAWN prompts of a training family whose first turn has `options` options (0: any)."""
    count = 0
    for _ in range(200 * DRAWN):
        example = draw(tables, rng)
        if example is None or not is_sound(example):
            continue
        if options and len(example.turns[0].options) != options:
            continue
        yield replace(example, kind=kind, turns=example.turns[:1])
        count += 1
        if count == DRAWN:
            return


def valences(tables: Tables, rng: Random) -> Iterator[Example]:
    """Yield level prompts, the five levels equally often where there are enough words."""
    for level in range(5):
        fitting = [word for word in tables.valence if valence_level(word.rating) == level]
        for word in some(fitting, DRAWN // 5, rng):
            yield Example("valence", word.word, (valence_turn(level),))


def lookups(tables: Tables, count: int, rng: Random) -> Iterator[Example]:
    """Yield prompts that ask which of `count` words the state contains."""
    for _ in range(300):
        yield replace(draw_find(tables, rng, count), kind=f"lookup{count}")


def catalogs(tables: Tables, size: int, rng: Random, kind: str) -> Iterator[Example]:
    """Yield prompts that ask for one of `size` packages listed in the state, by its short line."""
    for _ in range(DRAWN):
        packages = some(tables.packages, size, rng)
        right, *wrong = some(packages, 4, rng)
        text = f"Which entry is described as: {right.synopsis}?"
        turn = make_choice(text, right.name, [other.name for other in wrong], rng)
        yield Example(kind, catalog_state(packages), (turn,), certain=True)


def evaluation_sets(tables: Tables) -> dict[str, list[Example]]:
    """Return all evaluation sets of a split by name; equal tables give equal prompts."""
    known = {facet: question for facet, (question, _) in FACETS.items()}
    unseen = {HELD_OUT_FACET[0]: HELD_OUT_FACET[1]}
    streams: dict[str, Iterator[Example]] = {
        "section4": sections(tables, 4, Random(1)),
        "section10": sections(tables, 10, Random(2)),
        "section_yes_no": drawn(tables, draw_section_claim, 2, Random(3), "section_yes_no"),
        "wordnet4": categories(tables, 4, Random(4)),
        "wordnet10": categories(tables, 10, Random(5)),
        "hypernym4": drawn(tables, draw_hypernym, 4, Random(6), "hypernym4"),
        "kind_yes_no": drawn(tables, draw_kind_claim, 2, Random(7), "kind_yes_no"),
        "definition4": drawn(tables, draw_definition, 4, Random(8), "definition4"),
        "relation4": drawn(tables, draw_relation, 4, Random(9), "relation4"),
        "debtags4": facet_choices(tables, known, Random(10), "debtags4"),
        "debtags_yes_no": tag_claims(tables, Random(11)),
        "unseen_use4": facet_choices(tables, unseen, Random(12), "unseen_use4"),
        "synopsis4": drawn(tables, draw_synopsis, 4, Random(13), "synopsis4"),
        "heading4": drawn(tables, draw_heading, 4, Random(14), "heading4"),
        "next4": drawn(tables, draw_next, 4, Random(15), "next4"),
        "topic4": drawn(tables, draw_topic, 4, Random(16), "topic4"),
        "invented4": drawn(tables, draw_invented, 4, Random(17), "invented4"),
        "valence": valences(tables, Random(18)),
        "lookup4": lookups(tables, 4, Random(19)),
        "lookup10": lookups(tables, 10, Random(20)),
        "lookup26": lookups(tables, 26, Random(21)),
    }
    return {name: list(stream) for name, stream in streams.items()}
