"""A command line as a process: streams, interrupts, and the exit code that both have a say in."""

from __future__ import annotations

import sys
from collections.abc import Callable

from strata_cli.commands.interrupts import INTERRUPTED, interrupts
from strata_cli.commands.streams import OutputFailed, open_streams

PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it


def run_process(load: Callable[[], Callable[[], int]]) -> int:
    """Run what load returns; the exit code of the process, which must end then.

    After an interrupt every way to end is the same: libraries turn one into errors of their own.

    Args:
        load: imports what is to be run.
    """
    interrupts.install()
    results = open_streams()
    try:
        with interrupts.at_once():
            body = load()
        exit_code = body()
        sys.stdout.flush()
        if exit_code == 0 and results.failure is not None:
            exit_code = output_failed(results.failure)
    except OutputFailed as error:
        exit_code = output_failed(error)
    except BaseException:
        if not interrupts.is_asked:
            raise
    finally:
        interrupts.finish()
    if interrupts.is_asked:
        results.drop()  # a reader that takes nothing would hold up the end, deaf to interrupts
        return INTERRUPTED
    return exit_code


def output_failed(error: OutputFailed) -> int:
    """Say that a result could not be written; the exit code."""
    if error.is_pipe_closed:
        return PIPE_CLOSED
    report(error)
    return error.exit_code


def report(error: object) -> None:
    """One error on stderr, where there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"strata: error: {error}\n")
        sys.stderr.flush()
