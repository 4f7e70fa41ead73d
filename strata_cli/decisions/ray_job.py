"""The same rows from a cluster: chunks of lines go to Ray Data workers, each with its own engine.

A worker reads its lines itself, so the file of states and the model's files must be there under the
same path on every machine. Rows come back in order, one chunk after the other.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from strata_cli.decisions.bulk import BulkJob, Row, answer_lines
from strata_cli.decisions.bulk_input import InputLine, read_lines
from strata_cli.decisions.decider import Decider
from strata_cli.engine.engine import Engine, EngineOptions
from strata_cli.errors import ConfigError, StrataError

LEAST_CHUNK_LINES, MOST_CHUNK_LINES = 8, 1024
WANTED_CHUNKS = 2000


class Chunk(NamedTuple):
    """Consecutive lines of a file: where the first begins, its number, and how many they are."""

    offset: int
    number: int
    num_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RayJob:
    """What workers need.

    Attributes:
        job: what is asked of every line.
        options: of each worker's engine.
        lanes: states that a worker reads side by side.
        lines: the file of states.
        workers: engines; None: one for each machine.
    """

    job: BulkJob
    options: EngineOptions
    lanes: int
    lines: Path
    workers: int | None


class Worker:
    """Answers chunks of lines with an engine of its own, opened when it is made."""

    def __init__(self, job: RayJob) -> None:
        self._job = job
        self._engine = Engine.open(job.options)
        self._decider = Decider(self._engine, job.job.rules, lanes=job.lanes)
        self._decider.check(job.job.questions)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of some chunks, pickled, in columns as Ray Data has them."""
        columns = (batch[name].tolist() for name in Chunk._fields)
        found = [pickle.dumps(self.rows(Chunk(*one))) for one in zip(*columns, strict=True)]
        return {"rows": np.array(found, dtype=object)}

    def rows(self, chunk: Chunk) -> list[Row]:
        """The rows of a chunk."""
        with open(self._job.lines, "rb") as file:
            file.seek(chunk.offset)
            lines = islice(read_lines(file, chunk.number, chunk.offset), chunk.num_lines)
            return list(answer_lines(self._decider, self._job.job, lines))

    def close(self) -> None:
        """Gives memory back. Safe to call twice."""
        self._decider.close()
        self._engine.close()


def chunks_of(lines: Iterator[InputLine], num_lines: int) -> Iterator[Chunk]:
    """Lines in chunks, so long that there are not too many and so short that few are lost.

    Args:
        lines: of a file; only where they begin is used.
        num_lines: about how many they are.
    """
    size = min(max(num_lines // WANTED_CHUNKS, LEAST_CHUNK_LINES), MOST_CHUNK_LINES)
    while some := list(islice(lines, size)):
        yield Chunk(some[0].offset, some[0].number, len(some))


def answer_on_ray(job: RayJob, lines: Iterator[InputLine], num_lines: int) -> Iterator[Row]:
    """The rows of lines, in order.

    Args:
        job: what workers need.
        lines: consecutive ones of the job's file.
        num_lines: about how many they are.

    Raises:
        ConfigError: Ray is not installed.
        StrataError: a worker failed.
    """
    ray = import_ray()
    items = [chunk._asdict() for chunk in chunks_of(lines, num_lines)]
    if not items:
        return
    is_own = not ray.is_initialized()
    if is_own:
        ray.init(log_to_driver=False, logging_level="error")
    try:
        for found in _answered(ray, job, items).iter_rows():
            yield from pickle.loads(found["rows"])
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise StrataError(
            f"a worker failed: {str(cause).strip().splitlines()[-1]}",
            hint="the file of states and the model must be there on every machine; the same "
            "command goes on from there",
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def _answered(ray: Any, job: RayJob, items: list[dict[str, int]]) -> Any:
    """The data set of pickled rows, in order; computed as it is read."""
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    workers = job.workers or len(ray.nodes())
    return ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        Worker,
        fn_constructor_args=(job,),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=1 if job.options.device.startswith("cuda") else 0,
        num_cpus=job.options.threads or 1,
    )


def import_ray() -> Any:
    """The library.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise ConfigError(
            "--ray needs the ray extra, which is not installed",
            hint="pip install 'strata-cli[ray]'",
        ) from None
    return ray
