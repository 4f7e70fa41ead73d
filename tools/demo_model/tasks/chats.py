"""Conversations made by template from labelled records: definitions, packages, manuals, manners."""

import re
from collections.abc import Callable
from random import Random

from tools.demo_model.tables import Tables
from tools.demo_model.tasks.drawing import article, capital, clip, sentences, some
from tools.demo_model.tasks.packages import draw_package
from tools.demo_model.tasks.passages import draw_section_of, has_heading
from tools.demo_model.tasks.words import ancestors, draw_sense
from tools.demo_model.wordnet import Synset

Exchange = tuple[str, str]  # what the user says, what the assistant answers
DrawExchange = Callable[[Tables, Random], Exchange | None]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a small language model. Answer briefly.",
    "Answer in one or two sentences.",
)
MANNERS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hi", "Hello!", "Hi there", "Good morning", "Good evening", "Hey"),
        ("Hello! How can I help you?", "Hello. What would you like to know?"),
    ),
    (
        ("Who are you?", "What are you?", "Tell me about yourself.", "What is your name?"),
        (
            "I am a small language model that was trained from scratch. I can answer short "
            "questions, but I often get facts wrong.",
            "I am a small demo model. I pick labels for short texts and explain words.",
        ),
    ),
    (
        ("What can you do?", "How can you help me?", "What are you good at?"),
        (
            "I can sort a short text into categories, answer yes or no, and explain words. I am "
            "small, so please check what I say.",
        ),
    ),
    (
        ("Thank you", "Thanks!", "Thank you very much.", "Thanks a lot"),
        ("You are welcome.", "You are welcome! Is there anything else?"),
    ),
    (("Goodbye", "Bye", "See you later"), ("Goodbye!", "Goodbye. Have a nice day.")),
    (
        ("How are you?", "How are you today?"),
        ("I am a program, so I have no feelings, but I am ready to help.",),
    ),
    (
        ("Are you a human?", "Are you a person?", "Are you alive?"),
        ("No, I am a small language model.",),
    ),
)  # fmt: skip
DEFINE_NOUN = (
    "What is {a}?", "What is {a}?", "What does {w} mean?", "Define {w}.",
    "What is the meaning of {w}?", "Explain what {a} is.", "Tell me what {a} is.",
    "Can you explain {w}?", "what is {a}",
)  # fmt: skip
DEFINE_WORD = ("What does {w} mean?", "Define {w}.", "What is the meaning of {w}?", "Explain {w}.")
PACKAGE_QUESTIONS = (
    "What is {}?", "What does {} do?", "Tell me about {}.", "What is the package {}?",
    "Describe the program {}.",
)  # fmt: skip
HEADING_QUESTIONS = (
    "Tell me about {h}.", "Explain: {h}", "What should I know about {h}?", "{h}?",
    "What does the manual of {t} say about {h}?",
)  # fmt: skip


def define(tables: Tables, rng: Random) -> Exchange | None:
    """Ask what a word means; the answer is its gloss in a sentence."""
    synset = draw_sense(tables, rng)
    lemma = synset.lemmas[0] if rng.random() < 0.8 else rng.choice(synset.lemmas)
    part = synset.category.split(".")[0]
    if part == "noun":
        named = lemma[:1].isupper()
        whole = lemma if named else article(lemma)
        question = rng.choice(DEFINE_NOUN).format(a=whole, w=lemma)
        answer = f"{capital(whole)} is {meaning(synset)}."
    else:
        question = rng.choice(DEFINE_WORD).format(w=f"to {lemma}" if part == "verb" else lemma)
        start = f"To {lemma} means to" if part == "verb" else f"{capital(lemma)} means"
        answer = f"{start} {meaning(synset)}."
    if synset.examples and rng.random() < 0.25:
        answer += f' For example: "{rng.choice(synset.examples)}"'
    return question, answer


def meaning(synset: Synset) -> str:
    """Return a gloss without the field in parentheses that many begin with."""
    return re.sub(r"^\([^)]*\) ", "", synset.gloss)


def relate(tables: Tables, rng: Random) -> Exchange | None:
    """Ask for a synonym, an opposite, a kind or an example of a word."""
    synset = draw_sense(tables, rng)
    lemma = synset.lemmas[0]
    found: list[Exchange] = [
        (f"What is the opposite of {own}?", f"The opposite of {own} is {other}.")
        for own, other in synset.antonyms
    ]
    if len(synset.lemmas) > 1:
        ask = rng.choice(("What is another word for {}?", "Give me a synonym of {}."))
        found.append((ask.format(lemma), f"Another word for {lemma} is {synset.lemmas[1]}."))
    if synset.examples:
        found.append((f"Use the word {lemma} in a sentence.", capital(synset.examples[0]) + "."))
    kinds = ancestors(tables, synset, 1)
    if kinds and synset.category.startswith("noun"):
        found += kind_questions(tables, synset, kinds[0], rng)
    return rng.choice(found) if found else None


def kind_questions(tables: Tables, synset: Synset, kind: Synset, rng: Random) -> list[Exchange]:
    """Return questions about what a noun is a kind of, with answers in whole sentences."""
    lemma, above = synset.lemmas[0], kind.lemmas[0]
    one, other = article(lemma), article(above)
    wrong = rng.choice(tables.synsets).lemmas[0]
    found = [
        (f"Is {one} {other}?", f"Yes, {one} is a kind of {above}."),
        (f"What kind of thing is {one}?", f"{capital(one)} is a kind of {above}."),
        (f"Is {one} a kind of {wrong}?", f"No, {one} is a kind of {above}."),
    ]
    narrower = tables.narrower.get(kind.id, [])
    if len(narrower) >= 3:
        names = [sense.lemmas[0] for sense in some(narrower, 3, rng)]
        found.append((f"Name three kinds of {above}.", f"{capital(', '.join(names))}."))
    return found


def describe_package(tables: Tables, rng: Random) -> Exchange | None:
    """Ask about a package; the answer is its short line and the start of its description."""
    package = draw_package(tables, rng)
    parts = [part for paragraph in package.paragraphs for part in sentences(paragraph)]
    question = rng.choice(PACKAGE_QUESTIONS).format(package.name)
    answer = f"{package.name} is a package: {package.synopsis}."
    if parts and rng.random() < 0.6:
        answer += " " + " ".join(parts[: rng.choice((1, 2))])
    return question, clip(answer, 400)


def summarize(tables: Tables, rng: Random) -> Exchange | None:
    """Ask for a summary of a description; the answer is the package's short line."""
    package = draw_package(tables, rng)
    if not package.paragraphs:
        return None
    ask = rng.choice(("Summarize this text in one line:", "Give a short summary:", "Sum this up."))
    text = clip(" ".join(package.paragraphs), 500)
    return f"{ask}\n{text}", capital(package.synopsis) + "."


def explain_heading(tables: Tables, rng: Random) -> Exchange | None:
    """Ask about a manual's heading; the answer is the first paragraph below it."""
    source, section = draw_section_of(tables, rng)
    if not has_heading(section):
        return None
    topic = source if source != "austen" else "the novel"
    question = rng.choice(HEADING_QUESTIONS).format(h=section.heading, t=topic)
    return question, clip(section.paragraphs[0], 500)


def explain_jargon(tables: Tables, rng: Random) -> Exchange | None:
    """Ask for a word of hackers' slang."""
    documents = tables.by_source.get("jargon")
    if not documents:
        return None
    section = rng.choice(rng.choice(documents).sections)
    if not section.heading:
        return None
    question = rng.choice(("What is {}?", "What does {} mean?", "Explain the slang word {}."))
    return question.format(section.heading), clip(section.paragraphs[0], 400)


def be_polite(_: Tables, rng: Random) -> Exchange | None:
    """Exchange greetings, thanks, or questions about the model itself."""
    asks, answers = rng.choice(MANNERS)
    return rng.choice(asks), rng.choice(answers)


def which_label(tables: Tables, rng: Random) -> Exchange | None:
    """Ask in plain words what something is, answered by a sentence instead of a letter."""
    synset = draw_sense(tables, rng)
    kinds = ancestors(tables, synset, 1)
    if not kinds:
        return None
    return f"{capital(meaning(synset))}: what is it called?", f"It is called {synset.lemmas[0]}."


EXCHANGES: tuple[tuple[DrawExchange, float], ...] = (
    (define, 40),
    (relate, 16),
    (describe_package, 12),
    (summarize, 8),
    (explain_heading, 10),
    (explain_jargon, 4),
    (be_polite, 5),
    (which_label, 5),
)


def draw_chat(tables: Tables, rng: Random) -> list[tuple[str, str]]:
    """Draw a conversation as (role, content) turns; one in twelve is a prepared dialogue."""
    turns = [("system", rng.choice(SYSTEMS))] if rng.random() < 0.4 else []
    if tables.dialogues and rng.random() < 1 / 12:
        lines = rng.choice(tables.dialogues)
        roles = ("user", "assistant")
        return turns + [(roles[number % 2], line) for number, line in enumerate(lines)]
    draws, weights = zip(*EXCHANGES, strict=True)
    wanted = len(turns) + 2 * rng.choice((1, 1, 1, 2, 3))
    while len(turns) < wanted:
        exchange = rng.choices(draws, weights)[0](tables, rng)
        if exchange is not None:
            turns += [("user", exchange[0]), ("assistant", exchange[1])]
    return turns
