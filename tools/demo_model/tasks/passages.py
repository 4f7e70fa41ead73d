"""Decisions about passages of running text: source, heading, what comes next, made-up labels."""

from random import Random

from tools.demo_model.cleaning import Section
from tools.demo_model.labels import CATEGORY_LABELS, SECTION_LABELS
from tools.demo_model.sources import SOURCES
from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import (
    MAX_STATE,
    Example,
    Turn,
    clip,
    make_choice,
    option_count,
    sentences,
    some,
    wording,
)
from tools.demo_model.tasks.packages import draw_package, package_state
from tools.demo_model.tasks.words import draw_noun, word_state

TOPICS = {source.name: source.topic for source in SOURCES if source.topic}
TOPIC_QUESTIONS = ("What is this text about?", "Where does this text come from?")
HEADING_QUESTIONS = (
    "Which heading fits this text?",
    "Which title belongs above this passage?",
    "What is the subject of this text?",
)
NEXT_QUESTIONS = ("Which sentence comes next?", "How does the text go on?")
INVENTED = (
    "red", "blue", "green", "yellow", "white", "black", "north", "south", "west", "east", "alpha",
    "beta", "gamma", "delta", "apple", "pear", "plum", "cherry", "oak", "elm", "birch", "lion",
    "tiger", "wolf", "eagle", "one", "two", "three", "four", "left", "right", "upper", "lower",
)  # fmt: skip


def draw_section_of(tables: Tables, rng: Random) -> tuple[str, Section]:
    """Draw a source that has a topic, and a section of one of its documents."""
    source = rng.choice([name for name in TOPICS if tables.by_source.get(name)])
    document = rng.choice(tables.by_source[source])
    return source, rng.choice(document.sections)


def draw_topic(tables: Tables, rng: Random) -> Example | None:
    """Ask which work a passage is from."""
    source, section = draw_section_of(tables, rng)
    others = [topic for name, topic in TOPICS.items() if name != source]
    wrong = some(others, option_count(rng) - 1, rng)
    state = clip(rng.choice(section.paragraphs), rng.choice((150, 300, MAX_STATE)))
    turn = make_choice(wording(TOPIC_QUESTIONS, rng), TOPICS[source], wrong, rng)
    return Example("topic", state, (turn,))


def has_heading(section: Section) -> bool:
    """Whether a section's heading says something by itself."""
    return 6 <= len(section.heading) <= 60 and "(" not in section.heading


def draw_heading(tables: Tables, rng: Random) -> Example | None:
    """Ask which heading fits a passage; half of the wrong ones are of the same source."""
    source, section = draw_section_of(tables, rng)
    if not has_heading(section):
        return None
    wrong = set()
    same = rng.random() < 0.5
    for _ in range(3 * option_count(rng, 6)):
        other = draw_section_of(tables, rng)[1]
        if same:
            other = rng.choice(rng.choice(tables.by_source[source]).sections)
        if has_heading(other):
            wrong.add(other.heading)
    wrong.discard(section.heading)
    options = some(sorted(wrong), option_count(rng, 6) - 1, rng)
    if not options:
        return None
    state = clip(" ".join(section.paragraphs), rng.choice((200, 400, MAX_STATE)))
    turn = make_choice(wording(HEADING_QUESTIONS, rng), section.heading, options, rng)
    return Example("heading", state, (turn,))


def draw_next(tables: Tables, rng: Random) -> Example | None:
    """Ask which sentence follows; the wrong ones come from elsewhere."""
    source, section = draw_section_of(tables, rng)
    parts = sentences(rng.choice(section.paragraphs))
    if len(parts) < 2:
        return None
    at = rng.randrange(1, len(parts))
    wrong = []
    for _ in range(option_count(rng, 5) - 1):
        other = rng.choice(rng.choice(tables.by_source[source]).sections)
        line = rng.choice(sentences(rng.choice(other.paragraphs)))
        if line != parts[at]:
            wrong.append(clip(line, 120))
    if not wrong:
        return None
    turn = make_choice(wording(NEXT_QUESTIONS, rng), clip(parts[at], 120), wrong, rng)
    return Example("next", clip(" ".join(parts[:at]), MAX_STATE), (turn,))


def draw_invented(tables: Tables, rng: Random) -> Example | None:
    """Ask for a made-up label that the state explains."""
    if rng.random() < 0.5:
        package = draw_package(tables, rng)
        text, own, labels = package_state(package, rng), package.section, SECTION_LABELS
    else:
        synset = draw_noun(tables, rng)
        text, own, labels = word_state(synset, rng), synset.category, CATEGORY_LABELS
    count = option_count(rng, 6)
    names = [own, *some([name for name in labels if name != own], count - 1, rng)]
    words = some(INVENTED, count, rng)
    legend = [f"{word} means {labels[name][0]}." for word, name in zip(words, names, strict=True)]
    rng.shuffle(legend)
    turn: Turn = make_choice("Which label applies?", words[0], words[1:], rng)
    return Example("invented", f"{' '.join(legend)}\n{text}", (turn,))
