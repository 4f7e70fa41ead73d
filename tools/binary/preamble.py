"""Runs inside strata.pyz before the program: refuses a Python that it was not built for.

shiv gives it `site_packages`, the folder that the file's packages were unpacked to, and `archive`,
the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

COMPILED = "numpy/_core/_multiarray_umath.cpython-*"  # the name says which Python it is for


def built_for(site_packages: Path) -> str | None:
    """Version of Python that the compiled packages were made for, such as "3.11"."""
    for path in site_packages.glob(COMPILED):
        digits = path.name.split("-")[1]
        return f"{digits[0]}.{digits[1:]}" if digits.isdecimal() else None
    return None


def problem_of(site_packages: Path, version: tuple[int, int], archive: str) -> str | None:
    """What to tell somebody whose Python does not suit; None where it does."""
    wanted, found = built_for(site_packages), ".".join(map(str, version))
    if wanted is None or wanted == found:
        return None
    return (
        f"strata: error: this file was built for Python {wanted}, and this is Python {found}\n"
        f"  try: python{wanted} {archive}, or build it with Python {found}: make binary\n"
    )


def main(site_packages: Path, archive: str) -> None:
    """End the process where it could not go well."""
    problem = problem_of(site_packages, sys.version_info[:2], archive)
    if problem is not None:
        sys.stderr.write(problem)
        sys.exit(2)


if __name__ == "__main__":
    main(Path(globals()["site_packages"]), str(globals()["archive"]))
