"""A command that ends as a test asks, run in the test's process or in one of its own."""

from __future__ import annotations

import logging
import signal
import sys

import click

from strata_cli.commands.main import run
from strata_cli.commands.process import run_process

logger = logging.getLogger("strata_cli.tests.probe")


@click.command()
@click.option("--exit-code", type=int)
@click.option("--lines", type=int, default=0)
@click.option("--warn")
@click.option("--wait", is_flag=True)
def probe(exit_code: int | None, lines: int, warn: str | None, wait: bool) -> int | None:
    """Print lines, log a warning, wait for a signal, return an exit code."""
    if warn:
        logger.warning("%s", warn)
    sys.stdout.write("line\n" * lines)
    if wait:
        click.echo("waiting")
        signal.pause()
    return exit_code


if __name__ == "__main__":
    group = click.Group("strata", commands={"probe": probe})
    sys.exit(run_process(lambda: lambda: run(group, ["probe", *sys.argv[1:]])))
