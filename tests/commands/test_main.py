from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module

import click
import pytest

from strata_cli import __version__
from strata_cli.commands.main import COMMANDS, LazyCommand, LazyGroup, run, strata
from strata_cli.errors import ConfigError, DeviceError, InputError

ROWS = {
    "probe": LazyCommand("tests.commands.probe", "Do what a test asks."),
    "absent": LazyCommand("tests.commands.never_imported", "Fails when imported."),
}


def group_of(body: Callable[[], object]) -> click.Group:
    group = click.Group("strata")
    group.add_command(click.Command("go", callback=body))
    return group


def raising(error: BaseException) -> Callable[[], object]:
    def body() -> None:
        raise error

    return body


def start(*args: str, stdout: int | None = subprocess.PIPE) -> subprocess.Popen[str]:
    # Buffered, as for most users: what stdout still holds at exit is half of these tests.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.Popen(
        [sys.executable, *args], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environ
    )


def test_version_is_printed_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(strata, ["--version"]) == 0
    assert capsys.readouterr() == (f"strata {__version__}\n", "")


def test_help_lists_commands_without_importing_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(LazyGroup("strata", lazy=ROWS), ["--help"]) == 0
    output = capsys.readouterr().out
    assert output.index("Do what a test asks.") < output.index("Fails when imported.")


def test_a_command_is_imported_when_it_is_used() -> None:
    sys.modules.pop("tests.commands.probe", None)
    assert run(LazyGroup("strata", lazy=ROWS), ["probe", "--exit-code", "3"]) == 3
    assert "tests.commands.probe" in sys.modules


@pytest.mark.parametrize(("name", "row"), COMMANDS.items())
def test_every_registered_command_exists(name: str, row: LazyCommand) -> None:
    assert isinstance(getattr(import_module(row.module), name), click.Command)


@pytest.mark.parametrize(
    ("typed", "advice"), [("prob", "; did you mean probe?"), ("zzz", ""), ("probe ", "; did you")]
)
def test_an_unknown_command_ends_with_2_and_the_nearest_name(
    typed: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(LazyGroup("strata", lazy=ROWS), [typed]) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.startswith(f"strata: error: no such command: {typed}{advice}")
    assert error.endswith("\n  try: strata --help\n")


def test_a_wrong_option_ends_with_2_and_points_to_the_help_of_its_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(LazyGroup("strata", lazy=ROWS), ["probe", "--nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("strata: error: ")
    assert "--nonsense" in error
    assert error.endswith("\n  try: strata probe --help\n")


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(ConfigError("bad"), 2), (InputError("bad"), 2), (DeviceError("bad", hint="sleep"), 1)],
)
def test_an_error_for_the_user_is_one_message_without_traceback(
    error: ConfigError, exit_code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(group_of(raising(error)), ["go"]) == exit_code
    hint = "  try: sleep\n" if error.hint else ""
    assert capsys.readouterr() == ("", f"strata: error: bad\n{hint}")


@pytest.mark.parametrize(
    "bug", [ValueError("bug"), EOFError(), OSError(2, "no file"), ConnectionResetError()]
)
def test_anything_else_is_a_bug_and_keeps_its_traceback(bug: Exception) -> None:
    with pytest.raises(type(bug)):
        run(group_of(raising(bug)), ["go"])


@pytest.mark.parametrize(
    ("text", "said"), [("", ""), ("Unable to allocate", ": Unable to allocate")]
)
def test_a_machine_without_memory_is_no_bug(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(group_of(raising(MemoryError(*[text] * bool(text)))), ["go"]) == 1
    error = f"strata: error: the host's memory ran out{said}\n  try: lower --max-context"
    assert capsys.readouterr().err.startswith(error)


def test_ctrl_c_ends_with_130_and_no_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(group_of(raising(KeyboardInterrupt())), ["go"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_real_interrupt_ends_the_process_with_130() -> None:
    with start("-m", "tests.commands.probe", "--wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (130, "")


@pytest.mark.parametrize("lines", ["1", "100000"])
def test_a_closed_pipe_is_quiet(lines: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start("-m", "tests.commands.probe", "--lines", lines, stdout=writer) as process:
        os.close(writer)
        _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (141, "")


def test_a_full_disk_is_an_error_without_traceback() -> None:
    with (
        open("/dev/full", "w") as full,
        start("-m", "tests.commands.probe", "--lines", "9", stdout=full.fileno()) as process,
    ):
        _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert error == "strata: error: cannot write the result: No space left on device\n"


def test_log_lines_go_to_stderr() -> None:
    with start("-m", "tests.commands.probe", "--warn", "slow path") as process:
        assert process.communicate(timeout=20) == ("", "strata: warning: slow path\n")


@pytest.mark.parametrize("args", [[], ["--help"], ["--version"], ["zzz"]])
def test_start_is_instant_and_imports_nothing_heavy(args: list[str]) -> None:
    script = (
        "import json, sys; from strata_cli.commands.main import main; sys.argv[1:] ="
        f" {args!r}; main(); print(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    modules = set(json.loads(outcome.stderr.splitlines()[-1]))
    assert "strata_cli.config" in modules
    assert not modules & {
        "anyjev",
        "numpy",
        "numba",
        "cuda",
        "gguf",
        "tokenizers",
        "jinja2",
        "tqdm",
    }
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_the_module_runs_as_the_script_does() -> None:
    with start("-m", "strata_cli") as process:
        output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert output.startswith("Usage: strata ")
