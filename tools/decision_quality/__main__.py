"""The two commands."""

import time
from pathlib import Path

import click
from tqdm import tqdm

from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.models import DEMO_MODEL_PATH
from tools.decision_quality.asking import drawn_states
from tools.decision_quality.reading import lines, read_all
from tools.decision_quality.table import PAGE, write_table
from tools.demo_model.tables import load_tables


@click.group()
def main() -> None:
    """Measure the embedded model's decisions."""


@main.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("samples", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seconds", default=1e9, help="Stop after so long; go on by the same command.")
def read(data: Path, samples: Path, seconds: float) -> None:
    """Decide about every state that SAMPLES lacks."""
    until = time.monotonic() + seconds
    states = drawn_states(load_tables(data, "test", "valid"))
    total = sum(map(len, states.values())) - sum(1 for _ in lines(samples))
    options = EngineOptions(model=DEMO_MODEL_PATH, device="host", will_chat=True)
    with Engine.open(options) as engine, tqdm(total=total, unit=" states") as bar:
        for count in read_all(engine, states, samples, until):
            bar.update(count)


@main.command()
@click.argument("samples", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--page", default=PAGE, type=click.Path(exists=True, path_type=Path), hidden=True)
def show(samples: Path, page: Path) -> None:
    """Write the table of SAMPLES into docs/decisions.md."""
    write_table(list(lines(samples)), page)


if __name__ == "__main__":
    main()
