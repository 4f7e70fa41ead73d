"""The prepared data as compact files, and as the indexes that prompts are drawn from.

A folder of prepared data holds `documents`, `packages`, `synsets`, `dialogues` (JSON lines, xz),
`valence` (JSON lines, xz) and `tokenizer.json`.
"""

import json
import lzma
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.demo_model.cleaning import Section
from tools.demo_model.debian import Package
from tools.demo_model.texts import Document
from tools.demo_model.wordnet import Synset


@dataclass(frozen=True, slots=True)
class ValenceWord:
    """A word and how people rated its feeling, -4 to 4."""

    word: str
    rating: float
    split: str


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Write records (dataclasses or plain JSON values) as xz-compressed JSON lines."""
    with lzma.open(path, "wt", encoding="utf-8", preset=6) as file:
        for record in records:
            value = record if isinstance(record, list | dict) else asdict(record)
            file.write(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def read_lines(path: Path) -> Iterator[Any]:
    """Yield the JSON values of a file that `write_lines` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def read_documents(folder: Path) -> Iterator[Document]:
    """Yield the prepared documents of running text."""
    for value in read_lines(folder / "documents.jsonl.xz"):
        sections = [Section(**section) for section in value["sections"]]
        yield Document(value["source"], value["split"], sections)


@dataclass(slots=True)
class Tables:
    """Labelled records of one split (train, valid or test), indexed for drawing prompts."""

    split: str
    packages: list[Package]  # one per group and section
    synsets: list[Synset]
    valence: list[ValenceWord]
    documents: list[Document]
    dialogues: list[list[str]]
    by_section: dict[str, list[Package]] = field(default_factory=lambda: defaultdict(list))
    by_tag: dict[str, list[Package]] = field(default_factory=lambda: defaultdict(list))
    by_facet: dict[str, list[Package]] = field(default_factory=lambda: defaultdict(list))
    by_category: dict[str, list[Synset]] = field(default_factory=lambda: defaultdict(list))
    senses: dict[str, Synset] = field(
        default_factory=dict
    )  # of every split: hypernyms cross splits
    narrower: dict[str, list[Synset]] = field(default_factory=lambda: defaultdict(list))
    by_source: dict[str, list[Document]] = field(default_factory=lambda: defaultdict(list))
    claimed: Counter[tuple[str, bool]] = field(
        default_factory=Counter
    )  # of debtags, in addition to other questions: how often so far, rightly and wrongly

    def index(self) -> None:
        """Fill the indexes from the records."""
        for package in self.packages:
            self.by_section[package.section].append(package)
            for facet in {tag.split("::")[0] for tag in package.tags}:
                self.by_facet[facet].append(package)
            for tag in package.tags:
                self.by_tag[tag].append(package)
        for synset in self.synsets:
            self.by_category[synset.category].append(synset)
            for hypernym in synset.hypernyms:
                self.narrower[hypernym].append(synset)
        for document in self.documents:
            self.by_source[document.source].append(document)


def load_tables(folder: Path, *splits: str) -> tuple[Tables, ...]:
    """Load the records of the given splits, one `Tables` each. Dialogues are for training only."""
    packages = [Package(**value) for value in read_lines(folder / "packages.jsonl.xz")]
    synsets = [Synset(**value) for value in read_lines(folder / "synsets.jsonl.xz")]
    valence = [ValenceWord(**value) for value in read_lines(folder / "valence.jsonl.xz")]
    documents = list(read_documents(folder))
    dialogues = list(read_lines(folder / "dialogues.jsonl.xz"))
    senses = {synset.id: synset for synset in synsets}
    loaded = []
    for split in splits:
        tables = Tables(
            split,
            [package for package in packages if package.split == split and package.leads],
            [synset for synset in synsets if synset.split == split],
            [word for word in valence if word.split == split],
            [document for document in documents if document.split == split],
            dialogues if split == "train" else [],
            senses=senses,
        )
        tables.index()
        loaded.append(tables)
    return tuple(loaded)
