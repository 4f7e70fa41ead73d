"""Reads the sources of running text into documents."""

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.demo_model.cleaning import (
    Section,
    drop_repeats,
    hash_share,
    html_sections,
    plain,
    plain_sections,
)
from tools.demo_model.sources import Source, source_files

TEST_SHARE, VALID_SHARE = 0.015, 0.005
PART_SECTIONS = 40  # a long file becomes several documents of this many sections or paragraphs
VIM_MARKUP = re.compile(r"\*\S+\*|[|`](\S+?)[|`]|[<>]$", re.M)
R_STRING = re.compile(rb"\x00\x04\x00\x09\x00\x00(..)", re.S)


@dataclass(frozen=True, slots=True)
class Document:
    """Consecutive sections of one file; `split` is train, valid or test."""

    source: str
    split: str
    sections: list[Section]

    def text(self) -> str:
        """Return the whole document as one text, paragraphs parted by blank lines."""
        parts = []
        for section in self.sections:
            parts += [section.heading] * bool(section.heading) + section.paragraphs
        return "\n\n".join(parts)


def split_of(key: str, test: float = TEST_SHARE, valid: float = VALID_SHARE) -> str:
    """Choose the split of a group by the hash of its key."""
    share = hash_share(key)
    return "test" if share < test else "valid" if share < test + valid else "train"


def read_html(path: Path) -> Iterator[Section]:
    """Read an HTML file."""
    yield from html_sections(path.read_text("utf-8", errors="replace"))


def read_prose(path: Path) -> Iterator[Section]:
    """Read a plain text file whose line ends mean nothing."""
    yield from plain_sections(path.read_text("utf-8", errors="replace"))


def read_verse(path: Path) -> Iterator[Section]:
    """Read a plain text file whose line ends matter, without Project Gutenberg's own pages."""
    text = path.read_text("utf-8", errors="replace").replace("\r", "")
    text = re.split(r"\*\*\* ?START OF.*?\*\*\*|\*END[* ]*THE SMALL PRINT.*?\*END\*", text)[-1]
    text = re.split(r"\*\*\* ?END OF|End of (?:the )?Project Gutenberg", text)[0]
    for section in plain_sections(text, keep_lines=True):
        kept = [part for part in section.paragraphs if "gutenberg" not in part.lower()]
        yield Section("", kept)


def read_vim(path: Path) -> Iterator[Section]:
    """Read a Vim help file without its tags, links and tables of contents."""
    yield from plain_sections(VIM_MARKUP.sub(r"\1", path.read_text("utf-8", errors="replace")))


def read_bible(path: Path) -> Iterator[Section]:
    """Read the one long string of a pythonbible module, four verses a paragraph, unnumbered."""
    literal = path.read_text("utf-8").split('"""')[1]
    verses = [plain(verse).replace("`", "'") for verse in re.split(r"\s*\d+\. ", literal)]
    verses = [verse for verse in verses if verse]
    yield Section("", [" ".join(verses[i : i + 4]) for i in range(0, len(verses), 4)])


def read_austen(path: Path) -> Iterator[Section]:
    """Read the novels of an R lazy-load database: zlib streams of serialised strings."""
    raw = path.read_bytes()
    while raw:
        stream = zlib.decompressobj()
        data = stream.decompress(raw[4:])  # each stream follows its plain length, 4 bytes
        raw = stream.unused_data
        lines = []
        for match in R_STRING.finditer(data):
            size = int.from_bytes(match[1])
            lines.append(data[match.end() : match.end() + size].decode("utf-8", "replace"))
        yield from plain_sections("\n".join(lines))


def read_jargon(path: Path) -> Iterator[Section]:
    """Read a dictd file: a headword at the margin, its definition indented below."""
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    for entry in re.split(r"\n(?=\S)", text):
        head, _, body = entry.partition("\n")
        body = re.sub(r"^ ?\S*//?.*?$|^ [a-z./ ,]+\.$", "", body, count=1, flags=re.M)
        body = re.sub(r"[{}]", "", body)
        for section in plain_sections(body):
            yield Section(plain(head)[:60], section.paragraphs)


READERS: dict[str, Callable[[Path], Iterator[Section]]] = {
    "html": read_html,
    "prose": read_prose,
    "verse": read_verse,
    "vim": read_vim,
    "bible": read_bible,
    "austen": read_austen,
    "jargon": read_jargon,
}


def read_documents(source: Source, folder: Path, seen: set[bytes]) -> Iterator[Document]:
    """Yield the documents of one unpacked source; paragraphs in `seen` are skipped."""
    for path in source_files(source, folder):
        sections = list(drop_repeats(READERS[source.kind](path), seen))
        for number, part in enumerate(document_parts(sections)):
            key = f"{source.name}/{path.relative_to(folder)}/{number}"
            yield Document(source.name, split_of(key), part)


def document_parts(sections: list[Section]) -> Iterator[list[Section]]:
    """Cut the sections of one file into parts of at most PART_SECTIONS paragraphs each."""
    part: list[Section] = []
    used = 0
    for section in sections:
        for start in range(0, len(section.paragraphs), PART_SECTIONS):
            some = section.paragraphs[start : start + PART_SECTIONS]
            if part and used + len(some) > PART_SECTIONS:
                yield part
                part, used = [], 0
            part.append(Section(section.heading if start == 0 else "", some))
            used += len(some)
    if part:
        yield part
