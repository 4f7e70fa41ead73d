"""The argument and flags that say where a prompt comes from, for every command that reads one."""

from __future__ import annotations

from typing import Any

import click

from strata_cli.commands.options import in_order, written
from strata_cli.commands.prompt import argument_text
from strata_cli.parsers import file_path

_FILE = written(file_path)


def utf8_text(_context: click.Context, param: click.Parameter, value: Any) -> Any:
    """Callback of an option or argument that is one text, or a tuple of texts."""
    name = param.human_readable_name if isinstance(param, click.Argument) else param.opts[-1]
    if isinstance(value, tuple):
        return tuple(argument_text(text, name) for text in value)
    return None if value is None else argument_text(value, name)


# PROMPT and the flags of a PromptSource.
prompt_options = in_order(
    click.argument("prompt", required=False, callback=utf8_text),
    click.option(
        "-f",
        "--file",
        callback=_FILE,
        metavar="FILE",
        help="Read the prompt from a text file; - is stdin.",
    ),
    click.option("--tokens", metavar="IDS", help="Prompt as token ids: 1,2,3."),
    click.option(
        "--tokens-file",
        callback=_FILE,
        metavar="FILE",
        help="Prompt as a JSON list of ids; - is stdin.",
    ),
    click.option("--raw", is_flag=True, help="Read the text as it is, without a chat template."),
    click.option("--chat", is_flag=True, help="Read as a user's turn (the default when possible)."),
    click.option(
        "--system", callback=utf8_text, metavar="TEXT", help="System message in front of the chat."
    ),
)
