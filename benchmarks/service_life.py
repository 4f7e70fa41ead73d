"""The life of the service under a real systemd: started, killed, hung, stopped, misconfigured.

    PYTHONPATH=. python benchmarks/service_life.py [--json FILE]     # as root, where systemd is

systemd need not run the machine: a user's manager of its own is started in a mount namespace, where
it takes the machine for one that systemd runs. Nothing outside of that is touched. Each step states
what must hold, and the script ends with 1 where something does not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.arguments import run_benchmark
from strata_cli.launch.starting import serve_command
from strata_cli.launch.unit import STOP_S, UnitOptions, unit_text

ROOT = Path(__file__).resolve().parent.parent
MANAGER = "/lib/systemd/systemd"
PATIENCE_S = 120.0
WATCHDOG_S = 3
LONG = {"prompt": "A chess engine", "max_tokens": 1900, "temperature": 1, "stream": True}
SHORT = {"prompt": "A chess engine", "max_tokens": 4, "temperature": 0}


class Life:
    """A manager, a home folder and a service's address.

    Attributes:
        figures: what was measured.
        broken: what does not hold.
    """

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self.file = home / "strata.toml"
        self.figures: dict[str, Any] = {}
        self.broken: list[str] = []

    def expect(self, what: str, holds: bool) -> None:
        print(f"{'ok' if holds else 'BROKEN':7} {what}", flush=True)
        if not holds:
            self.broken.append(what)

    def systemctl(self, *words: str) -> str:
        done = subprocess.run(
            ("systemctl", "--user", *words), capture_output=True, text=True, check=False
        )
        return (done.stdout + done.stderr).strip()

    def show(self, name: str) -> str:
        return self.systemctl("show", "-p", name, "--value", "strata")

    def launch(self) -> None:
        command = [sys.executable, "-m", "strata_cli", "launch", "embedded", "--device", "host"]
        command += ["--systemd", "user", "--port", str(self.port), "--config", str(self.file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self.home)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        return urllib.request.urlopen(request, timeout=PATIENCE_S)

    def is_loaded(self) -> bool:
        try:
            with self.ask("/health") as answer:
                return bool(json.load(answer)["loaded"])
        except OSError:
            return False

    def text(self) -> str:
        with self.ask("/v1/completions", SHORT) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def stop(self) -> float:
        start = time.monotonic()
        self.systemctl("stop", "strata")
        return time.monotonic() - start


def until(condition: Callable[[], bool]) -> float:
    """Seconds until a condition holds."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > PATIENCE_S:
            raise SystemExit("nothing happened for two minutes")
        time.sleep(0.01)
    return time.monotonic() - start


def starting(life: Life) -> None:
    launching = threading.Thread(target=life.launch)
    start = time.monotonic()
    launching.start()
    until(lambda: life.show("ActiveState") == "activating")
    until(lambda: life.show("ActiveState") != "activating")
    life.expect("ready is told only when the model is loaded", life.is_loaded())
    launching.join()
    life.figures["launch to ready s"] = time.monotonic() - start
    life.expect("it answers", life.text() == life.text())
    life.expect("it says what it does", "answering" in life.show("StatusText"))


def killed(life: Life) -> None:
    os.kill(int(life.show("MainPID")), signal.SIGKILL)
    life.figures["killed to answering again s"] = until(life.is_loaded)
    life.expect("a killed server is started again", life.show("NRestarts") == "1")


def hung(life: Life) -> None:
    folder = life.home / ".config" / "systemd" / "user" / "strata.service.d"
    folder.mkdir()
    (folder / "watchdog.conf").write_text(f"[Service]\nWatchdogSec={WATCHDOG_S}\n")
    life.systemctl("daemon-reload")
    life.systemctl("restart", "strata")
    time.sleep(2 * WATCHDOG_S)
    life.expect("a server that lives is left alone", life.show("ActiveState") == "active")
    os.kill(int(life.show("MainPID")), signal.SIGSTOP)
    life.figures["hung to given up s"] = until(lambda: life.show("Result") == "watchdog")
    life.figures["hung to answering again s"] = until(life.is_loaded)
    life.expect("a hung server is started again", life.text() != "")
    shutil.rmtree(folder)
    life.systemctl("daemon-reload")


def stopped_at_work(life: Life) -> None:
    chunks: list[bytes] = []
    first = threading.Event()

    def read() -> None:
        with life.ask("/v1/completions", LONG) as answer:
            for line in answer:
                chunks.append(line)
                first.set()

    reading = threading.Thread(target=read)
    reading.start()
    first.wait(PATIENCE_S)
    seconds = life.stop()
    reading.join(PATIENCE_S)
    life.figures["stop while a text is streamed s"] = seconds
    life.expect(f"it ends within {STOP_S} s with a request at work", seconds < STOP_S)
    life.expect("the request gets an end, not a cut", not reading.is_alive() and bool(chunks))
    state = (life.show("Result"), life.show("ExecMainStatus"))
    life.expect(f"and ends well: {state}", state == ("success", "0"))


def stopped_while_loading(life: Life) -> None:
    life.systemctl("start", "--no-block", "strata")
    until(lambda: life.show("MainPID") != "0")
    life.figures["stop while it loads s"] = seconds = life.stop()
    life.expect(f"it ends within {STOP_S} s while it loads", seconds < STOP_S)


def misconfigured(life: Life) -> None:
    before = life.file.read_text("utf-8")
    life.file.write_text(f'{before}\nseed = "soon"\n', "utf-8")
    life.systemctl("start", "strata")
    state = (life.show("ActiveState"), life.show("ExecMainStatus"))
    life.expect(f"a wrong setting is not tried again: {state}", state == ("failed", "2"))
    life.systemctl("reset-failed", "strata")
    life.file.write_text(before, "utf-8")


def locked_up(life: Life) -> None:
    """The unit of a system service, whose sandbox this manager can set up because it is root's."""
    options = UnitOptions(
        command=serve_command(life.file, is_service=True),
        scope="system",
        description="Strata",
        readable=(Path(sys.prefix).resolve(), life.file),
    )
    unit = life.home / ".config" / "systemd" / "user" / "strata.service"
    unit.write_text(unit_text(options), "utf-8")
    life.systemctl("daemon-reload")
    start = time.monotonic()
    life.systemctl("start", "strata")
    life.figures["sandboxed: start to ready s"] = time.monotonic() - start
    life.expect("the sandboxed unit answers", life.is_loaded() and life.text() != "")
    life.figures["sandboxed: stop s"] = life.stop()


STEPS = (starting, killed, hung, stopped_at_work, stopped_while_loading, misconfigured, locked_up)


def make_look_booted() -> None:
    """What a manager expects of a machine that systemd runs."""
    subprocess.run(("mount", "-t", "tmpfs", "tmpfs", "/run/systemd"), check=True)
    Path("/run/systemd/system").mkdir()
    hidden = Path("/run/systemd/inaccessible")
    (hidden / "dir").mkdir(parents=True)
    (hidden / "reg").touch()
    os.mkfifo(hidden / "fifo")
    os.mknod(hidden / "chr", 0o020000, os.makedev(0, 0))
    os.mknod(hidden / "blk", 0o060000, os.makedev(0, 0))


@contextmanager
def manager(home: Path) -> Iterator[None]:
    settings = {"HOME": home, "XDG_RUNTIME_DIR": home / "run", "PYTHONPATH": ROOT}
    for name, value in settings.items():
        os.putenv(name, str(value))  # for the commands that are started from here on
    (home / "run").mkdir(mode=0o700)
    process = subprocess.Popen((MANAGER, "--user"), stderr=subprocess.DEVNULL)
    try:
        until((home / "run" / "systemd" / "private").exists)
        subprocess.run(("systemctl", "--user", "set-environment", f"PYTHONPATH={ROOT}"), check=True)
        yield
    finally:
        subprocess.run(("systemctl", "--user", "stop", "strata"), check=False)
        process.terminate()
        process.wait()


def inside(record: Path | None) -> int:
    make_look_booted()
    home = Path(tempfile.mkdtemp(prefix="service-life-"))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    life = Life(home, port)
    try:
        with manager(home):
            for step in STEPS:
                step(life)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    for name, value in life.figures.items():
        print(f"{name:36} {value:6.2f}")
    if record:
        record.write_text(json.dumps({"figures": life.figures, "broken": life.broken}, indent=1))
    return 1 if life.broken else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        return inside(options.json)
    command = ["unshare", "--mount", sys.executable, *sys.argv, "--inside"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    run_benchmark(main)
