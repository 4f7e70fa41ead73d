"""Turns HTML and plain text into headed sections of clean English paragraphs."""

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b

MIN_CHARACTERS, MIN_WORDS = 50, 8
MIN_LETTERS, MAX_NON_ASCII = 0.80, 0.03

DROPPED = re.compile(
    r"<(script|style|nav|head|pre|table|footer|aside|svg)\b.*?</\1\s*>|<!--.*?-->", re.S | re.I
)
BLOCK = re.compile(
    r"<(h[1-6]|p|li|dd|dt)\b[^>]*>(.*?)"
    r"(?=</?(?:h[1-6]|p|li|dd|dt|ul|ol|dl|div|pre|table|section|blockquote|body)\b|\Z)",
    re.S | re.I,
)
HEADING_TAIL = re.compile(r"\s*(?:\[source\]|#)$")
TAG = re.compile(r"<[^>]+>")
SPACE = re.compile(r"\s+")
NUMBERING = re.compile(r"^(?:chapter|appendix)?\s*[\dA-Z]?[\d.]+\s+", re.I)
# Typographic characters and what stands for them in plain ASCII.
QUOTES = str.maketrans({
    "\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2013": "-", "\u2014": "-",
    "\u2026": "...", "\xa0": " ", "\xb6": "", "\xa7": "", "\u2022": "-",
})  # fmt: skip


@dataclass(slots=True)
class Section:
    """A heading (may be empty) and its paragraphs."""

    heading: str
    paragraphs: list[str] = field(default_factory=list)


def plain(text: str) -> str:
    """Replace typographic characters by ASCII ones and squeeze blanks."""
    return SPACE.sub(" ", html.unescape(text).translate(QUOTES)).strip()


def is_prose(text: str) -> bool:
    """Whether a paragraph is long enough and mostly English words."""
    if len(text) < MIN_CHARACTERS or len(text.split()) < MIN_WORDS:
        return False
    letters = sum(character.isalpha() or character.isspace() for character in text)
    foreign = sum(ord(character) > 127 for character in text)
    return letters >= MIN_LETTERS * len(text) and foreign <= MAX_NON_ASCII * len(text)


def html_sections(page: str) -> Iterator[Section]:
    """Yield the sections of an HTML page; code, tables and navigation are dropped."""
    section = Section("")
    for match in BLOCK.finditer(DROPPED.sub(" ", page)):
        text = plain(TAG.sub("", match[2]))
        if match[1].lower().startswith("h"):
            if section.paragraphs:
                yield section
            section = Section(HEADING_TAIL.sub("", NUMBERING.sub("", text))[:100])
        elif is_prose(text):
            section.paragraphs.append(text)
    if section.paragraphs:
        yield section


def plain_sections(text: str, *, keep_lines: bool = False) -> Iterator[Section]:
    """Yield one headless section of the paragraphs of a text, which blank lines part.

    `keep_lines` keeps line ends, as verse needs.
    """
    section = Section("")
    for block in re.split(r"\n\s*\n", text.translate(QUOTES)):
        flat = plain(block)
        if is_prose(flat):
            lines = [SPACE.sub(" ", line).strip() for line in block.strip().splitlines()]
            section.paragraphs.append("\n".join(lines) if keep_lines else flat)
    if section.paragraphs:
        yield section


def fingerprint(text: str) -> bytes:
    """Hash a paragraph by its letters and digits alone."""
    return blake2b(re.sub(r"[^a-z0-9]", "", text.lower()).encode(), digest_size=8).digest()


def drop_repeats(sections: Iterable[Section], seen: set[bytes]) -> Iterator[Section]:
    """Drop paragraphs whose fingerprint is in `seen`, which grows; empty sections vanish."""
    for section in sections:
        kept = []
        for paragraph in section.paragraphs:
            mark = fingerprint(paragraph)
            if mark not in seen:
                seen.add(mark)
                kept.append(paragraph)
        if kept:
            yield Section(section.heading, kept)


def hash_share(key: str) -> float:
    """Map a key to a fixed number in [0, 1); splits by group compare it with their shares."""
    return int.from_bytes(blake2b(key.encode(), digest_size=7).digest()) / 2.0**56
