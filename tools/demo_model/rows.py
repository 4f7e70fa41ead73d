"""Packs encoded texts into training rows of a fixed length, and rows into batches.

Every document starts at a multiple of ALIGN tokens, so that an index block never holds tokens of
two documents; the gap behind a document is filled with end-of-text and counts nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tools.demo_model.encode import Answer, Encoded

ALIGN = 16
MAX_OPTIONS = 26
END_ID = 0
MIN_CUT = 48  # tokens of a window that are worth filling
POOL = 8  # texts that a packer chooses from


@dataclass(slots=True)
class Row:
    """One training row of T tokens.

    ids u16 [T]; position in its document u16 [T]; weight f16 [T] of each token as a target;
    answers with `at` and `option_ends` counted in the row.
    """

    ids: NDArray[np.uint16]
    positions: NDArray[np.uint16]
    weights: NDArray[np.float16]
    answers: list[Answer] = field(default_factory=list)


def empty_row(length: int) -> Row:
    """Return a row of end-of-text tokens that count nothing."""
    return Row(
        np.full(length, END_ID, np.uint16),
        (np.arange(length) % ALIGN).astype(np.uint16),
        np.zeros(length, np.float16),
    )


def place(row: Row, start: int, text: Encoded) -> int:
    """Write a text into a row at `start`; returns where the next may start."""
    count = len(text.ids)
    stop = -(-(start + count) // ALIGN) * ALIGN
    row.ids[start : start + count] = text.ids
    row.positions[start:stop] = np.arange(stop - start)
    row.weights[start : start + count] = text.weights
    row.weights[start] = 0  # nothing precedes it
    for answer in text.answers:
        row.answers.append(shift(answer, start))
    return stop


def shift(answer: Answer, by: int) -> Answer:
    """Move an answer's token numbers by `by`."""
    ends = [end + by for end in answer.option_ends]
    return Answer(answer.at + by, answer.labels, answer.right, ends, answer.certain, answer.kind)


def cut(text: Encoded, count: int) -> tuple[Encoded, Encoded]:
    """Cut running text (without answers) after `count` tokens."""
    assert not text.answers, "only running text may be cut"
    head = Encoded(text.ids[:count], text.weights[:count])
    return head, Encoded(text.ids[count:], text.weights[count:])


class Packer:
    """Packs a stream of texts into rows of one window length.

    A row of `length` tokens is made of windows of `window` tokens each, which no document
    crosses. Holds a few texts, so that one that fits the rest of a window can be chosen.
    """

    def __init__(self, texts: Iterator[Encoded], length: int, window: int) -> None:
        self.texts, self.length, self.window = texts, length, window
        self.waiting: list[Encoded] = []

    def row(self) -> Row:
        """Fill and return one row."""
        row = empty_row(self.length)
        for start in range(0, self.length, self.window):
            self.fill(row, start, start + self.window)
        return row

    def last_row(self) -> Row | None:
        """Fill and return one row of a stream that ends; None when nothing is left."""
        row = self.row()
        return row if row.weights.any() or row.answers else None

    def fill(self, row: Row, at: int, stop: int) -> None:
        """Fill one window of a row."""
        while stop - at >= MIN_CUT:
            text = self.choose(stop - at)
            if text is None:
                return
            at = place(row, at, text)

    def choose(self, room: int) -> Encoded | None:
        """Take the first waiting text that fits, or the start of one that may be cut."""
        while len(self.waiting) < POOL:
            text = next(self.texts, None)
            if text is None:
                break
            if len(text.ids) <= self.window or not text.answers:
                self.waiting.append(text)
        for number, text in enumerate(self.waiting):
            if len(text.ids) <= room:
                return self.waiting.pop(number)
            if not text.answers:
                head, self.waiting[number] = cut(text, room)
                return head
        return None


@dataclass(slots=True)
class Batch:
    """Rows as arrays, answers padded to a fixed number.

    ids, positions i32 and weights f32 [B, T]. Of Q answers: `row` and `at` [Q], `labels`
    [Q, 26] token ids, `counts` [Q] options, `right` [Q] label number, `ends` [Q, 26] (-1: none),
    `smooth` [Q] (whether the label is uncertain), `valid` [Q]. `kinds` names each answer's family.
    """

    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    weights: NDArray[np.float32]
    row: NDArray[np.int64]
    at: NDArray[np.int64]
    labels: NDArray[np.int64]
    counts: NDArray[np.int64]
    right: NDArray[np.int64]
    ends: NDArray[np.int64]
    smooth: NDArray[np.float32]
    valid: NDArray[np.float32]
    kinds: list[str]


def collate(rows: Sequence[Row], max_answers: int) -> Batch:
    """Stack rows into a batch; answers beyond `max_answers` are dropped."""
    found = [(number, answer) for number, row in enumerate(rows) for answer in row.answers]
    found = found[:max_answers]
    batch = Batch(
        np.stack([row.ids for row in rows]).astype(np.int32),
        np.stack([row.positions for row in rows]).astype(np.int32),
        np.stack([row.weights for row in rows]).astype(np.float32),
        np.zeros(max_answers, np.int64),
        np.ones(max_answers, np.int64),
        np.zeros((max_answers, MAX_OPTIONS), np.int64),
        np.ones(max_answers, np.int64),
        np.zeros(max_answers, np.int64),
        np.full((max_answers, MAX_OPTIONS), -1, np.int64),
        np.zeros(max_answers, np.float32),
        np.zeros(max_answers, np.float32),
        [answer.kind for _, answer in found],
    )
    for number, (row, answer) in enumerate(found):
        batch.row[number], batch.at[number] = row, answer.at
        batch.labels[number, : len(answer.labels)] = answer.labels
        batch.counts[number] = len(answer.labels)
        batch.right[number] = answer.right
        batch.ends[number, : len(answer.option_ends)] = answer.option_ends
        batch.smooth[number] = not answer.certain
        batch.valid[number] = 1
    return batch
