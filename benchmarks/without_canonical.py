"""What steps that are not canonical pay for canonical reads being there.

    PYTHONPATH=. python benchmarks/without_canonical.py [MODEL.gguf] [--device NAME] [--slots N]
        [--steps N] [--turns N] [--json FILE]

Two processes, each with an engine of its own, take turns at decoding the same tokens: one of this
tree, one of a copy from which everything is cut out that steps do for canonical reads' sake. There
passes and states do not know whether they are exact, recorded passes have one kind, nothing can
pause what adapts, and nothing asks whether a read is canonical. The order of the two changes from
turn to turn; a turn's ratio is of the medians of its steps. A third process, of this tree again,
shows what two equal builds differ by.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

if not __package__:  # run as a file: the project is the folder above, whatever PYTHONPATH says
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.arguments import run_benchmark
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tools.synth.prompts import zipf_prompt

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("strata_cli", "benchmarks", "tools")
PROMPT, WARM_UPS = 128, 16
ENGINE = "strata_cli/engine"
# What steps run through, in files of the tree, and what takes its place.
CHANGES = {
    f"{ENGINE}/engine.py": (
        (
            "yield from self._decoder.step(states, ids, is_exact=self._is_exact_step)",
            "yield from self._decoder.step(states, ids)",
        ),
    ),
    f"{ENGINE}/decode/step.py": (
        ("residency.begin(num, is_exact=is_exact)", "residency.begin(num)"),
        ("advancing(state, [token_id], is_exact=is_exact)", "advancing(state, [token_id])"),
        ("self._graph(batch, is_exact=is_exact)", "self._graph(batch)"),
        ("residency.end(num, is_exact=is_exact)", "residency.end(num)"),
        ("def _graph(self, batch: Batch, *, is_exact: bool)", "def _graph(self, batch: Batch)"),
        ("None if is_exact or self._residency is None else", "None if not self._residency else"),
        ("key = feed is None, tuple(map(id, states))", "key = tuple(map(id, states))"),
    ),
    f"{ENGINE}/decode/residency.py": (
        (
            "            if not is_exact:\n                self._sharing.open(num_rows)",
            "            self._sharing.open(num_rows)",
        ),
        ("or not self._is_due or self._pauses:", "or not self._is_due:"),
        (
            "self._count(num_rows, pairs, is_exact=is_exact)",
            "self._count(num_rows, pairs, is_exact=False)",
        ),
        ("        if self._pauses:\n            return\n", ""),
    ),
    f"{ENGINE}/forward/rows.py": (
        ("state.end_pass(ids, is_exact=is_exact)", "state.end_pass(ids)"),
    ),
    f"{ENGINE}/forward/state.py": (
        ("        self.is_exact = self.is_exact and is_exact\n", ""),
        ("        if self.is_exact:\n            self.exact_rows = self.position\n", ""),
        ("        self.exact_rows = min(self.exact_rows, self.position)\n", ""),
    ),
}


def cut_out(folder: Path) -> None:
    """Copy this tree into a folder, without what canonical reads add to steps."""
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name, changes in CHANGES.items():
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for old, new in changes:
            assert text.count(old) == 1, f"{name}: {old!r} comes {text.count(old)} times"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


class Worker:
    """A process that decodes when told to. A context manager."""

    def __init__(self, tree: Path, arguments: Sequence[str]) -> None:
        command = [sys.executable, str(tree / "benchmarks/without_canonical.py"), *arguments]
        self._process = subprocess.Popen(
            [*command, "--worker"],
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._hear()

    def decode(self) -> float:
        """Median seconds of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._hear())

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self._process.wait()}")
        return line

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(options: EngineOptions, steps: int) -> None:
    """Decode the same tokens for each line of the input; answer with the median step's seconds."""
    with Engine.open(options) as engine, engine.sequence() as sequence:
        ids = zipf_prompt(engine.spec.vocab_size, PROMPT + WARM_UPS + steps, seed=7)
        print("ready", flush=True)
        for _ in sys.stdin:
            sequence.reset()
            sequence.prefill(ids[:PROMPT], logits="none")
            seconds = []
            for token in ids[PROMPT:]:
                began = time.perf_counter()
                sequence.step(token)
                seconds.append(time.perf_counter() - began)
            print(statistics.median(seconds[WARM_UPS:]), flush=True)


def compare(arguments: Sequence[str], turns: int) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by process."""
    seconds: dict[str, list[float]] = {"with": [], "without": [], "with again": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cut_out(folder)
        trees = (ROOT, folder, ROOT)
        workers = {
            name: stack.enter_context(Worker(tree, arguments))
            for name, tree in zip(seconds, trees, strict=True)
        }
        for worker in workers.values():
            worker.decode()
        for turn in range(turns):
            for name in list(workers)[:: -1 if turn % 2 else 1]:
                seconds[name].append(workers[name].decode())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=DEMO_MODEL_PATH)
    parser.add_argument("--device", default="host")
    parser.add_argument("--slots", type=int, help="of the expert cache")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        options = EngineOptions(
            model=arguments.model,
            device=arguments.device,
            expert_cache=arguments.slots,
            max_context=PROMPT + WARM_UPS + arguments.steps + 1,
        )
        work(options, arguments.steps)
        return
    passed = [str(arguments.model.resolve()), "--device", arguments.device]
    passed += ["--steps", str(arguments.steps)]
    passed += [] if arguments.slots is None else ["--slots", str(arguments.slots)]
    seconds = compare(passed, arguments.turns)
    for name in ("without", "with again"):
        ratios = [a / b for a, b in zip(seconds["with"], seconds[name], strict=True)]
        print(
            f"with over {name:<11} {statistics.median(ratios):.4f} "
            f"({min(ratios):.4f} to {max(ratios):.4f})  "
            f"{1e6 * statistics.median(seconds['with']):.0f} / "
            f"{1e6 * statistics.median(seconds[name]):.0f} us a step"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    run_benchmark(main)
