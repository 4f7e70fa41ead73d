"""The `strata` command: finds a subcommand, runs it, and turns how it ended into an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import click

from strata_cli import __version__
from strata_cli.commands.interrupts import INTERRUPTED, interrupts
from strata_cli.commands.process import output_failed, report
from strata_cli.commands.streams import OutputFailed
from strata_cli.config import nearest
from strata_cli.errors import StrataError

MORE_MEMORY = "lower --max-context or --prefill, or close other programs"


class LazyCommand(NamedTuple):
    """A subcommand that is imported when it is used: its module holds a function of its name."""

    module: str
    short_help: str


COMMANDS: Mapping[str, LazyCommand] = {
    "read": LazyCommand(
        "strata_cli.commands.read", "Read one prompt: next-token probabilities, or text."
    ),
    "decide": LazyCommand(
        "strata_cli.commands.decide", "Answer questions with fixed options about a text."
    ),
    "launch": LazyCommand(
        "strata_cli.commands.launch", "Set this machine up for a model, and start the server."
    ),
    "serve": LazyCommand("strata_cli.commands.serve", "Answer OpenAI's clients over HTTP."),
    "trace": LazyCommand(
        "strata_cli.commands.trace", "Show what reading a prompt did and when; time one setting."
    ),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands' names and short help without importing them."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand; None when there is none of that name."""
        if cmd_name not in self.lazy:
            return None
        with interrupts.at_once():
            command = getattr(import_module(self.lazy[cmd_name].module), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown name is answered with the nearest real one."""
        if args[0] not in self.lazy:
            close = nearest(args[0], self.lazy)
            advice = f"; did you mean {close}?" if close else ""
            raise click.UsageError(f"no such command: {args[0]}{advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the subcommands from the table alone."""
        rows = [(name, command.short_help) for name, command in self.lazy.items()]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


class StderrHandler(logging.Handler):
    """Writes log lines to whatever stderr is at that moment, in the form of our error lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        click.echo(f"strata: {record.levelname.lower()}: {self.format(record)}", err=True)


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="strata %(version)s")
def strata() -> None:
    """Run mixture-of-experts language models whose experts do not fit in VRAM."""


def main() -> int:
    """Run the command line of this process. Without arguments it prints the help."""
    return run(strata, sys.argv[1:] or ["--help"])


def run(group: click.Group, args: Sequence[str]) -> int:
    """Run one command line and return the exit code: the command's own, or 0 when it has none.

    Errors a user may see end as one line on stderr; anything else is a bug and is raised. Not
    click's own main: that takes an EOFError for a Ctrl-C, and chooses other exit codes.
    """
    logging.getLogger("strata_cli").handlers = [StderrHandler()]
    try:
        with group.make_context("strata", list(args)) as context:
            result = group.invoke(context)
        _flush_stdout()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except OutputFailed as error:
        return output_failed(error)
    except StrataError as error:
        return _report(str(error), error.exit_code)
    except click.ClickException as error:
        return _report(_explain(error), error.exit_code)
    except MemoryError as error:
        return _report(f"the host's memory ran out{_what(error)}\n  try: {MORE_MEMORY}", 1)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def _what(error: MemoryError) -> str:
    """What numpy says of it; Python itself says nothing."""
    return f": {error}" if str(error) else ""


def _explain(error: click.ClickException) -> str:
    if not isinstance(error, click.UsageError):
        return error.format_message()
    command = error.ctx.command_path if error.ctx else "strata"
    return f"{error.format_message()}\n  try: {command} --help"


def _report(message: str, exit_code: int) -> int:
    if interrupts.is_asked:  # what fails then, fails because of it
        return INTERRUPTED
    report(message)
    return exit_code


def _flush_stdout() -> None:
    if sys.stdout is not None:  # None when the caller closed it
        sys.stdout.flush()
