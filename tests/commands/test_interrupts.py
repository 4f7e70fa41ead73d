"""Ctrl-C as a process sees it: in imports, in a crowd, where Python drops it, and at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata_cli.commands.interrupts import PATIENCE_S

AT_IMPORT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == {name!r}:
            {action}

sys.meta_path.insert(0, Interrupting())
sys.argv = ["strata", "read", "x", "--model", "/none.gguf"]
from strata_cli.__main__ import main
sys.exit(main())
"""
KILL = "os.kill(os.getpid(), signal.SIGINT)"

# What a command does when it gets going; run_process is around it.
BODY = """
import ctypes, os, signal, sys, threading, time
from strata_cli.commands.interrupts import interrupts
from strata_cli.commands.process import run_process

def kill():
    os.kill(os.getpid(), signal.SIGINT)

def wait():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

def body():
{body}

sys.exit(run_process(lambda: body))
"""


def start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def start_body(*lines: str) -> subprocess.Popen[str]:
    return start(BODY.format(body="\n".join(f"    {line}" for line in lines)))


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    output, error = process.communicate(timeout=30)
    return process.returncode, output, error


@pytest.mark.parametrize(
    "name",
    [
        "strata_cli.commands.interrupts",
        "strata_cli.commands.process",
        "strata_cli.commands.streams",
        "strata_cli.commands.main",
        "click",
        "strata_cli.commands.read",
        "numpy",
        "numba",
        "tokenizers",
        "orjson",
    ],
)
def test_an_interrupt_of_an_import_is_quiet(name: str) -> None:
    assert ended(start(AT_IMPORT.format(name=name, action=KILL))) == (130, "", "")


def test_the_imports_that_are_interrupted_happen() -> None:
    code, _, error = ended(
        start(AT_IMPORT.format(name="numpy", action="raise MemoryError('seen')"))
    )
    assert code == 1
    assert "the host's memory ran out: seen" in error


def test_a_crowd_of_interrupts_ends_the_run_once_and_lets_it_clean_up() -> None:
    with start_body(
        "try:", "    wait()", "finally:", "    time.sleep(0.3)", "    print('clean')"
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        assert ended(process) == (130, "clean\n", "")


def test_interrupts_until_the_process_is_gone_are_quiet() -> None:
    with start_body("threading.Thread(target=time.sleep, args=[0.2]).start()", "wait()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        assert ended(process) == (130, "", "")


def test_a_cleanup_that_takes_too_long_is_ended_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "half"
    with start_body(
        f"with interrupts.temporary_file({str(path)!r}):",
        f"    open({str(path)!r}, 'w').close()",
        "    try:",
        "        wait()",
        "    finally:",
        f"        interrupts._asked_at -= {PATIENCE_S}",  # as if it had been so long
        "        wait()",
    ) as process:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
        assert ended(process) == (130, "", "")
    assert not path.exists()


@pytest.mark.parametrize(
    "lines",
    [
        ["ctypes.CFUNCTYPE(None)(kill)()", "time.sleep(20)"],
        ["class Dropping:", "    def __del__(self): kill()", "Dropping()", "time.sleep(20)"],
    ],
    ids=["callback from C", "finalizer"],
)
def test_an_interrupt_that_python_drops_comes_again(lines: list[str]) -> None:
    assert ended(start_body(*lines)) == (130, "", "")


@pytest.mark.parametrize(
    "lines",
    [
        ["try: kill()", "except BaseException: raise ValueError('no')"],
        ["try: kill()", "except BaseException: pass"],
        ["try: kill()", "except BaseException: return 1"],
    ],
    ids=["turned into an error", "swallowed", "answered with a code"],
)
def test_whatever_becomes_of_an_interrupt_the_run_was_interrupted(lines: list[str]) -> None:
    assert ended(start_body(*lines, "return 0")) == (130, "", "")


def test_a_reader_that_takes_nothing_does_not_hold_up_the_end() -> None:
    with start_body("threading.Timer(0.1, kill).start()", "print('x' * (1 << 20))") as process:
        assert process.stderr is not None
        assert process.wait(timeout=20) == 130
        assert process.stderr.read() == ""


def test_an_error_without_an_interrupt_keeps_its_traceback() -> None:
    code, output, error = ended(start_body("raise ValueError('a bug')"))
    assert (code, output) == (1, "")
    assert "ValueError: a bug" in error


def test_a_process_that_was_told_to_ignore_interrupts_does() -> None:
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    script = ignoring + BODY.format(body="    kill()\n    return 3")
    assert ended(start(script)) == (3, "", "")


def test_ctrl_c_any_time_after_the_start_is_quiet() -> None:
    script = (
        "from strata_cli.commands import process; print(end='ready\\n', flush=True); import sys;"
        " sys.argv[1:] = ['read', 'x']; from strata_cli.__main__ import main; sys.exit(main())"
    )
    for delay_ms in (20, 80, 160, 320, 640):
        with start(script) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(delay_ms / 1e3)
            for _ in range(3):
                process.send_signal(signal.SIGINT)
            code, _, error = ended(process)
        assert code in (130, 0), delay_ms  # 0: it was faster
        assert "Traceback" not in error
