"""`strata read` on a GPU: refused, interrupted, killed, or two at once; the memory comes back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from strata_cli.engine.device import open_device
from strata_cli.errors import ConfigError

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
STRATA = "import sys; from strata_cli.commands.main import main; sys.exit(main())"
MIB = 1 << 20
IDS = ",".join(str(token) for token in range(100, 1_900))
LONG = ["--tokens", IDS, "--prefill", "1", "--progress", "--top", "1"]
"""A prompt of 1,800 passes, with a progress bar that shows when they have begun."""


@pytest.fixture(autouse=True)
def _memory_comes_back() -> Iterator[None]:
    before = free_bytes()
    yield
    # A killed process is gone before the driver has taken back all that it had.
    assert any(free_bytes() >= before - 64 * MIB for _ in range(50))


def free_bytes() -> int:
    try:
        with open_device("cuda:0", vram_reserve_bytes=0) as device:
            return device.memory().free_bytes
    except ConfigError as error:
        pytest.skip(f"no cuda:0: {error.message}")


def start(*args: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", STRATA, "read", "--device", "cuda:0", *args]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process: subprocess.Popen[bytes], text: bytes) -> None:
    """Reads stderr up to the text."""
    said = b""
    assert process.stderr is not None
    while text not in said:
        byte = process.stderr.read(1)
        assert byte, said.decode()
        said += byte


def test_a_prompt_is_answered() -> None:
    out, errors = start("The quick brown fox", "--top", "3", "--json").communicate(timeout=300)
    result = orjson.loads(out)
    assert result["device"] == "cuda:0", errors
    assert len(result["top_logprobs"]) == 3


def test_ctrl_c_in_the_middle_of_a_prompt_ends_quietly() -> None:
    process = start(*LONG)
    wait_for(process, b"reading")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert not out


def test_a_killed_process_leaves_nothing() -> None:
    process = start(*LONG)
    wait_for(process, b"reading")
    process.kill()
    process.communicate(timeout=60)


def test_two_processes_read_at_once() -> None:
    prompt = ["The quick brown fox", "--max-tokens", "20", "--json", "--vram-bytes", "2GiB"]
    processes = [start(*prompt) for _ in range(2)]
    answers = []
    for process in processes:
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        answers.append(orjson.loads(out)["text"])
    assert answers[0] == answers[1]


def test_too_little_memory_says_what_needs_how_much() -> None:
    process = start("x", "--vram-bytes", "20MiB")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    said = errors.decode()
    assert "does not fit on cuda:0: need" in said
    assert "--max-context" in said
    assert "Traceback" not in said


def test_more_memory_than_there_is_is_refused() -> None:
    process = start("x", "--vram-bytes", "100TiB")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "more than cuda:0: free" in errors.decode()
