"""Measures a GGUF file of the demo model through the engine, on the host.

    python -m tools.demo_model.evaluate DATA_FOLDER tools/demo_model/results/engine.json

DATA_FOLDER is what `prepare` wrote. Every task and part is stored as soon as it is measured, and
is not measured again for the same model file, so an interrupted run goes on where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tools.demo_model.evaluation.decisions import Answered, measure_task
from tools.demo_model.evaluation.reading import Progress
from tools.demo_model.evaluation.routing import measure_routing
from tools.demo_model.evaluation.sampling import PLANS, Task, sample_tasks
from tools.demo_model.evaluation.texts import measure_positions, measure_texts, source_sizes
from tools.demo_model.tables import Tables, load_tables

SOURCE_BYTES, LONG_DOCUMENTS = 12_000, 20
ROUTED_DOCUMENTS, ROUTED_TASKS, ROUTED_PROMPTS = 40, ("section4", "wordnet4", "debtags_yes_no"), 25


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a loaded model, on the splits of the prepared data in folder `data`."""

    engine: Engine
    data: Path
    test: Tables
    valid: Tables


@dataclass(slots=True)
class Results:
    """The figures of one model file, kept in a JSON file."""

    path: Path
    values: dict[str, Any]

    @classmethod
    def of(cls, path: Path, model: Path) -> "Results":
        """Take up what `path` already knows of this very model file."""
        identity = {"file": model.name, "sha256": hashlib.sha256(model.read_bytes()).hexdigest()}
        if path.exists():
            values = json.loads(path.read_text("utf-8"))
            if values.get("model") == identity:
                return cls(path, values)
        return cls(path, {"model": identity, "tasks": {}})

    def store(self, place: dict[str, Any], name: str, found: dict[str, Any]) -> None:
        """Keep a result, and write the file."""
        place[name] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.values, indent=1) + "\n", "utf-8")


def write_answers(path: Path, task: Task, answered: Sequence[Answered]) -> None:
    """Write what was answered to each test prompt, one JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for example, one in zip(task.test, answered, strict=True):
            turn = example.turns[0]
            record = {
                "state": example.state,
                "question": turn.text,
                "options": turn.options,
                "right": one.right,
                "raw": one.raw.round(5).tolist(),
                "averaged": one.averaged.round(5).tolist(),
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def measure_tasks(
    engine: Engine, tasks: Sequence[Task], results: Results, answers: Path | None
) -> None:
    """Measure tasks, one after the other."""
    for task in tasks:
        begin = time.monotonic()
        with tqdm(total=len(task.valid) + len(task.test), desc=task.name) as bar:
            found = measure_task(engine, task, bar.update)
        if answers is not None:
            answers.mkdir(parents=True, exist_ok=True)
            write_answers(answers / f"{task.name}.jsonl", task, found.test)
        report = found.report | {"seconds": round(time.monotonic() - begin, 1)}
        results.store(results.values["tasks"], task.name, report)


def held_out_texts(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Measure running text of every source."""
    (train,) = load_tables(subject.data, "train")
    sizes = source_sizes(train)
    return measure_texts(subject.engine, subject.test, sizes, SOURCE_BYTES, progress)


def long_texts(subject: Subject, progress: Progress) -> dict[str, Any]:
    """Measure documents that fill the context."""
    return measure_positions(subject.engine, subject.test, LONG_DOCUMENTS, progress)


def expert_load(subject: Subject, _: Progress) -> dict[str, Any]:
    """Measure which experts are chosen."""
    tasks = sample_tasks(subject.test, subject.valid, ROUTED_TASKS)
    prompts = [one for task in tasks for one in task.test[:ROUTED_PROMPTS]]
    return measure_routing(subject.engine, subject.test, prompts, ROUTED_DOCUMENTS)


PARTS: dict[str, Callable[[Subject, Progress], dict[str, Any]]] = {
    "texts": held_out_texts,
    "positions": long_texts,
    "routing": expert_load,
}


def measure_parts(subject: Subject, results: Results, names: Sequence[str]) -> None:
    """Measure the named parts."""
    for name in names:
        begin = time.monotonic()
        with tqdm(desc=name, unit=" tokens") as bar:
            found = PARTS[name](subject, bar.update)
        seconds = round(time.monotonic() - begin, 1)
        results.store(results.values, name, found | {"seconds": seconds})


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--model",
    default=DEMO_MODEL_PATH,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Model file; default: the embedded one.",
)
@click.option(
    "--task", "tasks", multiple=True, type=click.Choice(sorted(PLANS)), help="Repeatable."
)
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), help="Repeatable.")
@click.option("--threads", default=0, help="Host threads that compute (0: all cores).")
@click.option(
    "--answers",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for what was answered to every prompt.",
)
def main(
    data: Path, output: Path, model: Path, tasks: tuple[str, ...], parts: tuple[str, ...],
    threads: int, answers: Path | None,
) -> None:  # fmt: skip
    """Measure tasks and parts on the prepared data in DATA; figures go to OUTPUT.

    Without --task and --part everything is measured.
    """
    test, valid = load_tables(data, "test", "valid")
    results = Results.of(output, model)
    everything = not (tasks or parts)
    known = results.values["tasks"]
    wanted = [name for name in (PLANS if everything else tasks) if name not in known]
    missing = [name for name in (PARTS if everything else parts) if name not in results.values]
    with Engine.open(EngineOptions(model=model, device="host", threads=threads)) as engine:
        measure_parts(Subject(engine, data, test, valid), results, missing)
        measure_tasks(engine, sample_tasks(test, valid, wanted), results, answers)


if __name__ == "__main__":
    main()
