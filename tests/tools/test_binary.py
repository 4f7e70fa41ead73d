from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tools.binary.preamble import problem_of

HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    core = tmp_path / "numpy" / "_core"
    core.mkdir(parents=True)
    (core / "_multiarray_umath.cpython-312-x86_64-linux-gnu.so").touch()
    return tmp_path


def test_a_python_that_the_file_was_not_built_for_is_told_of_the_right_one(
    site_packages: Path,
) -> None:
    assert problem_of(site_packages, (3, 12), "strata.pyz") is None
    problem = problem_of(site_packages, (3, 13), "strata.pyz")
    assert problem is not None
    assert "built for Python 3.12, and this is Python 3.13" in problem
    assert "try: python3.12 strata.pyz, or" in problem


def test_a_file_without_compiled_packages_suits_any_python(tmp_path: Path) -> None:
    assert problem_of(tmp_path, (3, 13), "strata.pyz") is None


def test_the_preamble_runs_as_shiv_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core = tmp_path / "numpy" / "_core"
    core.mkdir(parents=True)
    (core / "_multiarray_umath.cpython-37m-x86_64-linux-gnu.so").touch()
    script = str(Path(__file__).parents[2] / "tools" / "binary" / "preamble.py")
    given = {"site_packages": tmp_path, "archive": "strata.pyz"}
    runpy.run_path(script, given, run_name="__main__")
    (core / "_multiarray_umath.cpython-37m-x86_64-linux-gnu.so").unlink()
    (core / "_multiarray_umath.cpython-27-x86_64-linux-gnu.so").touch()
    with pytest.raises(SystemExit):
        runpy.run_path(script, given, run_name="__main__")
    assert f"built for Python 2.7, and this is Python {HERE}" in capsys.readouterr().err
