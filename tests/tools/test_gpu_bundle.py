"""What is packed for a machine without a network suffices to import every test."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from tools.gpu_bundle import requirements

TESTS = Path(__file__).parents[1]
OURS = {"strata_cli", "tests", "tools", "benchmarks"}


def name_of(requirement: str) -> str:
    """The package of a line such as ``anyjev>=0.3,<0.4``."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None, requirement
    return normal(name[0])


def normal(name: str) -> str:
    return re.sub(r"[._-]+", "-", name).lower()


def with_needs(names: set[str]) -> set[str]:
    """The packages and what they cannot do without."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = requires(name) or []
        except PackageNotFoundError:  # for another Python
            continue
        waiting += [name_of(line) for line in needs if "extra ==" not in line]
    return found


def imported(path: Path) -> Iterator[str]:
    """Packages that a module imports when it is imported itself."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_the_bundle_holds_what_tests_import() -> None:
    packed = with_needs({name_of(line) for line in requirements()})
    sources = packages_distributions()
    for path in sorted(TESTS.rglob("*.py")):
        for module in set(imported(path)) - OURS - set(sys.stdlib_module_names):
            packages = {normal(name) for name in sources.get(module, [])}
            assert not packages or packages & packed, f"{path.name} imports {module}"
