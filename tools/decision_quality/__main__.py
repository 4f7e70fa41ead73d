"""The commands."""

import time
from pathlib import Path

import click
from tqdm import tqdm

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tools.decision_quality.asking import TASKS, drawn_states
from tools.decision_quality.priors import PRIOR_TASKS, prior_table, read_questions
from tools.decision_quality.reading import lines, read_all
from tools.decision_quality.table import PAGE, put, write_table
from tools.demo_model.tables import load_tables

OPTIONS = EngineOptions(model=DEMO_MODEL_PATH, device="host", will_chat=True)


@click.group()
def main() -> None:
    """Measure the embedded model's decisions."""


@main.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("samples", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", default=1e9, help="Stop after so long; go on by the same command.")
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(TASKS)), help="Only these.")
def read(data: Path, samples: Path, seconds: float, tasks: tuple[str, ...]) -> None:
    """Decide about every state that SAMPLES lacks."""
    until = time.monotonic() + seconds
    states = drawn_states(load_tables(data, "test", "valid"))
    states = {task: found for task, found in states.items() if not tasks or task in tasks}
    total = sum(map(len, states.values())) - sum(one["task"] in states for one in lines(samples))
    with Engine.open(OPTIONS) as engine, tqdm(total=total, unit=" states") as bar:
        for count in read_all(engine, states, samples, until):
            bar.update(count)


@main.command()
@click.argument("samples", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--page", default=PAGE, type=click.Path(exists=True, path_type=Path), hidden=True)
def show(samples: Path, page: Path) -> None:
    """Write the table of SAMPLES into docs/decisions.md."""
    write_table(list(lines(samples)), page)


@main.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--page", default=PAGE, type=click.Path(exists=True, path_type=Path), hidden=True)
def priors(data: Path, page: Path) -> None:
    """Compare what L0 may divide out, and write the table into docs/decisions.md."""
    states = drawn_states(load_tables(data, "test", "valid"))
    with Engine.open(OPTIONS) as engine:
        reads = {
            task: list(tqdm(read_questions(engine, states[task]), desc=task, unit=" questions"))
            for task in PRIOR_TASKS
        }
    put(page, "priors", prior_table(reads))


if __name__ == "__main__":
    main()
