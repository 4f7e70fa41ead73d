"""Which request the engine works for next, and what each has come to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import Cancellation
from strata_cli.engine.decode.sampling import choose
from strata_cli.engine.engine import Engine
from strata_cli.engine.reading import is_canonical, next_token_logprobs
from strata_cli.engine.session import Session
from strata_cli.errors import Cancelled, StrataError
from strata_cli.server.engine_errors import kind_of
from strata_cli.server.protocol import (
    Beat,
    Counters,
    Done,
    Failed,
    FinishReason,
    FromWorker,
    Generate,
    ModelFacts,
    Progress,
    Ranked,
    Score,
    Scores,
    Started,
    Status,
    Timings,
    Token,
)


def model_facts(engine: Engine, scheduler: Scheduler) -> ModelFacts:
    """What the server is told of a loaded model."""
    return ModelFacts(
        name=engine.model_name,
        vocab_size=engine.spec.vocab_size,
        context_tokens=engine.context_tokens,
        model_context_tokens=engine.spec.context_tokens,
        eos_ids=tuple(sorted(engine.tokenizer.eos_ids)),
        device=engine.device_name,
        chunk_tokens=engine.chunk_tokens,
        parallel=scheduler.parallel,
    )


@dataclass(slots=True)
class Job:
    """A request and what it has come to."""

    request: Generate | Score
    cancellation: Cancellation
    submitted: float
    started: float = 0.0
    answered: float = 0.0
    reused_tokens: int = 0
    read_tokens: int = 0
    generated: list[int] = field(default_factory=list)
    logits: NDArray[np.float32] | None = None


class Scheduler:
    """Works for requests, one after the other."""

    parallel = 1

    def __init__(self, engine: Engine, send: Callable[[FromWorker], None]) -> None:
        self._engine = engine
        self._send = send
        self._session = Session(engine)
        self._jobs: deque[Job] = deque()
        self._cancellations: dict[str, Cancellation] = {}
        self._progress = 0

    @property
    def is_busy(self) -> bool:
        """Whether turn() has anything to do."""
        return bool(self._jobs)

    def submit(self, request: Generate | Score) -> None:
        """Take a request."""
        cancellation = self._cancellations.setdefault(request.request_id, Cancellation())
        self._jobs.append(Job(request, cancellation, time.perf_counter()))

    def cancel(self, request_id: str) -> None:
        """Any thread."""
        cancellation = self._cancellations.get(request_id)
        if cancellation is not None:
            cancellation.cancel()

    def cancel_all(self) -> None:
        """Any thread."""
        for cancellation in list(self._cancellations.values()):
            cancellation.cancel()

    def status(self) -> Status:
        """Any thread."""
        return Status(waiting=0, reading=0, generating=0, counters=Counters(), memory_bytes=0)

    def beat(self) -> Beat:
        """Any thread."""
        return Beat(progress=self._progress, pending_tokens=0)

    def turn(self) -> None:
        """One unit of work."""
        job = self._jobs[0]
        self._progress += 1
        try:
            job.cancellation.check()
            if self._advance(job):
                self._over(job)
        except Cancelled:
            self._done(job, "cancelled")
            self._over(job)
        except StrataError as error:
            self._send(
                Failed(
                    request_id=job.request.request_id,
                    kind=kind_of(error),
                    message=error.message,
                    hint=error.hint,
                )
            )
            self._over(job)

    def close(self) -> None:
        """Gives the memory back."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _over(self, job: Job) -> None:
        self._jobs.remove(job)
        del self._cancellations[job.request.request_id]

    def _advance(self, job: Job) -> bool:
        if isinstance(job.request, Score):
            self._score(job, job.request)
            return True
        if job.logits is None:
            self._read(job, job.request)
        return self._next(job, job.request)

    def _score(self, job: Job, request: Score) -> None:
        started, before = time.perf_counter(), self._session.read_tokens
        with self._engine.canonical():
            rows = self._session.score_suffixes(
                list(request.prefix),
                [list(suffix) for suffix in request.suffixes],
                reuse=request.reuse,
                cancellation=job.cancellation,
            )
        named = [
            next_token_logprobs(row, 0, ids)[1] for row, ids in zip(rows, request.ids, strict=True)
        ]
        self._send(
            Scores(
                request_id=request.request_id,
                rows=tuple(tuple(item.logprob for item in row) for row in named),
                prompt_tokens=sum(len(request.prefix) + len(s) for s in request.suffixes),
                read_tokens=self._session.read_tokens - before,
                timings=Timings(
                    wait_ms=(started - job.submitted) * 1e3,
                    prompt_ms=(time.perf_counter() - started) * 1e3,
                    generate_ms=0.0,
                ),
            )
        )

    def _read(self, job: Job, request: Generate) -> None:
        job.started = time.perf_counter()
        name = request.request_id

        def progress(done: int, total: int) -> None:
            self._progress += 1
            self._send(Progress(request_id=name, read_tokens=done, total_tokens=total))

        job.logits, job.reused_tokens = self._session.read(
            list(request.prompt),
            reuse=request.reuse,
            progress=progress,
            cancellation=job.cancellation,
        )
        job.read_tokens = len(request.prompt) - job.reused_tokens
        job.answered = time.perf_counter()
        self._send(Started(request_id=name, reused_tokens=job.reused_tokens))

    def _next(self, job: Job, request: Generate) -> bool:
        assert job.logits is not None
        index = len(job.generated)
        if index == request.max_tokens:
            self._done(job, "length")
            return True
        if index:
            job.logits = self._session.sequence.step(job.generated[-1])
        token_id = choose(
            job.logits,
            request.sampling,
            step=index,
            history=[*request.prompt, *job.generated] if request.sampling.has_penalties else (),
            allowed=request.allowed_ids or None,
        )
        ends = token_id in request.stop_ids or (
            token_id in self._engine.tokenizer.eos_ids and not request.ignore_eos
        )
        job.generated.append(token_id)
        self._send(self._token(job, request, token_id, ends=ends))
        if ends:
            self._done(job, "stop")
        return ends

    def _token(self, job: Job, request: Generate, token_id: int, *, ends: bool) -> Token:
        assert job.logits is not None
        named = (*request.allowed_ids, *request.named_ids)
        if not request.wants_logprobs:
            name, index = request.request_id, len(job.generated) - 1
            return Token(request_id=name, index=index, token_id=token_id, ends=ends)
        top, others = next_token_logprobs(job.logits, request.logprobs or 0, (token_id, *named))
        return Token(
            request_id=request.request_id,
            index=len(job.generated) - 1,
            token_id=token_id,
            ends=ends,
            logprob=others[0].logprob,
            top=tuple(Ranked(*item) for item in top),
            named=tuple(Ranked(*item) for item in others[1:]),
        )

    def _done(self, job: Job, reason: FinishReason) -> None:
        request, now = job.request, time.perf_counter()
        assert isinstance(request, Generate)
        self._send(
            Done(
                request_id=request.request_id,
                finish_reason=reason,
                prompt_tokens=len(request.prompt),
                reused_tokens=job.reused_tokens,
                read_tokens=job.read_tokens,
                generated_tokens=len(job.generated),
                canonical=is_canonical(
                    request.canonical, request.max_tokens, request.wants_logprobs
                ),
                timings=Timings(
                    wait_ms=((job.started or now) - job.submitted) * 1e3,
                    prompt_ms=((job.answered or now) - (job.started or now)) * 1e3,
                    generate_ms=(now - (job.answered or now)) * 1e3,
                ),
            )
        )
