"""Arguments of benchmarks: refused before anything is measured, and errors told in one line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.arguments import fraction, listed, new_file, or_auto, run_benchmark, whole
from benchmarks.canonical_reads import Bench, Facts
from strata_cli.engine.engine import EngineOptions
from strata_cli.errors import ConfigError

SLOTS = listed(or_auto(whole(0)))
SHARES = listed(or_auto(fraction))


def parsed(kind: Callable[[str], Any], text: str) -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--it", type=kind)
    return parser.parse_args([f"--it={text}"]).it


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (whole(1), "7", 7),
        (SLOTS, "auto,0,12", [None, 0, 12]),
        (SHARES, "1,auto,0.25", [1.0, None, 0.25]),
    ],
)
def test_values_are_read(kind: Callable[[str], Any], text: str, value: object) -> None:
    assert parsed(kind, text) == value


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (whole(1), "0", "'0' is no whole number from 1 on"),
        (whole(0), "-3", "from 0 on"),
        (whole(0), "many", "'many'"),
        (SLOTS, "5,x", "'x'"),
        (SHARES, "1.5", "'1.5' is no number from 0 to 1"),
        (SHARES, str(math.nan), "'nan'"),
    ],
)
def test_other_values_are_told(
    capsys: pytest.CaptureFixture[str], kind: Callable[[str], Any], text: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(kind, text)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_result_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    assert new_file(str(tmp_path / "x.json")) == tmp_path / "x.json"
    for path in (tmp_path, tmp_path / "nowhere" / "x.json"):
        with pytest.raises(argparse.ArgumentTypeError, match="cannot be written"):
            new_file(str(path))


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise ConfigError("no such device", hint="another")

    with pytest.raises(SystemExit) as ended:
        run_benchmark(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: no such device\n  try: another\n"


def test_a_first_run_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "first"
    bench = Bench(EngineOptions(model=Path("m")), Facts(24, 2, 100), first_file=file)
    bench.load_first()
    assert bench.first is None
    file.write_bytes(b"junk")
    with pytest.raises(SystemExit, match="holds no first run"):
        bench.load_first()
    with file.open("wb") as out:
        np.save(out, np.zeros((0, 99), np.float32))
    with pytest.raises(SystemExit, match=r"float32 \[0, 99\], no first run of this model"):
        bench.load_first()
