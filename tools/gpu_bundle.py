"""Packs what a GPU machine without a network needs to test and run this project.

Run as ``python -m tools.gpu_bundle``. The folder then holds the wheels of everything the project
and its tests import, and the project itself with all test fixtures, as the last commit has it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
TEST_TOOLS = ("pytest", "hypothesis", "openai", "pyyaml")  # of the developer's, what tests import

README = """\
On the GPU machine, with Python {python}:

    python3 -m pip install --no-index --find-links wheels --target site wheels/*.whl
    mkdir strata && tar -xzf strata.tar.gz -C strata && cd strata
    PYTHONPATH=../site:. python3 -m pytest -m gpu
    PYTHONPATH=../site:. python3 benchmarks/gpu_visit.py ../report

Packages that the machine already has need not be installed: leave their wheels out.
"""


def requirements() -> list[str]:
    """What the project needs to run on a GPU, and all its tests: pytest imports every one."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    extras = project["optional-dependencies"]
    tools = [line for line in extras["dev"] if line.startswith(TEST_TOOLS)]
    return [*project["dependencies"], *extras["cuda"], *extras["serve"], *tools]


def download_wheels(folder: Path, python: str, only: list[str]) -> None:
    """Fetch wheels for Linux on x86-64; with ``only`` just these packages, without their needs.

    Raises:
        CalledProcessError: pip found no such wheel.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += ["--no-deps", *only] if only else requirements()
    subprocess.run(command, check=True)


def pack_project(path: Path) -> None:
    """The last commit's files as a compressed archive."""
    command = ["git", "archive", "--format=tar.gz", f"--output={path}", "HEAD"]
    subprocess.run(command, cwd=ROOT, check=True)


def main() -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--python", default="3.12", help="version on the GPU machine")
    parser.add_argument("--only", nargs="+", default=[], help="these packages alone")
    arguments = parser.parse_args()
    wheels = arguments.folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for wheel in wheels.glob("*.whl"):
        wheel.unlink()
    download_wheels(wheels, arguments.python, arguments.only)
    pack_project(arguments.folder / "strata.tar.gz")
    (arguments.folder / "README.txt").write_text(README.format(python=arguments.python), "utf-8")
    nbytes = sum(path.stat().st_size for path in arguments.folder.rglob("*") if path.is_file())
    print(f"{arguments.folder}: {len(list(wheels.iterdir()))} wheels, {nbytes / 1e6:.0f} MB in all")


if __name__ == "__main__":
    main()
