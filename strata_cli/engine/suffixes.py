"""Many suffixes of one prefix, read together; each told as a read of its own would have been."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.forward.loading import Progress
from strata_cli.engine.prefill.branches import plan_batches
from strata_cli.engine.reading import (
    ReadRequest,
    ReadResult,
    Timings,
    check_request,
    next_token_logprobs,
)


class SuffixRead(NamedTuple):
    """One suffix: the request that a read of its own would answer, and the answer."""

    request: ReadRequest
    result: ReadResult


class _Batch(NamedTuple):
    """Logits [V] of suffixes that were read together, and of what they took together."""

    rows: list[NDArray[np.float32]]
    seconds: float
    num_tokens: int


def read_suffixes(
    engine: Engine,
    sequence: Sequence,
    request: ReadRequest,
    suffixes: list[list[int]],
    *,
    progress: Progress | None = None,
) -> Iterator[SuffixRead]:
    """Read a prefix, then suffixes of it, batch by batch.

    A suffix's prompt_ms is the time of its batch; that of the prefix is in none of them.

    Args:
        engine: the sequence's engine.
        sequence: an empty one; it holds the prefix afterwards, unless nothing is reused.
        request: its ids are the prefix; nothing is generated. Without reuse, the prefix is read
            again in front of each suffix.
        suffixes: each at least one token.
        progress: called with (tokens read, tokens in all).

    Yields:
        The suffixes, in order.

    Raises:
        InputError: the prefix or a suffix cannot be read, or they do not fit together; or see
            check_request().
    """
    check_request(engine, request)
    prefix = request.ids
    num_prefixes = 1 if request.reuse else len(suffixes)
    done, total = 0, num_prefixes * len(prefix) + sum(map(len, suffixes))
    if request.reuse:
        with request.manner(engine):
            sequence.prefill(prefix, logits="none")
        done = len(prefix)
    most_rows = engine.chunk_tokens if request.reuse else 1
    for indices in plan_batches([len(suffix) for suffix in suffixes], most_rows):
        together = [suffixes[index] for index in indices]
        with request.manner(engine):
            batch = _read_batch(sequence, request, together)
        done += batch.num_tokens
        if progress is not None:
            progress(done, total)
        for suffix, row in zip(together, batch.rows, strict=True):
            own = replace(request, ids=prefix + suffix)
            yield SuffixRead(own, _result(own, row, batch, len(prefix) if request.reuse else 0))


def _read_batch(sequence: Sequence, request: ReadRequest, suffixes: list[list[int]]) -> _Batch:
    started = time.perf_counter()
    num_tokens = sum(map(len, suffixes))
    if request.reuse:
        rows = sequence.score(suffixes)
    else:
        (suffix,) = suffixes
        sequence.reset()
        rows = [sequence.prefill(request.ids + suffix)]
        num_tokens += len(request.ids)
    return _Batch(rows, time.perf_counter() - started, num_tokens)


def _result(
    request: ReadRequest, row: NDArray[np.float32], batch: _Batch, reused_tokens: int
) -> ReadResult:
    top, allowed = next_token_logprobs(row, request.top, request.allowed_ids)
    return ReadResult(
        logits=row,
        all_logits=None,
        top=top,
        allowed=allowed,
        generated_ids=[],
        finish_reason=None,
        state_hash=None,
        timings=Timings(
            prompt_ms=batch.seconds * 1e3,
            generate_ms=0.0,
            prompt_tokens_per_s=batch.num_tokens / batch.seconds,
            generate_tokens_per_s=0.0,
        ),
        reused_tokens=reused_tokens,
    )
