"""Arguments of benchmarks that are refused before anything is measured, and errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from strata_cli.errors import StrataError

T = TypeVar("T")


def whole(least: int) -> Callable[[str], int]:
    """A type for add_argument: a whole number that is no less."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return number

    return parse


def fraction(text: str) -> float:
    """A type for add_argument: a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 0 to 1")
    return number


def or_auto(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    """A type for add_argument: the same, or "auto", which is None."""
    return lambda text: None if text == "auto" else parse(text)


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """A type for add_argument: values with commas between."""
    return lambda text: [parse(part) for part in text.split(",")]


def new_file(text: str) -> Path:
    """A type for add_argument: a file that can be written when all is measured."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def run_benchmark(main: Callable[[], int | None]) -> NoReturn:
    """Run a benchmark; what is wrong with its model, device or settings is told in one line.

    Args:
        main: measures; returns the exit code, None for 0.
    """
    try:
        sys.exit(main())
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
