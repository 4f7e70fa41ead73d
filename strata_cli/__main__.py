"""`python -m strata_cli`: the same as the `strata` script."""

import sys

from strata_cli.commands.main import main

sys.exit(main())
