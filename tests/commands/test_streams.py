"""What becomes of results and messages when the other side of a stream is not what it should be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

STRATA = "strata_cli"
PROBE = "tests.commands.probe"
UNWRITABLE = "strata: error: cannot write the result: stdout is not open for writing\n"


def shell(
    line: str, *args: str, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run "$@" with a shell's redirections; the line ends in that."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env={**without, **(environ or {})},
    )


@pytest.mark.parametrize(("lines", "unbuffered"), [("1", ""), ("100000", ""), ("1", "1")])
@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        (">/dev/full", 1, "strata: error: cannot write the result: No space left on device\n"),
        (">&-", 1, UNWRITABLE),
        ("<&- >&-", 1, UNWRITABLE),
        ("1</dev/null", 1, UNWRITABLE),
        (">&- 2>&-", 1, ""),
        (">/dev/full 2>/dev/full", 1, ""),
        ("2>/dev/full >/dev/null", 0, ""),
        ("2>&- >/dev/null", 0, ""),
    ],
)
def test_a_stream_that_takes_nothing(
    redirection: str, code: int, message: str, lines: str, unbuffered: str
) -> None:
    environ = {"PYTHONUNBUFFERED": unbuffered}
    ended = shell(f'"$@" {redirection}', PROBE, "--lines", lines, "--warn", "w", environ=environ)
    warned = "" if "2>" in redirection else "strata: warning: w\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "", warned + message)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_halfway_ends_the_run_quietly(unbuffered: str) -> None:
    line = '"$@" | head -c 1 >/dev/null; exit ${PIPESTATUS[0]}'
    environ = {"PYTHONUNBUFFERED": unbuffered}
    ended = shell(line, PROBE, "--lines", "100000", environ=environ)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("blocks", ["0", "1"])
def test_a_limit_on_file_size_is_an_error(tmp_path: object, unbuffered: str, blocks: str) -> None:
    line = f'ulimit -f {blocks}; "$@" >{tmp_path}/out'
    environ = {"PYTHONUNBUFFERED": unbuffered}
    ended = shell(line, PROBE, "--lines", "1000", environ=environ)
    assert ended.returncode == 1
    assert ended.stderr == "strata: error: cannot write the result: File too large\n"


def test_a_stdout_that_does_not_block_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    command = [sys.executable, "-m", PROBE, "--lines", "100000"]
    with (
        subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE) as process,
        os.fdopen(reader, "rb") as output,
    ):
        os.close(writer)
        assert output.read() == b"line\n" * 100000
        assert process.communicate(timeout=20)[1] == b""
    assert process.returncode == 0


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2</dev/null"])
@pytest.mark.parametrize("args", [["--bogus"], ["bogus"], ["read", "--bogus"]])
def test_a_usage_error_keeps_its_code_when_nobody_hears_it(
    redirection: str, args: list[str]
) -> None:
    ended = shell(f'"$@" {redirection}', STRATA, *args)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize("args", [["--json"], ["--max-tokens", "3"], []])
def test_a_read_whose_result_nobody_can_get_does_not_open_the_model(args: list[str]) -> None:
    ended = shell('"$@" >&-', STRATA, "read", "x", "--model", "/none.gguf", *args)
    assert (ended.returncode, ended.stderr) == (1, UNWRITABLE)


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["read", "--help"]])
def test_help_that_cannot_be_written_is_an_error(args: list[str]) -> None:
    ended = shell('"$@" >/dev/full', STRATA, *args)
    assert ended.returncode == 1
    assert ended.stderr == "strata: error: cannot write the result: No space left on device\n"


def test_text_that_the_terminal_has_no_letters_for_is_no_crash() -> None:
    script = (
        "from strata_cli.commands.streams import open_streams; open_streams(); print('\\u2019')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert ended.stdout == b"\\u2019\n"


@pytest.mark.parametrize("args", [["--json"], ["--max-tokens", "3", "--json"], ["--top", "1"]])
def test_a_run_that_fails_at_its_end_has_no_result(args: list[str]) -> None:
    ended = shell('"$@"', STRATA, "read", "x", "--raw", "--logits-out", "/dev/full", *args)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("strata: error: cannot write /dev/full: No space left")
