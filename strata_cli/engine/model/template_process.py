"""The child process that renders a template, as its parent sees it: what it may use, how it ends.

Counting steps inside the interpreter would have to know every expression that is slow or large,
and cannot stop a call into C. The operating system bounds a process's processor time and memory
whatever it does.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

_BOOT = "import sys; sys.path += sys.argv[1:]; import template_worker; template_worker.main()"
_START_SECONDS = 30.0  # Python and jinja2 need 0.1 s; a busy machine or a cold disk much more


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may use.

    Attributes:
        cpu_seconds: processor time.
        wall_seconds: waiting time, for a child that is stuck without computing.
        memory_bytes: address space of the child, about 40 MB of it Python's own.
        max_chars: length of the rendered text.
        max_template_chars: length of the template.
    """

    cpu_seconds: float = 1.0
    wall_seconds: float = 10.0
    memory_bytes: int = 256 << 20
    max_chars: int = 8 << 20
    max_template_chars: int = 1 << 20


class TemplateProcess:
    """The child process and the lines to and from it; used by one thread at a time.

    A reply is what ``template_worker`` sends (``kind`` and ``message``), or of kind ``ended`` when
    the process ended instead of answering: it is of no more use then.
    """

    def __init__(self, source: str, limits: RenderLimits) -> None:
        """Start the child and hand it the template. Does not wait for it."""
        self._limits = limits
        self._is_ready = False
        here = Path(__file__).parent
        # -I -S: no user settings and no site packages but the two it needs: a faster start.
        command = [sys.executable, "-I", "-S", "-c", _BOOT, *_library_paths(), str(here)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.close = weakref.finalize(self, _end, self._process)
        setup = {
            "template": source,
            "cpu_seconds": limits.cpu_seconds,
            "memory_bytes": limits.memory_bytes,
            "max_chars": limits.max_chars,
        }
        self._send(json.dumps(setup))

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone, for whatever reason."""
        return self._process.poll() is not None

    def ready(self) -> Mapping[str, str] | None:
        """Wait until the template is compiled. None when it is, else what went wrong."""
        if self._is_ready:
            return None
        reply = self._receive(_START_SECONDS + self._limits.wall_seconds)
        self._is_ready = reply["kind"] == "ready"
        return None if self._is_ready else reply

    def ask(self, line: str) -> Mapping[str, str]:
        """Send variables and wait for the text."""
        return self._receive(self._limits.wall_seconds, line)

    def _send(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it died; reading will say of what
            stdin = _pipe(self._process.stdin)
            stdin.write(line.encode() + b"\n")
            stdin.flush()

    def _receive(self, seconds: float, line: str = "") -> Mapping[str, str]:
        clock = threading.Timer(seconds, self._process.kill)
        clock.daemon = True
        clock.start()
        try:
            if line:
                self._send(line)
            answer = _pipe(self._process.stdout).readline()
        finally:
            clock.cancel()
        if not answer.endswith(b"\n"):
            return {"kind": "ended", "message": self._cause()}
        reply: dict[str, str] = json.loads(answer.decode("utf-8", "surrogatepass"))
        return reply

    def _cause(self) -> str:
        """Why the child ended without an answer."""
        status = self._process.wait()
        if status == -getattr(signal, "SIGPROF", 0):
            return f"it took more than {self._limits.cpu_seconds:g} s of processor time"
        if status == -getattr(signal, "SIGKILL", 0):
            return f"it was ended after {self._limits.wall_seconds:g} s, or for its memory"
        last_words = _pipe(self._process.stderr).read().decode(errors="replace").split("\n")
        detail = next((words for words in reversed(last_words) if words.strip()), "")
        return f"its process ended with status {status} {detail}".rstrip()


def _library_paths() -> list[str]:
    """Where the child finds jinja2 and what jinja2 needs."""
    origins = [spec.origin for name in ("jinja2", "markupsafe") if (spec := find_spec(name))]
    return [str(Path(origin).parents[1]) for origin in origins if origin]


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None  # all three are pipes
    return stream


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child and take back its pipes; safe when it is gone already."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(BrokenPipeError):  # unsent bytes of a child that died
            _pipe(stream).close()
