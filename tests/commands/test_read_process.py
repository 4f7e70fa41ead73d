"""`strata read` as a process of its own: interrupts, closed pipes, and bars on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

ONE_BY_ONE = ["--raw", "--prefill", "1"]  # a pass for each token takes its time
LONG_ANSWER = ["In the beginning", "--raw", "--max-tokens", "1500"]


def start(*args: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "strata_cli", "read", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)


def read_until(file: int, word: bytes) -> bytes:
    """What comes from a file up to a word, or to the end."""
    seen = b""
    while word not in seen and (data := os.read(file, 4096)):
        seen += data
    return seen


@pytest.mark.parametrize(
    ("args", "stream", "word"),
    [
        (["word " * 1500, *ONE_BY_ONE, "--progress"], "stderr", b"reading:"),
        (LONG_ANSWER, "stdout", b" "),
    ],
    ids=["prompt", "generation"],
)
def test_ctrl_c_ends_with_130_and_no_traceback(args: list[str], stream: str, word: bytes) -> None:
    with start(*args) as process:
        read_until(getattr(process, stream).fileno(), word)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in error


def test_a_reader_that_has_enough_ends_generation_quietly() -> None:
    with start(*LONG_ANSWER) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_terminal_sees_a_bar_while_a_prompt_is_read_and_no_trace_of_it_later() -> None:
    terminal, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with start("word " * 120, *ONE_BY_ONE, stderr=stderr) as process:
        os.close(stderr)
        seen = b""
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes any more
            while data := os.read(terminal, 4096):
                seen += data
        assert process.stdout is not None
        output = process.stdout.read()
    os.close(terminal)
    assert process.returncode == 0
    assert output.startswith(b"     prob      logprob       id  token\n")
    assert b"reading:" in seen
    last_line = seen.rpartition(b"\r")[0].rpartition(b"\r")[2]
    assert last_line.strip() == b""
