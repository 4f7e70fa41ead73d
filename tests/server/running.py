"""`strata serve` as a process of its own, for tests that need real sockets and the real engine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson


class Running(NamedTuple):
    """A server that answers.

    Attributes:
        url: without /v1.
        process: the server's.
        lines: what it wrote to stderr so far.
    """

    url: str
    process: subprocess.Popen[str]
    lines: list[str]

    def post(self, path: str, **fields: Any) -> Any:
        """The JSON that a request is answered with, whatever its status."""
        data = orjson.dumps(fields)
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return orjson.loads(reply.read())
        except urllib.error.HTTPError as error:
            return orjson.loads(error.read())

    def get(self, path: str) -> Any:
        """The JSON that a GET is answered with."""
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return orjson.loads(reply.read())


@contextmanager
def serving(*args: str, **variables: str) -> Iterator[Running]:
    """A server of the embedded model on the host; ended with SIGTERM."""
    command = [sys.executable, "-m", "strata_cli", "serve", "--device", "host", "--port", "0"]
    with subprocess.Popen(
        [*command, *args], stderr=subprocess.PIPE, text=True, env=variables or None
    ) as process:
        lines: list[str] = []
        try:
            yield Running(_url(process, lines), process, lines)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


def _url(process: subprocess.Popen[str], lines: list[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"answers on (http://[^/]+)/v1", line):
            threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True).start()
            return found[1]
    raise AssertionError("".join(lines))
