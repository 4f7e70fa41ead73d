"""docs/rooms.md: what each file of the package holds, in the words that the file begins with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "strata_cli"

# Each room's folder below the package; a room imports only from those below it in this list.
ROOMS = (
    "commands",
    "launch",
    "server",
    "decisions",
    "engine/measuring",
    "engine",
    "",
    "engine/prefill",
    "engine/decode",
    "engine/forward",
    "engine/experts",
    "engine/kernels",
    "engine/model",
    "engine/device",
    "models",
)

INTRO = """\
The package is divided into rooms, one folder each. Imports point from a room to rooms further down
this page; prefill and decode do not know each other, nor do model and device. Files of
`strata_cli` and `strata_cli/engine` themselves stand between the rooms: `[tool.importlinter]` in
`pyproject.toml` has their heights, and a linter holds it. A line is the first sentence of the file
that it names."""


def rooms_page() -> Iterator[str]:
    """The parts of docs/rooms.md below its title."""
    yield INTRO
    for room in ROOMS:
        folder = PACKAGE / room
        yield f"## `{f'strata_cli/{room}'.rstrip('/')}`"
        yield first_sentence(folder / "__init__.py")
        yield "\n".join(f"- `{path.name}`: {first_sentence(path)}" for path in _files(folder))


def first_sentence(path: Path) -> str:
    """What a module's docstring, or the first comment of a CUDA source, begins with."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        comment = re.search(r"^// (.*(?:\n// \S.*)*)", text, re.MULTILINE)
        paragraph = comment[1].replace("\n//", "") if comment else ""
    flat = " ".join(paragraph.split())
    sentence = re.match(r".+?\.(?= |$)", flat)
    return sentence[0] if sentence else flat


def _files(folder: Path) -> list[Path]:
    """Modules, then CUDA sources and what they include."""
    return [
        path
        for suffix in ("py", "cu", "cuh")
        for path in sorted(folder.glob(f"*.{suffix}"))
        if path.name != "__init__.py"
    ]
