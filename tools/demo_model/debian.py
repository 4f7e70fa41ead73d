"""Debian's package index as labelled text: descriptions, sections and debtags, split by group.

Packages of one source, with one short line, or sharing a rare paragraph are near copies of each
other; a group never straddles two splits.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools.demo_model.cleaning import fingerprint, plain
from tools.demo_model.texts import split_of

TEST_SHARE, VALID_SHARE = 0.18, 0.07
SHARED_CHARACTERS = 40  # a paragraph at least this long ties two packages together,
SHARED_SOURCES = 5  # unless this many sources use it: then it is boilerplate, and is dropped


@dataclass(slots=True)
class Package:
    """One binary package; `group` and `split` are set by `split_groups`."""

    name: str
    source: str
    section: str
    synopsis: str
    paragraphs: list[str]
    tags: list[str]
    group: str = ""
    split: str = ""
    leads: bool = False  # the one package of its group and section that decision prompts use


def stanzas(path: Path) -> Iterator[dict[str, str]]:
    """Yield the paragraphs of a Debian control file as field name -> value, lines kept."""
    for block in path.read_text("utf-8", errors="replace").split("\n\n"):
        values: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line[:1] in " \t":
                values[name] += "\n" + line.strip()
            else:
                name, _, value = line.partition(":")
                values[name] = value.strip()
        if values:
            yield values


def read_packages(lists: Path) -> list[Package]:
    """Join package lists with their long English descriptions; one entry per package name."""
    texts: dict[str, str] = {}
    for path in sorted(lists.glob("*bookworm_main*Translation-en")):
        for entry in stanzas(path):
            texts[entry["Description-md5"]] = entry.get("Description-en", "")
    packages: dict[str, Package] = {}
    for path in sorted(lists.glob("*bookworm_main_binary-*_Packages")):
        for entry in stanzas(path):
            text = texts.get(entry.get("Description-md5", ""), "")
            if text:
                packages.setdefault(entry["Package"], make_package(entry, text))
    return list(packages.values())


def make_package(entry: dict[str, str], text: str) -> Package:
    """Build a package from its index stanza and long description."""
    synopsis, _, body = text.partition("\n")
    tags = [tag.strip() for tag in entry.get("Tag", "").split(",") if "::" in tag]
    source = entry.get("Source", entry["Package"]).split(" ")[0]
    return Package(
        name=entry["Package"],
        source=source,
        section=entry.get("Section", "").split("/")[-1],
        synopsis=plain(synopsis),
        paragraphs=[part for part in map(plain, re.split(r"\n\.\n|\n\.$", body)) if part],
        tags=tags,
    )


@dataclass(slots=True)
class Groups:
    """Disjoint sets of package numbers (union-find with path halving)."""

    parent: list[int] = field(default_factory=list)

    def find(self, item: int) -> int:
        """Return the representative of an item's set."""
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join_all(self, items: Iterable[int]) -> None:
        """Put all items into one set; the lowest representative stays."""
        roots = sorted({self.find(item) for item in items})
        for root in roots[1:]:
            self.parent[root] = roots[0]


def split_groups(packages: list[Package]) -> None:
    """Strip boilerplate, find near copies, and set group, split and lead of every package."""
    users: dict[bytes, set[int]] = defaultdict(set)
    for number, package in enumerate(packages):
        for paragraph in package.paragraphs:
            users[fingerprint(paragraph)].add(number)
    sources = {mark: {packages[i].source for i in group} for mark, group in users.items()}
    groups = Groups(list(range(len(packages))))
    for key in ("source", "synopsis"):
        members: dict[str, list[int]] = defaultdict(list)
        for number, package in enumerate(packages):
            members[getattr(package, key)].append(number)
        for items in members.values():
            groups.join_all(items)
    for number, package in enumerate(packages):
        kept = [p for p in package.paragraphs if len(sources[fingerprint(p)]) < SHARED_SOURCES]
        package.paragraphs = kept
        for paragraph in kept:
            if len(paragraph) > SHARED_CHARACTERS:
                groups.join_all([number, *users[fingerprint(paragraph)]])
    taken: set[tuple[str, str]] = set()
    for number, package in enumerate(packages):
        package.group = packages[groups.find(number)].name
        package.split = split_of("debian/" + package.group, TEST_SHARE, VALID_SHARE)
        place = (package.group, package.section)
        package.leads = place not in taken and bool(package.paragraphs)
        taken.add(place)


def load_debian(lists: Path) -> list[Package]:
    """Read, group and split the packages of the index in `lists`."""
    packages = read_packages(lists)
    split_groups(packages)
    return packages
