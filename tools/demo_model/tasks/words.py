"""Decisions about words: categories, kinds, definitions, synonyms, opposites, topics, feeling."""

from collections.abc import Sequence
from random import Random

from tools.demo_model.labels import (
    CATEGORY_CLAIMS,
    CATEGORY_LABELS,
    CATEGORY_QUESTIONS,
    TESTED_CATEGORIES,
    VALENCE_LEVELS,
    valence_level,
)
from tools.demo_model.tables import Tables, ValenceWord
from tools.demo_model.tasks.drawing import (
    Example,
    Turn,
    article,
    make_choice,
    make_claim,
    option_count,
    some,
    wording,
)
from tools.demo_model.wordnet import Synset

KIND_QUESTIONS = (
    "What kind of thing is this?",
    "This is a kind of what?",
    "What is it an example of?",
)
WORD_QUESTIONS = (
    "Which word fits this definition?",
    "What is being defined?",
    "Which term does the text explain?",
)


def word_state(synset: Synset, rng: Random | None = None) -> str:
    """Word a sense as a state; without a generator as `word: definition`."""
    if rng is None:
        return f"{synset.lemmas[0]}: {synset.gloss}"
    kind = rng.random()
    text = f"{rng.choice(synset.lemmas)}: {synset.gloss}"
    if kind < 0.2:
        return synset.gloss
    if kind < 0.3 and synset.examples:
        return f"{text}\nExample: {rng.choice(synset.examples)}"
    return text


def category_turn(synset: Synset, rng: Random) -> Turn:
    """Ask for the category of a noun."""
    pool: Sequence[str] = list(CATEGORY_LABELS)
    if synset.category in TESTED_CATEGORIES and rng.random() < 0.5:
        pool = TESTED_CATEGORIES
    others = [name for name in pool if name != synset.category]
    chosen = some(others, option_count(rng) - 1, rng)
    wrong = [wording(CATEGORY_LABELS[name], rng) for name in chosen]
    right = wording(CATEGORY_LABELS[synset.category], rng)
    return make_choice(wording(CATEGORY_QUESTIONS, rng), right, wrong, rng)


def category_claim(synset: Synset, rng: Random) -> Turn:
    """Ask whether a noun is of a category."""
    holds = rng.random() < 0.5
    others = [name for name in CATEGORY_LABELS if name != synset.category]
    label = wording(CATEGORY_LABELS[synset.category if holds else rng.choice(others)], rng)
    return make_claim(wording(CATEGORY_CLAIMS, rng).format(label), holds, rng)


def draw_noun(tables: Tables, rng: Random) -> Synset:
    """Draw a noun sense by category."""
    known = [name for name in CATEGORY_LABELS if tables.by_category.get(name)]
    return rng.choice(tables.by_category[rng.choice(known)])


def draw_category(tables: Tables, rng: Random) -> Example | None:
    """Draw a category prompt, at times followed by claims."""
    synset = draw_noun(tables, rng)
    turns = [category_turn(synset, rng) if rng.random() < 0.8 else category_claim(synset, rng)]
    while rng.random() < 0.35 and len(turns) < 4:
        turns.append(rng.choice((category_turn, category_claim))(synset, rng))
    return Example("category", word_state(synset, rng), tuple(turns))


def draw_sense(tables: Tables, rng: Random) -> Synset:
    """Draw any sense."""
    return rng.choice(tables.synsets)


def ancestors(tables: Tables, synset: Synset, levels: int = 3) -> list[Synset]:
    """Return the hypernyms of a sense, nearest first."""
    found = []
    for _ in range(levels):
        if not synset.hypernyms:
            break
        synset = tables.senses[synset.hypernyms[0]]
        found.append(synset)
    return found


def kind_turn(
    tables: Tables, synset: Synset, above: Sequence[Synset], rng: Random
) -> tuple[Turn, Synset, list[str]] | None:
    """Ask for the kind of a thing; returns also the right kind and the wrong ones."""
    right = rng.choice(above)
    pool = tables.by_category[synset.category] if rng.random() < 0.4 else tables.synsets
    wrong = []
    for other in some(pool, 2 * option_count(rng), rng):
        kinds = ancestors(tables, other, 1)
        if kinds and kinds[0].id not in {sense.id for sense in above}:
            wrong.append(kinds[0].lemmas[0])
    wrong = sorted(set(wrong) - set(right.lemmas))
    wrong = some(wrong, option_count(rng) - 1, rng)
    if not wrong:
        return None
    turn = make_choice(wording(KIND_QUESTIONS, rng), right.lemmas[0], wrong, rng)
    return turn, right, wrong


def draw_hypernym(tables: Tables, rng: Random) -> Example | None:
    """Ask for the kind of a thing: its hypernym among those of other senses."""
    synset = draw_sense(tables, rng)
    above = ancestors(tables, synset, 2)
    asked = kind_turn(tables, synset, above, rng) if above else None
    if asked is None:
        return None
    turn, right, wrong = asked
    turns = [turn]
    if rng.random() < 0.4:
        holds = rng.random() < 0.5
        label = right.lemmas[0] if holds else rng.choice(wrong)
        turns.append(make_claim(f"Is this a kind of {label}?", holds, rng))
    return Example("hypernym", word_state(synset, rng), tuple(turns))


def draw_kinds(tables: Tables, rng: Random) -> Example | None:
    """Ask for the kind of a thing up to three times, each time among other options."""
    synset = draw_sense(tables, rng)
    above = ancestors(tables, synset, 2)
    if not above:
        return None
    asked = [kind_turn(tables, synset, above, rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    turns = tuple(one[0] for one in asked if one is not None)
    return Example("hypernym", word_state(synset, rng), turns) if turns else None


def draw_kind_claim(tables: Tables, rng: Random) -> Example | None:
    """Ask whether a word names a kind of something."""
    synset = draw_sense(tables, rng)
    above = ancestors(tables, synset)
    if not above or not synset.category.startswith("noun"):
        return None
    holds = rng.random() < 0.5
    if holds:
        kind = rng.choice(above)
    else:
        other = rng.choice(tables.by_category[synset.category])
        others = ancestors(tables, other)
        kind = rng.choice(others) if others else other
        if kind.id in {sense.id for sense in (synset, *above)}:
            return None
    text = f"Is {article(synset.lemmas[0])} a kind of {kind.lemmas[0]}?"
    return Example("kind_claim", word_state(synset, rng), (make_claim(text, holds, rng),))


def draw_definition(tables: Tables, rng: Random) -> Example | None:
    """Ask which word fits a definition, or which definition fits a word."""
    synset = draw_sense(tables, rng)
    pool = tables.by_category[synset.category] if rng.random() < 0.5 else tables.synsets
    others = [other for other in some(pool, option_count(rng, 8) - 1, rng) if other is not synset]
    others = [other for other in others if not set(other.lemmas) & set(synset.lemmas)]
    if not others:
        return None
    lemma = rng.choice(synset.lemmas)
    if rng.random() < 0.7:
        wrong = [other.lemmas[0] for other in others]
        turn = make_choice(wording(WORD_QUESTIONS, rng), lemma, wrong, rng)
        return Example("definition", synset.gloss, (turn,))
    wrong = [other.gloss[:120] for other in others[:4]]
    turn = make_choice(f"What does {lemma} mean?", synset.gloss[:120], wrong, rng)
    state = f"The word is {lemma}." if not synset.examples else rng.choice(synset.examples)
    return Example("definition", state, (turn,))


def draw_relation(tables: Tables, rng: Random) -> Example | None:
    """Ask for a synonym, an opposite, a whole or a topic."""
    synset = draw_sense(tables, rng)
    for _ in range(40):  # few senses have such relations: look on until one does
        if len(synset.lemmas) > 1 or synset.antonyms or synset.wholes or synset.topics:
            break
        synset = draw_sense(tables, rng)
    pairs: list[tuple[str, str]] = [
        (f"What is the opposite of {own}?", other) for own, other in synset.antonyms
    ]
    if len(synset.lemmas) > 1:
        own, other = some(synset.lemmas, 2, rng)
        pairs.append((f"Which word means the same as {own}?", other))
    for text, ids in (
        ("What is it a part of?", synset.wholes),
        ("Which field does this term belong to?", synset.topics),
    ):
        if ids:
            pairs += [(text, tables.senses[rng.choice(ids)].lemmas[0])] * 2
    if not pairs:
        return None
    text, right = rng.choice(pairs)
    part = synset.category.split(".")[0]
    pool = [s for s in some(tables.synsets, 60, rng) if s.category.startswith(part)]
    if "field" in text:
        topics = sorted(
            {topic for sense in some(tables.synsets, 600, rng) for topic in sense.topics}
        )
        pool = [tables.senses[topic] for topic in topics]
    wrong = sorted({other.lemmas[0] for other in pool} - {right, *synset.lemmas})
    wrong = some(wrong, option_count(rng) - 1, rng)
    if not wrong:
        return None
    return Example("relation", word_state(synset, rng), (make_choice(text, right, wrong, rng),))


def draw_valence(tables: Tables, rng: Random) -> Example | None:
    """Ask how positive a word is, as a level, a claim or both, or which of some is most positive.

    All levels come equally often, though words of strong feeling are rare.
    """
    levels = by_level(tables.valence)
    level = rng.choice(list(levels))
    word = rng.choice(levels[level])
    if rng.random() < 0.8:
        turns = [valence_turn(level), valence_claim(word, rng)]
        rng.shuffle(turns)
        # The level most of all, and often as the first: that is how it is asked.
        first = 0 if turns[0].kind == "score" or rng.random() < 0.5 else 1
        last = first + 1 if rng.random() < 0.5 else 2
        return Example("valence", word.word, tuple(turns[first:last]))
    most = rng.random() < 0.5
    words = [rng.choice(levels[other]) for other in some(list(levels), 4, rng)]
    words.sort(key=lambda other: other.rating, reverse=most)
    text = f"Which word is the most {'positive' if most else 'negative'}?"
    names = [other.word for other in words]
    state = ", ".join(rng.sample(names, len(names)))
    return Example("valence", state, (make_choice(text, names[0], names[1:], rng),))


def valence_claim(word: ValenceWord, rng: Random) -> Turn:
    """Ask whether a word is positive, or negative."""
    holds = rng.random() < 0.5
    positive = holds == (word.rating > 0)
    return make_claim(f"Is this word {'positive' if positive else 'negative'}?", holds, rng)


def by_level(words: Sequence[ValenceWord]) -> dict[int, list[ValenceWord]]:
    """Sort words by their level."""
    levels: dict[int, list[ValenceWord]] = {}
    for word in words:
        levels.setdefault(valence_level(word.rating), []).append(word)
    return levels


def valence_turn(level: int) -> Turn:
    """Ask for the level of a word's feeling."""
    return Turn("score", "How positive is the feeling of this word?", VALENCE_LEVELS, level)
