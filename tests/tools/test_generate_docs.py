from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click

from strata_cli.config import field_names, flag_of, variable_of
from tools.generate_docs import PAGES, cli_page, settings_page, stale_pages, write_pages
from tools.rooms_page import BESIDE, ROOMS, ROOT, first_sentence


def test_every_setting_has_a_row_with_its_names() -> None:
    rows = [line for line in settings_page().splitlines() if line.startswith("| `")]
    assert len(rows) == len(field_names())
    for name, row in zip(field_names(), rows, strict=True):
        key, flag, variable = row.split(" | ")[:3]
        assert (key, variable) == (f"| `{name}`", f"`{variable_of(name)}`")
        assert flag in (f"`{flag_of(name)}`", "")


def test_a_flag_is_shown_where_a_command_has_it() -> None:
    settings, cli = settings_page(), PAGES["cli.md"]()
    for name in field_names():
        flag = f"`{flag_of(name)}`"
        assert (f"| {flag} |" in settings) is (f"| {flag} " in cli)


def test_a_command_is_shown_with_arguments_options_and_text() -> None:
    @click.command(help="Ask a thing.\n\n\b\nkept\nas is")
    @click.argument("prompt", required=False)
    @click.option("--allowed", metavar="TEXT", multiple=True, help="One of a|b.")
    @click.option("--raw/--chat", default=None, help="Which form.")
    def ask(prompt: str) -> None:
        """Unused body."""

    page = cli_page(click.Group("strata", commands={"ask": ask}))
    assert (
        "## strata ask\n\n```\nstrata ask [OPTIONS] [PROMPT]\n```\n\nAsk a thing.\n\nkept\n" in page
    )
    assert "| `--allowed` `TEXT` (repeatable) | One of a\\|b. |" in page
    assert "| `--raw` / `--chat` | Which form. |" in page


def test_pages_are_stale_when_missing_or_changed_and_fresh_when_written(tmp_path: Path) -> None:
    assert stale_pages(tmp_path) == list(PAGES)
    write_pages(tmp_path)
    assert stale_pages(tmp_path) == []
    (tmp_path / "settings.md").write_text("by hand")
    assert stale_pages(tmp_path) == ["settings.md"]


def test_every_file_has_its_line() -> None:
    files = [
        path
        for folder in ("strata_cli", "benchmarks", "tools")
        for suffix in ("py", "cu", "cuh", "md")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
        if path.name != "README.md"
    ]
    folders = {str(path.parent.relative_to(ROOT)) for path in files}
    assert folders == {*ROOMS, *BESIDE}
    page = PAGES["rooms.md"]()
    for path in files:
        assert first_sentence(path), path
        assert first_sentence(path) in page


def test_rooms_come_in_the_order_of_the_linters_contract() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    modules = re.findall(r"[\w.]+", " ".join(layers))
    in_contract = [
        name for name in (module.replace(".", "/") for module in modules) if name in ROOMS
    ]
    assert [room for room in ROOMS if room in in_contract] == in_contract
    assert {*ROOMS} - {*in_contract} == {"strata_cli", "strata_cli/engine", "strata_cli/models"}
