"""Decisions whose answer stands in the state: they teach how labels bind to options."""

from collections.abc import Sequence
from random import Random

from tools.demo_model.debian import Package
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import (
    Example,
    Turn,
    make_choice,
    make_claim,
    option_count,
    some,
)

RATINGS = ("very bad", "bad", "fair", "good", "very good")
KEYS = (
    "name", "colour", "size", "owner", "price", "city", "status", "type", "level", "shape",
    "weight", "author", "year", "month", "animal", "fruit", "tool", "room", "code", "team",
    "sport", "river", "country", "metal",
)  # fmt: skip
LONG_CATALOG = 0.12  # share of catalogs long enough to reach far positions


def draw_words(tables: Tables, rng: Random, count: int) -> list[str]:
    """Draw different single words."""
    found: set[str] = set()
    while len(found) < count:
        lemma = rng.choice(rng.choice(tables.synsets).lemmas)
        if lemma.isalpha() and len(lemma) < 12:
            found.add(lemma.lower())
    return rng.sample(sorted(found), count)


def draw_find(tables: Tables, rng: Random, count: int = 0) -> Example:
    """Ask which of `count` words (0: a random number) the state contains."""
    count = count or lookup_options(rng)
    words = draw_words(tables, rng, count + 5)
    present = words[count - 1 :]
    state = " ".join(present)
    turn = make_choice("Which of these words is in the text?", present[0], words[: count - 1], rng)
    return Example("find", shuffled(state, rng), (turn,), certain=True)


def lookup_options(rng: Random) -> int:
    """Draw a number of options; one in ten prompts uses up to the whole alphabet."""
    return rng.randrange(11, 27) if rng.random() < 0.1 else option_count(rng)


def shuffled(text: str, rng: Random) -> str:
    """Put the words of a text into random order."""
    words = text.split(" ")
    return " ".join(rng.sample(words, len(words)))


def draw_pairs(tables: Tables, rng: Random) -> Example:
    """Ask for the value of a key, or for the key of a value, in a list of pairs."""
    size = rng.choice((3, 4, 5, 6, 8))
    keys, values = some(KEYS, size, rng), draw_words(tables, rng, size)
    state = "\n".join(f"{key}: {value}" for key, value in zip(keys, values, strict=True))
    turns = []
    for _ in range(rng.choice((1, 2, 3))):
        at = rng.randrange(size)
        count = min(size, option_count(rng)) - 1
        if rng.random() < 0.6:
            text, right = f"What is the {keys[at]}?", values[at]
            wrong = some([value for value in values if value != right], count, rng)
        else:
            text, right = f"What does {values[at]} stand for?", keys[at]
            wrong = some([key for key in keys if key != right], count, rng)
        turns.append(make_choice(text, right, wrong, rng))
    return Example("pairs", state, tuple(turns), certain=True)


def draw_mention(tables: Tables, rng: Random) -> Example:
    """Ask whether the state mentions a word."""
    words = draw_words(tables, rng, 9)
    turns = []
    for _ in range(rng.choice((1, 2, 3))):
        holds = rng.random() < 0.5
        word = rng.choice(words[:6] if holds else words[6:])
        turns.append(make_claim(f"Does the text mention {word}?", holds, rng))
    return Example("mention", " ".join(words[:6]), tuple(turns), certain=True)


def draw_rating(tables: Tables, rng: Random) -> Example:
    """Ask for a level that the state names."""
    subject = draw_words(tables, rng, 1)[0]
    level = rng.randrange(len(RATINGS))
    state = f"The {subject} was {RATINGS[level]}."
    turn = Turn("score", f"How good was the {subject}?", RATINGS, level)
    return Example("rating", state, (turn,), certain=True)


def draw_given(tables: Tables, rng: Random) -> Example:
    """Ask for the option that the state names outright."""
    words = draw_words(tables, rng, lookup_options(rng))
    turn = make_choice("Which label is given?", words[0], words[1:], rng)
    return Example("given", f"label = {words[0]}", (turn,), certain=True)


def catalog_state(packages: Sequence[Package]) -> str:
    """List packages, a line each."""
    return "\n".join(f"{package.name}: {package.synopsis}" for package in packages)


def draw_catalog(tables: Tables, rng: Random) -> Example:
    """Ask for entries of a catalog of packages; some catalogs fill most of the context."""
    size = rng.randrange(30, 60) if rng.random() < LONG_CATALOG else rng.randrange(3, 12)
    packages = some(tables.packages, size, rng)
    state = catalog_state(packages)
    turns = []
    for _ in range(rng.choice((1, 2, 3)) if size < 30 else 5):
        chosen = some(packages, min(len(packages), option_count(rng, 5)), rng)
        right, wrong = chosen[0], chosen[1:]
        if rng.random() < 0.5:
            text = f"Which entry is described as: {right.synopsis}?"
            turns.append(make_choice(text, right.name, [other.name for other in wrong], rng))
        else:
            text = f"What is {right.name}?"
            lines = [other.synopsis for other in wrong if other.synopsis != right.synopsis]
            turns.append(make_choice(text, right.synopsis, lines, rng))
    return Example("catalog", state, tuple(turns), certain=True)
