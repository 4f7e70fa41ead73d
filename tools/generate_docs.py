"""Writes the generated pages of docs/: settings, command line, and what each file holds.

Run as ``python -m tools.generate_docs``; with ``--check`` it changes nothing and fails when a
page is not what it would write. Settings and options are rendered from themselves, not from click's
formatted help, so a click release does not change a page.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import click

from strata_cli.commands.main import strata
from strata_cli.config import StrataConfig, flag_of, parser_of, variable_of
from tools.rooms_page import rooms_page

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTICE = "<!-- Written by tools/generate_docs.py; `make docs` writes it again. -->"

SETTINGS_INTRO = """\
Every setting is a `STRATA_*` variable and a key of the TOML file that `--config FILE` or
`STRATA_CONFIG` names, and most are flags. A flag wins over a variable, a variable over the file,
the file over the default. A wrong value ends the command with exit code 2 and a message that names
where the value came from and what is expected. An unknown key is an error, an unknown `STRATA_*`
variable a warning, both with the nearest real name. A command has a flag only where it uses the
setting, and no command has one where the column Flag is empty; variables and keys may always be
set. A flag that would change nothing in the engine as it comes to be, such as one about cached
experts where none is cached, is an error, a variable or key of that kind a warning. Relative paths
start at the current directory; `~` and `~name` at the front of a path are home folders.

Numbers are plain ASCII decimals: no sign, space or `_`. Where a number may be `auto`, that word is
the only way to ask for it, and 0 is an error; elsewhere 0 means what the last column says."""

CLI_INTRO = """\
Results go to stdout, everything else to stderr. `-` in place of PROMPT or of a file to read is
stdin; a file of that name is given with its whole path.

| Exit code | Meaning |
| --- | --- |
| 0 | done |
| 1 | the run failed; `launch --check`: something here would not work |
| 2 | wrong setting, command line or input |
| 3 | `decide`: the likeliest option of a question has less than `--threshold` |
| 4 | `decide`: the likeliest option is not the one of `--expect` |
| 130 | interrupted (Ctrl-C) |
| 141 | whoever read stdout closed it; nothing is printed |"""


def settings_page() -> str:
    """docs/settings.md: one row per setting."""
    rows = []
    commands = _commands(strata, click.Context(strata))
    flags = {flag for _, command in commands for param in command.params for flag in param.opts}
    for spec in fields(StrataConfig):
        parse, flag = parser_of(spec), flag_of(spec.name)
        rows.append(
            (
                _code(spec.name),
                _code(flag) if flag in flags else "",
                _code(variable_of(spec.name)),
                parse.expected,
                _code(parse.show(spec.default)),
                spec.metadata["help"],
            )
        )
    header = ("Key", "Flag", "Variable", "Values", "Default", "Meaning")
    return _page("Settings", SETTINGS_INTRO, _table(header, rows))


def cli_page(group: click.Group) -> str:
    """docs/cli.md: usage, text and options of every command."""
    context = click.Context(group, info_name="strata")
    sections = []
    for name, command in _commands(group, context):
        sections += list(_command_section(name, command, context))
    return _page("Command line", CLI_INTRO, *sections)


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Every command by its full name, each followed by its subcommands."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name, command
        for sub in getattr(command, "subcommands", ()):
            yield f"{name} {sub.name}", sub


def _command_section(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, parent, info_name=name)
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    usage = " ".join([context.command_path, "[OPTIONS]", *map(_argument, arguments)])
    yield f"## {context.command_path}"
    yield f"```\n{usage}\n```"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    options = [param for param in command.params if isinstance(param, click.Option)]
    yield _table(
        ("Option", "Meaning"), [(_option(option), option.help or "") for option in options]
    )


def _argument(argument: click.Argument) -> str:
    name = (argument.metavar or argument.name or "").upper() + (
        "..." if argument.nargs != 1 else ""
    )
    return name if argument.required else f"[{name}]"


def _option(option: click.Option) -> str:
    flags = ", ".join(_code(flag) for flag in option.opts)
    if option.secondary_opts:
        flags += " / " + ", ".join(_code(flag) for flag in option.secondary_opts)
    if option.is_flag:
        return flags
    value = option.metavar or option.type.name.upper()
    return f"{flags} {_code(value)}" + (" (repeatable)" if option.multiple else "")


def _code(text: str) -> str:
    return f"`{text}`"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTICE, *parts]) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "cli.md": lambda: cli_page(strata),
    "rooms.md": lambda: _page("Rooms", *rooms_page()),
}


def stale_pages(folder: Path) -> list[str]:
    """Names of the pages in the folder that are missing or differ from what would be written."""
    return [
        name
        for name, page in PAGES.items()
        if not (folder / name).exists() or (folder / name).read_text("utf-8") != page()
    ]


def write_pages(folder: Path) -> None:
    """Write every page into the folder."""
    for name, page in PAGES.items():
        (folder / name).write_text(page(), "utf-8")


def main(args: list[str]) -> int:
    """Write the pages, or with --check report the stale ones; returns the exit code."""
    if args != ["--check"]:
        write_pages(DOCS)
        return 0
    stale = stale_pages(DOCS)
    for name in stale:
        print(f"docs/{name} is out of date; run: make docs", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
