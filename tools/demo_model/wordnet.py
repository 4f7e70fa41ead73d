"""WordNet 3.0's data files as records, split by hypernym.

Source: wndb(5WN): `offset lex_filenum ss_type w_cnt word lex_id ... p_cnt ptr ... | gloss`, counts
of words in hexadecimal, of pointers in decimal.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.demo_model.cleaning import plain
from tools.demo_model.texts import split_of

TEST_SHARE, VALID_SHARE = 0.08, 0.03
PARTS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
HYPERNYMS, ANTONYM, WHOLES, TOPIC = {"@", "@i"}, "!", {"#p", "#m"}, ";c"
LEXICOGRAPHER_FILES = (
    "adj.all", "adj.pert", "adv.all", "noun.Tops", "noun.act", "noun.animal", "noun.artifact",
    "noun.attribute", "noun.body", "noun.cognition", "noun.communication", "noun.event",
    "noun.feeling", "noun.food", "noun.group", "noun.location", "noun.motive", "noun.object",
    "noun.person", "noun.phenomenon", "noun.plant", "noun.possession", "noun.process",
    "noun.quantity", "noun.relation", "noun.shape", "noun.state", "noun.substance", "noun.time",
    "verb.body", "verb.change", "verb.cognition", "verb.communication", "verb.competition",
    "verb.consumption", "verb.contact", "verb.creation", "verb.emotion", "verb.motion",
    "verb.perception", "verb.possession", "verb.social", "verb.stative", "verb.weather", "adj.ppl",
)  # fmt: skip


@dataclass(slots=True)
class Synset:
    """One sense: its words, what it means, and the ids of related senses."""

    id: str
    lemmas: list[str]
    category: str  # lexicographer file, such as noun.animal
    gloss: str
    examples: list[str]
    hypernyms: list[str] = field(default_factory=list)
    wholes: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)
    antonyms: list[tuple[str, str]] = field(default_factory=list)  # (own lemma, the opposite)
    split: str = ""


def read_synsets(folder: Path) -> list[Synset]:
    """Read the four data files below `folder` (which holds data.noun and so on)."""
    synsets: dict[str, Synset] = {}
    opposites: list[tuple[Synset, str, int, int]] = []
    for part in PARTS:
        for line in (folder / f"data.{part}").read_text("utf-8", errors="replace").splitlines():
            if not line.startswith("  "):
                synset = parse_line(line, PARTS[part], opposites)
                synsets[synset.id] = synset
    for synset, target, own, other in opposites:
        words = synsets[target].lemmas
        synset.antonyms.append((synset.lemmas[own], words[other]))
    for synset in synsets.values():
        synset.split = split_of(
            "wordnet/" + (synset.hypernyms or [synset.id])[0], TEST_SHARE, VALID_SHARE
        )
    return list(synsets.values())


def parse_line(line: str, part: str, opposites: list[tuple[Synset, str, int, int]]) -> Synset:
    """Parse one line of a data file; antonyms go to `opposites`, to be resolved at the end."""
    data, _, text = line.partition(" | ")
    fields = data.split(" ")
    words = int(fields[3], 16)
    raw_lemmas = fields[4 : 4 + 2 * words : 2]
    gloss, examples = split_gloss(text)
    synset = Synset(
        id=part + fields[0],
        lemmas=[re.sub(r"\([a-z]+\)$", "", lemma).replace("_", " ") for lemma in raw_lemmas],
        category=LEXICOGRAPHER_FILES[int(fields[1])],
        gloss=gloss,
        examples=examples,
    )
    at = 4 + 2 * words
    for number in range(int(fields[at])):
        symbol, offset, kind, ends = fields[at + 1 + 4 * number : at + 5 + 4 * number]
        target = ("a" if kind == "s" else kind) + offset
        if symbol in HYPERNYMS:
            synset.hypernyms.append(target)
        elif symbol in WHOLES:
            synset.wholes.append(target)
        elif symbol == TOPIC:
            synset.topics.append(target)
        elif symbol == ANTONYM:
            opposites.append((synset, target, int(ends[:2], 16) - 1, int(ends[2:], 16) - 1))
    return synset


def split_gloss(text: str) -> tuple[str, list[str]]:
    """Part a gloss from its quoted examples."""
    examples = [plain(example) for example in re.findall(r'"([^"]+)"', text)]
    gloss = plain(re.sub(r'"[^"]*"?', "", text))
    return re.sub(r"[\s;,]+$", "", re.sub(r"(; )+", "; ", gloss)), examples


def dictionary_lines(synsets: list[Synset]) -> Iterator[str]:
    """Yield `lemmas: gloss. "example"` lines, the form in which the model reads WordNet."""
    for synset in synsets:
        examples = "".join(f' "{example}"' for example in synset.examples)
        yield f"{', '.join(synset.lemmas)}: {synset.gloss}.{examples}"
