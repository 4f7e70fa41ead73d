"""Makes training batches in worker processes, so that the accelerator never waits for text.

Start it before anything touches the accelerator: the workers are forked.
"""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from queue import Empty, Full
from random import Random
from typing import Any

from tokenizers import Tokenizer

from tools.demo_model.encode import Encoded, encode_chat, encode_example, encode_text
from tools.demo_model.evalset import evaluation_sets
from tools.demo_model.rows import MIN_CUT, Batch, Packer, collate, empty_row
from tools.demo_model.tables import Tables, load_tables
from tools.demo_model.tasks.chats import draw_chat
from tools.demo_model.tasks.mixture import draw_example
from tools.demo_model.wordnet import dictionary_lines

HELD_OUT_TEXTS = 600  # documents that measure bits per byte at the end of training
FORK = multiprocessing.get_context("fork")  # workers share the tables instead of loading them
PACKAGES_TOGETHER, SENSES_TOGETHER = 4, 30  # records that make one document of running text


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedPlan:
    """How a batch is composed, in rows; the first `short` rows are cut into two windows.

    Of the short and of the long rows the same shares are decisions, chats and running text.
    """

    length: int = 2048
    short: int = 24
    long: int = 8
    decisions: float = 0.46
    chats: float = 0.12
    max_answers: int = 512
    workers: int = 14
    depth: int = 48  # batches that may wait

    def kinds(self, rows: int) -> list[str]:
        """Return what each of `rows` rows holds."""
        decisions, chats = round(rows * self.decisions), round(rows * self.chats)
        rest = rows - decisions - chats
        return ["decisions"] * decisions + ["chats"] * chats + ["texts"] * rest


def running_texts(tables: Tables, share: int, shares: int, rng: Random) -> Iterator[str]:
    """Yield documents, descriptions and dictionary pages for ever, a new order every pass.

    Worker `share` of `shares` reads its own part, so that a pass sees every text once.
    """
    for _, text in sourced_texts(tables, share, shares, rng):
        yield text


def sourced_texts(
    tables: Tables, share: int, shares: int, rng: Random, *, endless: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield running texts with the names of their sources; without `endless`, one pass of them."""
    packages, senses = tables.packages, tables.synsets
    items: list[tuple[str, int]] = [("document", at) for at in range(len(tables.documents))]
    items += [("debian", at) for at in range(0, len(packages), PACKAGES_TOGETHER)]
    items += [("wordnet", at) for at in range(0, len(senses), SENSES_TOGETHER)]
    items = items[share::shares]
    while True:
        rng.shuffle(items)
        for kind, at in items:
            if kind == "document":
                yield tables.documents[at].source, tables.documents[at].text()
            elif kind == "debian":
                some = packages[at : at + PACKAGES_TOGETHER]
                yield kind, "\n\n".join("\n".join([p.synopsis, *p.paragraphs]) for p in some)
            else:
                yield kind, "\n".join(dictionary_lines(senses[at : at + SENSES_TOGETHER]))
        if not endless:
            return


class BatchMaker:
    """Composes batches for one worker; `progress` (0..1) steers the mixture."""

    def __init__(self, plan: FeedPlan, tables: Tables, tokenizer: Tokenizer, worker: int) -> None:
        self.plan, self.tables, self.tokenizer = plan, tables, tokenizer
        self.rng = Random(1000 + worker)
        self.progress = 0.0
        texts = running_texts(tables, worker, plan.workers, self.rng)
        streams = {
            "decisions": self.decisions(),
            "chats": self.chats(),
            "texts": (encode_text(tokenizer, text) for text in texts),
        }
        self.packers = {
            (kind, window): Packer(stream, plan.length, window)
            for kind, stream in streams.items()
            for window in (plan.length // 2, plan.length)
        }

    def decisions(self) -> Iterator[Encoded]:
        """Yield encoded decision prompts for ever."""
        while True:
            yield encode_example(self.tokenizer, draw_example(self.tables, self.rng, self.progress))

    def chats(self) -> Iterator[Encoded]:
        """Yield encoded conversations for ever."""
        while True:
            yield encode_chat(self.tokenizer, draw_chat(self.tables, self.rng))

    def batch(self) -> Batch:
        """Compose the next batch."""
        plan = self.plan
        rows = [self.packers[kind, plan.length // 2].row() for kind in plan.kinds(plan.short)]
        rows += [self.packers[kind, plan.length].row() for kind in plan.kinds(plan.long)]
        return collate(rows, plan.max_answers)


def work(maker: BatchMaker, progress: "Synchronized[float]", queue: Any, stop: Any) -> None:
    """Fill the queue until `stop` is set."""
    queue.cancel_join_thread()  # what nobody took must not keep this process alive
    while not stop.is_set():
        maker.progress = progress.value
        batch = maker.batch()
        while not stop.is_set():
            try:
                queue.put(batch, timeout=1.0)
                break
            except Full:
                continue


def feed(
    folder: Path, plan: FeedPlan, progress: "Synchronized[float]", queue: Any, stop: Any
) -> None:
    """Load the tables once and fork the workers, which share them."""
    (tables,) = load_tables(folder, "train")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    workers = []
    for number in range(plan.workers):
        maker = BatchMaker(plan, tables, tokenizer, number)
        workers.append(FORK.Process(target=work, args=(maker, progress, queue, stop), daemon=True))
        workers[-1].start()
    for worker in workers:
        worker.join()


class Feed:
    """The running feeder: `next()` gives batches, `progress.value` steers what they hold."""

    def __init__(self, folder: Path, plan: FeedPlan) -> None:
        self.progress: Synchronized[float] = FORK.Value("d", 0.0)
        self.queue: Any = FORK.Queue(plan.depth)
        self.stop: Any = FORK.Event()
        args = (folder, plan, self.progress, self.queue, self.stop)
        self.process = FORK.Process(target=feed, args=args)
        self.process.start()

    def next(self, wait_s: float = 120.0) -> Batch:
        """Return the next batch.

        Raises:
            RuntimeError: the feeder died, or nothing came in time.
        """
        try:
            batch: Batch = self.queue.get(timeout=wait_s)
        except Empty:
            state = "alive" if self.process.is_alive() else f"ended, {self.process.exitcode}"
            raise RuntimeError(f"no batch within {wait_s:.0f} s; feeder {state}") from None
        return batch

    def close(self) -> None:
        """End the feeder and its workers. Safe to call twice."""
        self.stop.set()
        self.process.join(timeout=10)
        self.queue.cancel_join_thread()
        self.queue.close()


@dataclass(slots=True)
class EvaluationBatches:
    """Batches of the evaluation prompts and of held-out text, made by a process of their own."""

    process: Any
    queue: Any

    def take(self, wait_s: float = 60.0) -> tuple[list[Batch], list[Batch], float]:
        """Return prompt batches, text batches, and the bytes per counted token of the text."""
        result: tuple[list[Batch], list[Batch], float] = self.queue.get(timeout=wait_s)
        self.process.join()
        return result


def start_evaluation_batches(folder: Path, plan: FeedPlan, limit: int) -> EvaluationBatches:
    """Start making the evaluation batches; `limit` caps the prompts of a set (0: all)."""
    queue: Any = FORK.Queue()
    args = (folder, plan, limit, queue)
    process = FORK.Process(target=make_evaluation_batches, args=args, daemon=True)
    process.start()
    return EvaluationBatches(process, queue)


def make_evaluation_batches(folder: Path, plan: FeedPlan, limit: int, queue: Any) -> None:
    """Pack the evaluation prompts, and one pass of the held-out text, into batches."""
    (tables,) = load_tables(folder, "test")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    sets = evaluation_sets(tables)
    prompts = [example for found in sets.values() for example in found[: limit or None]]
    encoded = [encode_example(tokenizer, example) for example in prompts]
    texts = list(islice(running_texts(tables, 0, 1, Random(0)), limit or HELD_OUT_TEXTS))
    encoded_texts = [encode_text(tokenizer, text) for text in texts]
    tokens = sum(len(text.ids) for text in encoded_texts)
    per_token = sum(len(text.encode()) for text in texts) / tokens
    queue.put((pack_all(encoded, plan), pack_all(encoded_texts, plan), per_token))


def pack_all(texts: list[Encoded], plan: FeedPlan) -> list[Batch]:
    """Pack every text into batches of the training shape; the last one is filled up empty."""
    remaining = iter(texts)
    packer = Packer(remaining, plan.length, plan.length // 2)
    rows = []
    while (row := packer.last_row()) is not None:
        rows.append(row)
    size = plan.short + plan.long
    rows += [empty_row(plan.length) for _ in range(-len(rows) % size)]
    # A window holds at most one prompt per MIN_CUT tokens: no answer is dropped.
    most = size * plan.length // MIN_CUT
    return [collate(rows[at : at + size], most) for at in range(0, len(rows), size)]
