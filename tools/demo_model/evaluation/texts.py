"""Bits per byte of held-out running text, by source and by position in the context."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine
from strata_cli.engine.kernels.head import log_softmax_row
from tools.demo_model.evaluation.reading import Progress
from tools.demo_model.feed import sourced_texts
from tools.demo_model.prompt import END_OF_TEXT
from tools.demo_model.tables import Tables

WINDOW = 1024  # tokens of one read; longer documents are read as several
LONG = 2048  # tokens of a long read, the whole context
BOUNDS = (0, 256, 512, 1024, 1536, 2048)  # positions between which long reads are summed up


@dataclass(slots=True)
class Account:
    """Bits spent on bytes of text."""

    bits: float = 0.0
    num_bytes: int = 0

    def add(self, bits: float, num_bytes: int) -> None:
        """Count more text."""
        self.bits += bits
        self.num_bytes += num_bytes

    def rate(self) -> float:
        """Return bits per byte."""
        return round(self.bits / max(1, self.num_bytes), 4)


def read_bits(engine: Engine, ids: list[int]) -> NDArray[np.float64]:
    """Return the bits that each token but the first costs after those before it, [T - 1]."""
    with engine.sequence() as sequence:
        logits = sequence.prefill(ids[:-1], logits="all")
    costs = [
        -float(log_softmax_row(row)[token]) for row, token in zip(logits, ids[1:], strict=True)
    ]
    return np.array(costs) / math.log(2)


def byte_counts(engine: Engine, ids: Sequence[int]) -> NDArray[np.int64]:
    """Return the bytes of text that each token stands for; special tokens stand for none."""
    special = set(engine.tokenizer.special_ids.values())
    sizes = [0 if token in special else len(engine.tokenizer.token_bytes(token)) for token in ids]
    return np.array(sizes, dtype=np.int64)


def windows(engine: Engine, text: str, size: int) -> Iterator[list[int]]:
    """Yield a text's tokens, end of text included, in windows of `size` tokens."""
    ids = engine.tokenizer.encode(text + END_OF_TEXT, parse_special=True)
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def source_sizes(tables: Tables) -> dict[str, int]:
    """Return every source's bytes of running text."""
    sizes: dict[str, int] = defaultdict(int)
    for source, text in sourced_texts(tables, 0, 1, Random(0), endless=False):
        sizes[source] += len(text.encode())
    return dict(sizes)


def measure_texts(
    engine: Engine, test: Tables, trained: Mapping[str, int], source_bytes: int, progress: Progress
) -> dict[str, Any]:
    """Read some `source_bytes` of held-out text of every source.

    A window's first token is not counted: nothing precedes it. The mean over the sources is
    weighted by `trained`, their bytes of training text: what a byte of such a mixture costs.
    """
    accounts: dict[str, Account] = defaultdict(Account)
    tokens = 0
    for source, text in sourced_texts(test, 0, 1, Random(0), endless=False):
        account = accounts[source]
        for ids in windows(engine, text, WINDOW):
            if len(ids) > 1 and account.num_bytes < source_bytes:
                bits = read_bits(engine, ids)
                account.add(float(bits.sum()), int(byte_counts(engine, ids[1:]).sum()))
                tokens += len(bits)
                progress(len(ids))
    total = sum(trained[source] for source in accounts)
    mean = sum(trained[name] * account.rate() for name, account in accounts.items()) / total
    return {
        "tokens": tokens,
        "bits_per_byte": round(mean, 4),
        "by_source": {
            name: {
                "trained_bytes": trained[name],
                "bytes": account.num_bytes,
                "bits_per_byte": account.rate(),
            }
            for name, account in sorted(accounts.items())
        },
    }


def measure_positions(
    engine: Engine, tables: Tables, documents: int, progress: Progress
) -> dict[str, Any]:
    """Read documents that fill the context; the same texts lie behind all bounds' figures."""
    accounts = [Account() for _ in BOUNDS[1:]]
    found = 0
    for _, text in sourced_texts(tables, 0, 1, Random(1), endless=False):
        ids = next(windows(engine, text, LONG))
        if len(ids) < LONG or found == documents:
            continue
        bits, sizes = read_bits(engine, ids), byte_counts(engine, ids[1:])
        for account, start, stop in zip(accounts, BOUNDS[:-1], BOUNDS[1:], strict=True):
            account.add(float(bits[start:stop].sum()), int(sizes[start:stop].sum()))
        found += 1
        progress(len(ids))
    spans = [f"{start}-{stop}" for start, stop in pairwise(BOUNDS)]
    return {
        "documents": found,
        "bits_per_byte": {s: a.rate() for s, a in zip(spans, accounts, strict=True)},
    }
