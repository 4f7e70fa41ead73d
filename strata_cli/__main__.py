"""Where the `strata` script and `python -m strata_cli` begin."""

import os
import sys
from collections.abc import Callable

try:
    from strata_cli.commands.interrupts import INTERRUPTED
    from strata_cli.commands.process import run_process
except KeyboardInterrupt:  # before anything could handle it
    os._exit(130)


def main() -> int:
    """Run the command line of this process; the exit code."""
    try:
        return run_process(_load)
    except KeyboardInterrupt:  # outside of all that handles it, as above
        os._exit(INTERRUPTED)


def _load() -> Callable[[], int]:
    from strata_cli.commands.main import main

    return main


if __name__ == "__main__":
    sys.exit(main())
