"""docs/rooms.md: what each file of the project holds, in the words that the file begins with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A room imports only from those below it in this list.
ROOMS = (
    "strata_cli/commands",
    "strata_cli/launch",
    "strata_cli/server",
    "strata_cli/decisions",
    "strata_cli/engine/measuring",
    "strata_cli/engine",
    "strata_cli",
    "strata_cli/engine/prefill",
    "strata_cli/engine/decode",
    "strata_cli/engine/forward",
    "strata_cli/engine/experts",
    "strata_cli/engine/kernels",
    "strata_cli/engine/model",
    "strata_cli/engine/device",
    "strata_cli/models",
)
BESIDE = (
    "benchmarks",
    "benchmarks/results",
    "tools",
    "tools/binary",
    "tools/decision_quality",
    "tools/demo_model",
    "tools/demo_model/tasks",
    "tools/demo_model/evaluation",
    "tools/synth",
)

INTRO = """\
The package is divided into rooms, one folder each. Imports point from a room to rooms further down
this page; prefill and decode do not know each other, nor do model and device. Files of
`strata_cli` and `strata_cli/engine` themselves stand between the rooms: `[tool.importlinter]` in
`pyproject.toml` has their heights, and a linter holds it. Behind the rooms come the folders beside
the package. A line is the first sentence of the file that it names."""


def rooms_page() -> Iterator[str]:
    """The parts of docs/rooms.md below its title."""
    yield INTRO
    for name in (*ROOMS, *BESIDE):
        folder = ROOT / name
        yield f"## `{name}`"
        if (folder / "__init__.py").exists():
            yield first_sentence(folder / "__init__.py")
        yield "\n".join(f"- `{path.name}`: {first_sentence(path)}" for path in _files(folder))


def first_sentence(path: Path) -> str:
    """What a module's docstring, or the first comment of a CUDA source, begins with; or a title."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        docstring = re.match(r'(?:#.*\n)*r?"""(.+?)(?:\n\n|""")', text, re.DOTALL)
        paragraph = docstring[1] if docstring else ""
    elif path.suffix == ".md":
        paragraph = text.partition("\n")[0].removeprefix("# ")
    else:
        comment = re.search(r"^// (.*(?:\n// \S.*)*)", text, re.MULTILINE)
        paragraph = comment[1].replace("\n//", "") if comment else ""
    flat = " ".join(paragraph.split())
    sentence = re.match(r".+?\.(?= |$)", flat)
    return sentence[0] if sentence else flat


def _files(folder: Path) -> list[Path]:
    """Modules, then CUDA sources and what they include; results of benchmarks."""
    return [
        path
        for suffix in (("md",) if folder.name == "results" else ("py", "cu", "cuh"))
        for path in sorted(folder.glob(f"*.{suffix}"))
        if path.name != "__init__.py"
    ]
