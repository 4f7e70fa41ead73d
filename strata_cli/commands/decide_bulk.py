"""`strata decide --jsonl`: many states from a file, a row for each in another file."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import click
import orjson

from strata_cli import __version__
from strata_cli.commands.opening import open_engine
from strata_cli.commands.options import in_order, written
from strata_cli.commands.progress import progress_bar
from strata_cli.commands.prompt import STDIN
from strata_cli.commands.result_file import check_result_file
from strata_cli.commands.state_lines import file_of, open_lines, origin_of
from strata_cli.config import StrataConfig
from strata_cli.decisions.bulk import BulkCounts, BulkJob, Row, answer_lines, run_bulk
from strata_cli.decisions.bulk_input import InputLine, count_lines, read_lines
from strata_cli.decisions.bulk_output import BulkOutput
from strata_cli.decisions.decider import Decider
from strata_cli.decisions.questions import Question
from strata_cli.decisions.ray_job import RayJob, answer_on_ray, import_ray
from strata_cli.decisions.rules import DecisionRules
from strata_cli.engine.device import auto_name
from strata_cli.engine.engine import Engine
from strata_cli.engine.from_settings import engine_options
from strata_cli.errors import ConfigError, InputError, path_text
from strata_cli.parsers import choice, file_path, whole_number

logger = logging.getLogger(__name__)

HOST_LANES = 8

_FILE = written(file_path)
_NAMES = ("jsonl", "out", "bad_lines", "batch", "ray", "workers")
# The flags of BulkFlags.
bulk_options = in_order(
    click.option(
        "--jsonl",
        callback=_FILE,
        metavar="FILE",
        help='Many states: each line {"state": ..., "id": ...}; - is stdin.',
    ),
    click.option(
        "--out",
        callback=_FILE,
        metavar="FILE",
        help="A row for each line of --jsonl, in order; what is there already is not asked again.",
    ),
    click.option(
        "--bad-lines",
        callback=written(choice("stop", "skip")),
        default="stop",
        metavar="stop|skip",
        help="stop: a line that cannot be answered ends the run. skip: its row says why.  [stop]",
    ),
    click.option(
        "--batch",
        callback=written(whole_number(1, 256)),
        metavar="N",
        help="States of --jsonl that are read side by side; takes memory, changes no bit.  "
        "[8 on the host, 1 on a GPU]",
    ),
    click.option("--ray", is_flag=True, help="Answer --jsonl on a Ray cluster, in the same bytes."),
    click.option(
        "--workers",
        callback=written(whole_number(1)),
        metavar="N",
        help="Engines of --ray; on a host also give --threads.  [one for each machine]",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkFlags:
    """As they were given.

    Attributes:
        jsonl: the states.
        out: the rows.
        bad_lines: what a line that cannot be answered does to the run.
        ray: answer on the workers of a Ray cluster.
        workers: how many of them; None: as many as have room.
        batch: states that are read side by side; None: some on a host, one on a GPU, whose memory
            is planned for as many as are asked for.
    """

    jsonl: Path
    out: Path
    bad_lines: Literal["stop", "skip"]
    ray: bool
    workers: int | None
    batch: int | None

    @classmethod
    def taken_from(cls, flags: dict[str, Any]) -> Self | None:
        """Take the keyword arguments that bulk_options added to a command out of all.

        Returns:
            None where one state is to be decided about.

        Raises:
            ConfigError: a flag lacks another.
        """
        taken = {name: flags.pop(name) for name in _NAMES}
        files = {"--jsonl": taken["jsonl"], "--out": taken["out"]}
        given = [flag for flag, path in files.items() if path is not None]
        if len(given) == 1:
            (missing,) = files.keys() - given
            raise ConfigError(f"{given[0]} needs {missing}", hint="--jsonl STATES --out ROWS")
        if given:
            return cls(**taken)
        for flag, value in (("--ray", taken["ray"]), ("--batch", taken["batch"])):
            if value:
                raise ConfigError(f"{flag} needs --jsonl", hint="--jsonl STATES --out ROWS")
        return None

    def lanes(self, device: str) -> int:
        """States that are read side by side on a device."""
        if self.batch is not None:
            return self.batch
        return HOST_LANES if device == "host" else 1

    def check_ray(self, config: StrataConfig) -> None:
        """Refuse what workers of a cluster cannot share.

        Raises:
            ConfigError: naming the flag.
        """
        if not self.ray:
            if self.workers is not None:
                raise ConfigError("--workers needs --ray", hint="--ray --workers 2")
            return
        if str(self.jsonl) == STDIN:
            raise ConfigError("--ray needs a file of states, not stdin", hint="--jsonl FILE")
        if config.device == "auto":
            raise ConfigError(
                "--ray needs --device host or cuda:0, not auto: workers on another kind of device "
                "would give other bits",
                hint=f"--device {auto_name()}, which auto would take on this machine",
            )

    def check(self, inputs: Mapping[str, str]) -> None:
        """Refuse an output that could not be resumed, or is one of the inputs.

        Raises:
            StrataError: naming the flag.
        """
        inputs = {"states' file": file_of(self.jsonl), **inputs}
        target = check_result_file("--out", os.fspath(self.out), inputs)
        if target.target is None:
            raise InputError(
                f"--out: {path_text(self.out)} is no regular file, and rows could not be resumed",
                hint="name a file",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BulkRun:
    """What to answer, and how.

    Attributes:
        config: the settings.
        flags: files, and what bad lines do.
        questions: asked about every state.
        rules: how they are answered.
        threshold: see BulkJob.
        model_hash: of the model's files.
        inputs: files that the run reads, by what they are.
        is_json: print the counts as one JSON object.
    """

    config: StrataConfig
    flags: BulkFlags
    questions: tuple[Question, ...]
    rules: DecisionRules
    threshold: float | None
    model_hash: str
    inputs: Mapping[str, str]
    is_json: bool

    def job(self, device: str) -> BulkJob:
        """What is asked of every line, on a device of this name."""
        kind = device.partition(":")[0]  # any two GPUs of a kind compute the same
        return BulkJob(
            questions=self.questions,
            rules=self.rules,
            threshold=self.threshold,
            engine=f"{self.model_hash} {kind} {__version__}",
        )


def decide_in_bulk(run: BulkRun) -> int:
    """Answer all lines that the output lacks, and say on stderr how many there were.

    Raises:
        StrataError: an input or output cannot be used, or a bad line ends the run.
    """
    run.flags.check_ray(run.config)
    run.flags.check(run.inputs)
    with ExitStack() as stack:
        lines_file = stack.enter_context(open_lines(run.flags.jsonl))
        if run.flags.ray:
            counts = _on_ray(run, lines_file)
        else:
            engine = stack.enter_context(
                open_engine(
                    run.config,
                    will_chat=True,
                    inputs=dict(run.inputs),
                    num_sequences=1 + (run.flags.batch or 0),
                )
            )
            counts = _here(run, engine, lines_file)
    if run.is_json:
        click.echo(orjson.dumps({"version": 1, **counts._asdict()}))
    return 0


def _here(run: BulkRun, engine: Engine, lines_file: BinaryIO) -> BulkCounts:
    job = run.job(engine.device_name)
    with Decider(engine, run.rules, lanes=run.flags.lanes(engine.device_name)) as decider:
        decider.check(job.questions)

        def answer(lines: Iterator[InputLine]) -> Iterator[Row]:
            return answer_lines(decider, job, lines)

        return _answer_all(run, job, lines_file, answer)


def _on_ray(run: BulkRun, lines_file: BinaryIO) -> BulkCounts:
    import_ray()  # before anything is written
    job = run.job(run.config.device)
    ray_job = RayJob(
        job=job,
        options=engine_options(
            run.config, will_chat=True, num_sequences=1 + (run.flags.batch or 0)
        ),
        lanes=run.flags.lanes(run.config.device),
        lines=run.flags.jsonl.resolve(),
        workers=run.flags.workers,
    )
    num_lines = count_lines(lines_file)

    def answer(lines: Iterator[InputLine]) -> Iterator[Row]:
        return answer_on_ray(ray_job, lines, num_lines)

    return _answer_all(run, job, lines_file, answer)


def _answer_all(
    run: BulkRun,
    job: BulkJob,
    lines_file: BinaryIO,
    answer: Callable[[Iterator[InputLine]], Iterable[Row]],
) -> BulkCounts:
    origin = origin_of(run.flags.jsonl)
    per_line, started = len(job.questions), time.perf_counter()
    num_lines = count_lines(lines_file) if lines_file.seekable() else 0
    done = BulkCounts(0, 0, 0)

    def skip(number: int, problem: InputError) -> None:
        logger.warning("%s, line %d: %s", origin, number, problem.message)

    try:
        with (
            BulkOutput(run.flags.out, job.key) as output,
            progress_bar("deciding", " decisions", run.config.progress) as bar,
        ):

            def progress(resumed: int, added: int) -> None:
                nonlocal done
                done = BulkCounts(resumed, added, 0)
                if bar is not None:
                    left = num_lines - resumed if num_lines else added + 1
                    bar(per_line * added, per_line * left)

            counts = run_bulk(
                output,
                read_lines(lines_file),
                answer,
                skip=skip if run.flags.bad_lines == "skip" else None,
                progress=progress,
            )
    except (InputError, KeyboardInterrupt) as error:
        if done.added:
            _tell(f"{_rows(done)}; the same command goes on from there", run.flags.out)
        if isinstance(error, InputError):
            raise _placed(error, origin) from None
        raise
    seconds = time.perf_counter() - started
    rate = f", {per_line * counts.added / seconds:.1f} decisions/s" if counts.added else ""
    _tell(f"{_rows(counts)}{rate}", run.flags.out)
    return counts


def _placed(error: InputError, origin: str) -> InputError:
    """An error about a line, with the file's name in front."""
    if not error.message.startswith("line "):
        return error
    return InputError(
        f"{origin}, {error.message}", hint=f"{error.hint}; or --bad-lines skip to go on without it"
    )


def _rows(counts: BulkCounts) -> str:
    parts = [f"{counts.resumed + counts.added:,} rows"]
    if counts.resumed:
        parts.append(f"{counts.resumed:,} of them from before")
    if counts.problems:
        parts.append(f"{counts.problems:,} lines without an answer")
    return ", ".join(parts)


def _tell(text: str, out: Path) -> None:
    click.echo(f"strata: {path_text(out)}: {text}", err=True)
