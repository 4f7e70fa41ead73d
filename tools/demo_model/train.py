"""Trains the demo model from random weights on one accelerator, within a given time.

    python -m tools.demo_model.train DATA_FOLDER OUTPUT_FOLDER --seconds 540

DATA_FOLDER is what `prepare` wrote. OUTPUT_FOLDER gets the checkpoint (safetensors shards and
config.json), `log.jsonl` and `metrics.json`. The schedule follows the clock, so a run always ends
in time; it is not reproducible bit for bit.
"""

import shutil
import time
from pathlib import Path

import click

from tools.demo_model.feed import Feed, FeedPlan, start_evaluation_batches


@click.command()
@click.argument("data", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seconds", default=540.0, help="Wall-clock limit of the whole command.")
@click.option("--device", default="cuda", help="cuda, or cpu for a trial run.")
@click.option("--length", default=2048, help="Tokens of a row.")
@click.option("--short", default=24, help="Rows of two windows each.")
@click.option("--long", default=8, help="Rows of one window.")
@click.option("--workers", default=13, help="Processes that make batches.")
@click.option("--evaluation-limit", default=0, help="Prompts per evaluation set (0: all).")
@click.option("--least-speed", default=0.0, help="Tokens per second; a slower run is ended.")
@click.option("--trial", is_flag=True, help="Train a much smaller model.")
@click.option("--compile/--no-compile", "compiled", default=True, help="Compile the blocks.")
def main(
    data: Path,
    output: Path,
    seconds: float,
    device: str,
    length: int,
    short: int,
    long: int,
    workers: int,
    evaluation_limit: int,
    least_speed: float,
    trial: bool,
    compiled: bool,
) -> None:
    """Train on the prepared data in DATA; results go to OUTPUT."""
    started = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data / "tokenizer.json", output / "tokenizer.json")  # the export needs it
    answers = 16 * (short + long)
    plan = FeedPlan(length=length, short=short, long=long, workers=workers, max_answers=answers)
    # The feeder forks, so it starts before torch has threads or an accelerator.
    feed = Feed(data, plan)
    evaluation = start_evaluation_batches(data, plan, evaluation_limit)
    try:
        from tools.demo_model.training import Run, RunPlan

        run = Run(RunPlan(seconds, device, compiled, least_speed, trial), plan, output, started)
        run.train(feed)
    finally:
        feed.close()
    run.finish(evaluation)


if __name__ == "__main__":
    main()
