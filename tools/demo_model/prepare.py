"""Builds the prepared data: downloads, documents, labelled records, and the tokenizer.

    python -m tools.demo_model.prepare WORK_FOLDER OUTPUT_FOLDER

Needs apt-get with Debian 12's archive, dpkg-deb, and pip. Takes a few minutes; what has been
downloaded is kept in the work folder.
"""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import click

from tools.demo_model.debian import Package, load_debian
from tools.demo_model.prompt import DECISION_SYSTEM, render, user_turn
from tools.demo_model.sources import SOURCES, fetch, update_index
from tools.demo_model.tables import ValenceWord, load_tables, write_lines
from tools.demo_model.tasks.chats import draw_chat
from tools.demo_model.tasks.drawing import Example
from tools.demo_model.tasks.mixture import draw_example
from tools.demo_model.texts import Document, read_documents, split_of
from tools.demo_model.vocabulary import train_tokenizer
from tools.demo_model.wordnet import Synset, dictionary_lines, read_synsets

logger = logging.getLogger(__name__)

DIALOGUE_FILES = (
    "coding", "tech_support", "trivia", "computers", "food", "greetings", "health", "history",
    "literature", "science", "sports",
)  # fmt: skip
VALENCE_TEST, VALENCE_VALID = 0.15, 0.07
VOCABULARY_DOCUMENTS = 6000  # documents, and as many prompts, that the tokenizer learns from


def gather_documents(folders: dict[str, Path]) -> Iterator[Document]:
    """Yield the documents of every source of running text, repeats dropped across sources."""
    seen: set[bytes] = set()
    for source in SOURCES:
        if source.kind != "labels":
            count = 0
            for document in read_documents(source, folders[source.name], seen):
                count += 1
                yield document
            logger.info("%s: %d documents", source.name, count)


def read_valence(folder: Path) -> Iterator[ValenceWord]:
    """Yield the plain words of VADER's lexicon; words of one stem stay in one split."""
    (path,) = folder.glob("**/vader_lexicon.txt")
    for line in path.read_text("utf-8").splitlines():
        word, rating, *_ = line.split("\t")
        if word.isascii() and word.isalpha():
            split = split_of(f"valence/{word[:5]}", VALENCE_TEST, VALENCE_VALID)
            yield ValenceWord(word, float(rating), split)


def read_dialogues(folder: Path) -> Iterator[list[str]]:
    """Yield conversations as alternating lines, the user's first.

    The YAML of the corpus is two levels of list items; nothing more of YAML is read.
    """
    for name in DIALOGUE_FILES:
        (path,) = folder.glob(f"**/english/{name}.yml")
        body = path.read_text("utf-8").split("conversations:")[1]
        for block in re.split(r"\n- - ", "\n" + body.strip())[1:]:
            lines = [unquote(line) for line in re.split(r"\n  - ", block)]
            if all(lines) and len(lines) % 2 == 0:
                yield lines


def unquote(scalar: str) -> str:
    """Read a YAML scalar: joined lines, quotes taken off."""
    text = " ".join(scalar.split())
    if text[:1] in "'\"" and text[:1] == text[-1:]:
        text = text[1:-1].replace("''", "'").replace('\\"', '"')
    return text


def training_texts(output: Path) -> Iterator[str]:
    """Yield what the tokenizer learns from: documents, descriptions, and rendered prompts."""
    (tables,) = load_tables(output, "train")
    rng = Random(0)
    for document in rng.sample(tables.documents, min(VOCABULARY_DOCUMENTS, len(tables.documents))):
        yield document.text()
    for package in rng.sample(tables.packages, min(VOCABULARY_DOCUMENTS, len(tables.packages))):
        yield package_text(package)
    yield from dictionary_lines(tables.synsets[:: max(1, len(tables.synsets) // 20_000)])
    for number in range(VOCABULARY_DOCUMENTS):
        progress = number / VOCABULARY_DOCUMENTS
        yield rendered(draw_example(tables, rng, progress))
        yield render(draw_chat(tables, rng), answer_next=False)


def package_text(package: Package) -> str:
    """Word a package as running text."""
    return "\n".join([package.synopsis, *package.paragraphs])


def rendered(example: Example) -> str:
    """Render an example's first question with its answer."""
    turn = example.turns[0]
    turns = [("system", DECISION_SYSTEM), ("user", user_turn(example.state, turn.question()))]
    return render([*turns, ("assistant", turn.labels()[turn.answer])], answer_next=False)


def build(work: Path, output: Path) -> None:
    """Download everything into `work` and write the prepared data to `output`."""
    output.mkdir(parents=True, exist_ok=True)
    update_index(work)
    folders = {source.name: fetch(source, work) for source in SOURCES}
    write_lines(output / "documents.jsonl.xz", gather_documents(folders))
    packages: list[Package] = load_debian(work / "lists")
    write_lines(output / "packages.jsonl.xz", packages)
    synsets: list[Synset] = read_synsets(next(folders["wordnet"].glob("**/data.noun")).parent)
    write_lines(output / "synsets.jsonl.xz", synsets)
    write_lines(output / "valence.jsonl.xz", read_valence(folders["valence"]))
    write_lines(output / "dialogues.jsonl.xz", read_dialogues(folders["chat"]))
    licences = {source.name: [source.package, source.licence] for source in SOURCES}
    licences["debian"] = ["descriptions of Debian 12 packages", "per package"]
    (output / "licences.json").write_text(json.dumps(licences, indent=1) + "\n")
    train_tokenizer(training_texts(output)).save(str(output / "tokenizer.json"), pretty=False)


@click.command()
@click.argument("work", type=click.Path(file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
def main(work: Path, output: Path) -> None:
    """Prepare the training data: downloads go to WORK, tables and tokenizer to OUTPUT."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    build(work.resolve(), output.resolve())


if __name__ == "__main__":
    main()
