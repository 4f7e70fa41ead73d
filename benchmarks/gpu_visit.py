"""One visit to a GPU machine: every test and benchmark that needs it, and one report.

    python benchmarks/gpu_visit.py REPORT_FOLDER [--budget-s 540] [--steps device,kernels,...]
        [--before "COMMAND"] [--model PATH ...]

Steps run one after the other, each in a process of its own with a time limit; one that fails,
hangs or is cut off does not stop the others. The folder then holds report.txt (a page), report.json
(everything, the benchmarks' figures included) and log.txt (all output). Needs no network, no
installed project and no settings; run it from the root of the project.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "strata_cli" / "models" / "demo.gguf"
WORKERS = 12  # processes that tests are dealt to: most of their time is compiling
SHORTEST_S = 15.0  # a step is not begun with less time left
LINE = 160  # characters of a failure's message
ENGINE_TESTS = (
    "tests/engine/test_sequence.py tests/engine/test_snapshots.py "
    "tests/engine/test_interruptions.py tests/engine/test_limits.py tests/engine/test_homes.py"
)


@dataclass(frozen=True)
class Step:
    """A command and its time limit; ``tests`` are pytest arguments instead of a command."""

    name: str
    limit_s: float
    command: list[str] = field(default_factory=list)
    tests: str = ""
    is_parallel: bool = False
    figures: str = ""  # JSON file that the command writes into the report folder


@dataclass
class Outcome:
    """What a step came to."""

    name: str
    result: str
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)
    figures: Any = None
    tail: str = ""


def all_steps(models: list[Path], before: list[str]) -> list[Step]:
    steps = [
        Step(f"before-{index}", 400, ["bash", "-c", text]) for index, text in enumerate(before)
    ]
    steps += [
        Step("device", 120, tests="tests/device"),
        Step("kernels", 300, tests="tests/kernels", is_parallel=True),
        Step("oracle", 240, tests="tests/engine/test_gpu_oracle.py", is_parallel=True),
        Step("bits", 300, tests="tests/engine/test_gpu_bits.py", is_parallel=True),
        Step("engine", 240, tests=ENGINE_TESTS, is_parallel=True),
        Step("commands", 240, tests="tests/commands/test_read_gpu.py"),
        Step("sanitizers", 600, tests="tests/engine/test_sanitizers.py"),
        Step("calls", 120, ["python", "benchmarks/device.py", "cuda:0", "--json"]),
    ]
    short = ["--experts", "mapped", "--lengths", "1024,4096", "--steps", "32"]
    for path in [DEMO, *models]:
        steps.append(model_step(f"model-{path.stem}", path, []))
    steps += [model_step(f"mapped-{path.stem}", path, short) for path in models]
    return steps


def model_step(name: str, path: Path, more: list[str]) -> Step:
    """The benchmark of one model."""
    figures = f"{name}.json"
    command = ["python", "benchmarks/cuda_model.py", str(path), "--json", figures]
    return Step(name, 400, [*command, "--budget-s", "300", *more], figures=figures)


class Visit:
    """Runs steps within a budget and keeps the report up to date after each."""

    def __init__(self, folder: Path, budget_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._begin = time.monotonic()
        self._budget_s = budget_s
        self._machine = machine()
        self._outcomes: list[Outcome] = []
        self._log = (folder / "log.txt").open("w", encoding="utf-8", errors="replace")

    def run(self, step: Step) -> None:
        left = self._budget_s - (time.monotonic() - self._begin)
        if left < SHORTEST_S:
            self._finish(Outcome(step.name, "no time left", 0.0))
            return
        print(f"{step.name} ...", end=" ", flush=True)
        junit = self._folder / "junit.xml"
        junit.unlink(missing_ok=True)
        outcome = self._run_command(step, self._command(step, junit), min(step.limit_s, left))
        if step.tests:
            read_junit(junit, outcome)
            junit.unlink(missing_ok=True)
        if step.figures and (path := self._folder / step.figures).exists():
            outcome.figures = json.loads(path.read_text())
            path.unlink()
        self._finish(outcome)

    def _command(self, step: Step, junit: Path) -> list[str]:
        if not step.tests:
            command = [sys.executable if word == "python" else word for word in step.command]
            return [str(self._folder / word) if word == step.figures else word for word in command]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "-rs"]
        command += ["-p", "no:cacheprovider", "-o", "faulthandler_timeout=100"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={junit}", *step.tests.split()]
        if step.is_parallel and importlib.util.find_spec("xdist"):
            workers = min(WORKERS, len(os.sched_getaffinity(0)))
            command += ["-p", "xdist.plugin", "-n", str(workers)]
        return command

    def _run_command(self, step: Step, command: list[str], limit_s: float) -> Outcome:
        inherited = os.environ  # noqa: TID251  the children's, not settings
        environ = {
            **inherited,
            "PYTHONPATH": os.pathsep.join([str(ROOT), inherited.get("PYTHONPATH", "")]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of what else the machine has installed
            "PYTHONUNBUFFERED": "1",
        }
        begin = time.monotonic()
        self._log.write(f"\n===== {step.name}: {shlex.join(command)}\n")
        self._log.flush()
        at = self._log.tell()
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            result = wait_or_kill(process, limit_s)
        self._log.seek(0, os.SEEK_END)
        outcome = Outcome(step.name, result, time.monotonic() - begin)
        with Path(self._log.name).open("rb") as log:
            log.seek(at)
            outcome.tail = log.read().decode(errors="replace")[-3_000:]
        return outcome

    def _finish(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        print(f"{outcome.result}, {outcome.seconds:.0f} s {summary(outcome)}", flush=True)
        report = {"machine": self._machine, "steps": [asdict(one) for one in self._outcomes]}
        (self._folder / "report.json").write_text(json.dumps(report, indent=1))
        (self._folder / "report.txt").write_text(page(self._machine, self._outcomes))


def wait_or_kill(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """The result in words. At the limit an interrupt, so that results are kept, then the end."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        for ending, patience_s in ((signal.SIGINT, 15.0), (signal.SIGKILL, 15.0)):
            os.killpg(process.pid, ending)
            try:
                process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        return f"cut off after {limit_s:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return "passed" if code == 0 else f"failed ({code})"


def read_junit(path: Path, outcome: Outcome) -> None:
    """Counts, failures and recorded properties, where pytest came to write them."""
    if not path.exists():
        return
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag: child for child in case}
        kind = next((k for k in ("failure", "error", "skipped") if k in kinds), "passed")
        counts[kind] += 1
        if kind in ("failure", "error"):
            message = (kinds[kind].get("message") or "").strip().splitlines() or [""]
            outcome.failures.append(f"{case.get('name')}: {message[0]}"[:LINE])
        for entry in case.iter("property"):
            outcome.properties[entry.get("name") or ""] = entry.get("value") or ""
    outcome.counts = dict(counts)
    if outcome.result == "passed" and set(counts) == {"skipped"}:
        outcome.result = "all skipped"


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    facts = {"python": platform.python_version(), "kernel": platform.release()}
    facts["processors"] = str(len(os.sched_getaffinity(0)))
    for name in ("numpy", "numba", "cuda.bindings", "pytest", "xdist", "gguf", "orjson", "tqdm"):
        try:
            module = importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  a report must come whatever is broken
            facts[name] = f"missing: {error}"
        else:
            facts[name] = str(getattr(module, "__version__", "there"))
    facts["compute-sanitizer"] = shutil.which("compute-sanitizer") or "missing"
    queries = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,pcie.link.gen.current"
    facts["gpu"] = said_by(
        "nvidia-smi", f"--query-gpu={queries},pcie.link.width.current", "--format=csv,noheader"
    )
    facts["commit"] = said_by("git", "rev-parse", "--short", "HEAD")
    for path in ("/proc/meminfo", "/sys/fs/cgroup/memory.max", "/proc/self/limits"):
        lines = Path(path).read_text().splitlines() if Path(path).exists() else []
        wanted = [line for line in lines if "Mem" in line or "lock" in line or len(lines) == 1]
        facts[path] = "; ".join(" ".join(line.split()) for line in wanted[:4])
    return facts


def said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def summary(outcome: Outcome) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.counts.items()))


def page(facts: dict[str, str], outcomes: list[Outcome]) -> str:
    lines = [f"{name:<28} {value}" for name, value in facts.items()]
    lines += ["", f"{'step':<24} {'result':<22} {'s':>5}  tests"]
    lines += [f"{o.name:<24} {o.result:<22} {o.seconds:5.0f}  {summary(o)}" for o in outcomes]
    for outcome in outcomes:
        if outcome.properties:
            lines += ["", f"{outcome.name}:"]
            lines += [f"  {name}: {value}" for name, value in sorted(outcome.properties.items())]
        if outcome.failures:
            lines += ["", f"{outcome.name}, {len(outcome.failures)} failures:"]
            lines += [f"  {text}" for text in outcome.failures[:40]]
        elif outcome.result not in ("passed", "no time left") or outcome.figures:
            lines += ["", f"{outcome.name}, end of its output:", outcome.tail]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all steps together")
    parser.add_argument("--steps", default="", help="names, or their beginnings, with commas")
    parser.add_argument("--model", type=Path, action="append", default=[], help="to benchmark too")
    parser.add_argument("--before", action="append", default=[], help="shell command run first")
    arguments = parser.parse_args()
    chosen = [text for text in arguments.steps.split(",") if text]
    visit = Visit(arguments.folder.resolve(), arguments.budget_s)
    for step in all_steps(arguments.model, arguments.before):
        is_chosen = not chosen or any(step.name.startswith(text) for text in chosen)
        if is_chosen or step.name.startswith("before"):
            visit.run(step)
    print((arguments.folder / "report.txt").read_text())


if __name__ == "__main__":
    main()
