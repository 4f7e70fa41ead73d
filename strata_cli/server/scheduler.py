"""Which requests the engine works for next: prompts and answers in turn, all that can together.

A pass takes a piece of every prompt that is being read, and one step of every answer. Requests for
one token whose prompts begin alike share a slot: what they have in common is read once. Others
whose prompts begin alike wait until one has read that, and copy it. Every row of a pass has the
bits that it would have alone, so who shares what with whom changes no answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Self, TypeAlias

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.conversations import ConversationCache
from strata_cli.engine.engine import Engine, Part
from strata_cli.engine.prompt_cache import CacheRules
from strata_cli.engine.session import Session
from strata_cli.errors import Cancelled, DeviceError, OutOfMemory, StallError, StrataError
from strata_cli.server.constraint import MadeConstraint
from strata_cli.server.engine_errors import kind_of, out_of_host_memory
from strata_cli.server.jobs import Floats, GenerateJob, Send
from strata_cli.server.protocol import Beat, Failed, Generate, Score, Status
from strata_cli.server.score_jobs import AnyJob, ScoreJob, SharedReads, SlotJob
from strata_cli.server.sharing import DecodeTurns, share_rows
from strata_cli.server.tally import Tally, resident_bytes
from strata_cli.server.waiting import Place, Slot, WaitingLine, manner_of

Group: TypeAlias = tuple[ScoreJob | SharedReads, list[list[int]]]


class Scheduler:
    """Works for requests, as many at once as there are slots; the others wait, first come first.

    Owned by the engine's thread, but for what says otherwise.

    Args:
        engine: reads.
        send: to the server.
        parallel: slots.
        rules: what each slot keeps of what it has read; conversations that made room are kept for
            all slots together.

    Attributes:
        parallel: as given.

    Raises:
        OutOfMemory: the slots do not fit.
    """

    def __init__(
        self,
        engine: Engine,
        send: Send,
        *,
        parallel: int = 1,
        rules: CacheRules | None = None,
    ) -> None:
        self.parallel = parallel
        self._engine = engine
        self._send = send
        self._cancellations: dict[str, Cancellation] = {}
        self._turns = DecodeTurns()
        self._tally = Tally()
        self._pending_tokens = 0
        self._scores_are_next = False
        rules = rules or CacheRules()
        conversations = ConversationCache(rules.conversation_cache_mib << 20)
        with ExitStack() as resources:
            self._slots = [
                Slot(resources.enter_context(Session(engine, rules, conversations=conversations)))
                for _ in range(parallel)
            ]
            self._resources = resources.pop_all()
        self._line = WaitingLine(self._slots, engine, send)

    @property
    def is_busy(self) -> bool:
        """Whether turn() has anything to do. Any thread may ask."""
        return bool(self._line.jobs) or any(slot.job is not None for slot in self._slots)

    def expect(self, request_id: str) -> None:
        """Before submit(): from now on the request can be cancelled. Any thread."""
        self._cancellations[request_id] = Cancellation()

    def is_cancelled(self, request_id: str) -> bool:
        """Whether nobody waits for a request that was expected. Any thread."""
        cancellation = self._cancellations.get(request_id)
        return cancellation is not None and cancellation.is_cancelled

    def cancel(self, request_id: str) -> None:
        """End a request as soon as possible, if it is not over. Any thread."""
        cancellation = self._cancellations.get(request_id)
        if cancellation is not None:
            cancellation.cancel()

    def cancel_all(self) -> None:
        """End all requests. Any thread."""
        for cancellation in list(self._cancellations.values()):
            cancellation.cancel()

    def status(self) -> Status:
        """What is going on. Any thread."""
        jobs = self._at_work()
        generating = sum(isinstance(job, GenerateJob) and not job.is_reading for job in jobs)
        at_work = sum(len(_members(job)) for job in jobs)
        return Status(
            waiting=max(0, len(self._cancellations) - at_work),
            reading=at_work - generating,
            generating=generating,
            counters=self._tally.counters(self._engine.residency_counts),
            memory_bytes=resident_bytes(),
        )

    def beat(self) -> Beat:
        """Whether it goes on. Any thread."""
        return Beat(progress=self._tally.passes, pending_tokens=self._pending_tokens)

    def submit(self, request: Generate | Score, made: MadeConstraint | None = None) -> None:
        """Take a request; what it cannot do is told to the server at once.

        Args:
            request: to be answered.
            made: the constraint that it names, which is done; None: answers cannot be held to any.
        """
        cancellation = self._cancellations.setdefault(request.request_id, Cancellation())
        self._tally.requests += 1
        job = self._job(request, cancellation, made)
        with self._answering(job):
            job.check(self._engine)
            self._line.add(job)

    def turn(self) -> None:
        """One pass of the engine, at most.

        Raises:
            DeviceError: the engine cannot go on; the requests of the pass were told.
            StallError: likewise.
        """
        self._drop_cancelled()
        while (place := self._line.next_place()) is not None:
            self._begin(place)
        jobs = self._at_work()
        reading = [job for job in jobs if job.is_reading]
        scoring = [job for job in jobs if not isinstance(job, GenerateJob) and not job.is_reading]
        generating = [job for job in jobs if isinstance(job, GenerateJob) and not job.is_reading]
        if not generating:
            self._turns.forget()
        if generating and (self._turns.is_due or not (reading or scoring)):
            self._step(generating)
        elif scoring and (self._scores_are_next or not reading):
            self._scores_are_next = False
            self._score(scoring)
        elif reading:
            self._scores_are_next = True
            self._read(reading, generating)

    def close(self) -> None:
        """Give the slots' memory back. Safe to call twice."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _job(
        self, request: Generate | Score, cancellation: Cancellation, made: MadeConstraint | None
    ) -> AnyJob:
        if isinstance(request, Generate):
            return GenerateJob(request, cancellation, self._send, made)
        return ScoreJob(request, cancellation, self._send)

    def _at_work(self) -> list[SlotJob]:
        # Another thread may ask: the job that is seen is the one that is taken.
        return [job for slot in self._slots if (job := slot.job) is not None]

    def _drop_cancelled(self) -> None:
        for job in [*self._line.jobs, *chain.from_iterable(map(_members, self._at_work()))]:
            if job.cancellation.is_cancelled:
                self._cancelled(job)

    def _begin(self, place: Place) -> None:
        job, slot, donor = place
        with manner_of(self._engine, [job]), self._answering(job):
            if donor is not None:
                slot.session.adopt(donor.session, job.ids, wants_logits=job.wants_logits)
            job.begin(slot.session)
            self._go_on(job)

    def _read(self, reading: Sequence[SlotJob], generating: Sequence[GenerateJob]) -> None:
        """A piece of every prompt, and a step of every answer unless they leave too few rows."""
        most = self._engine.chunk_tokens
        beside = list(generating) if 2 * len(generating) <= most else []
        shares = share_rows([job.left_tokens for job in reading], most - len(beside))
        chosen = [(job, share) for job, share in zip(reading, shares, strict=True) if share]
        now = [job for job, _ in chosen]
        parts = [job.next_part(share) for job, share in chosen]
        started = time.perf_counter()
        rows = self._pass([*now, *beside], [*parts, *(job.step() for job in beside)])
        seconds = time.perf_counter() - started
        self._tally.prompt_ms += seconds * 1e3
        if generating:
            self._turns.prompts_took(seconds)
        for job, part, row in zip(now, parts, rows, strict=False):
            with self._answering(job):
                job.add(len(part.ids), row)
                self._go_on(job)
        self._advance(beside, rows[len(now) :])

    def _step(self, generating: Sequence[GenerateJob]) -> None:
        started = time.perf_counter()
        rows = self._pass(generating, [job.step() for job in generating])
        seconds = time.perf_counter() - started
        self._turns.steps_took(seconds)
        self._tally.steps += 1
        self._tally.step_ms += seconds * 1e3
        self._advance(generating, rows)

    def _score(self, scoring: Sequence[ScoreJob | SharedReads]) -> None:
        """The next ends of some beginnings, as many as a pass has rows."""
        started = time.perf_counter()
        groups = self._next_ends(scoring)
        jobs = [job for job, _ in groups]
        lone = jobs[0].cancellation if len(jobs) == 1 else NEVER  # see _pass
        rows: list[list[Floats]] = []
        with self._working(jobs, self._engine.chunk_tokens), manner_of(self._engine, jobs):
            rows = self._engine.score_together(
                [(job.live, ends) for job, ends in groups], cancellation=lone
            )
        for job, logits in zip(jobs, rows, strict=False):
            with self._answering(job):
                answers = job.take(logits)
                self._go_on(job)
            for answer in answers:
                with self._answering(answer.job):
                    answer.job.advance(answer.logits)
                    self._go_on(answer.job)
        seconds = time.perf_counter() - started
        self._tally.prompt_ms += seconds * 1e3
        self._turns.prompts_took(seconds)

    def _next_ends(self, scoring: Sequence[ScoreJob | SharedReads]) -> list[Group]:
        left, first = self._engine.chunk_tokens, scoring[0]
        if not first.next_ends(left):  # one that is longer than any pass is read by itself
            return [(first, first.next_ends(self._engine.context_tokens)[:1])]
        groups: list[Group] = []
        for job in scoring:
            ends = job.next_ends(left)
            left -= sum(map(len, ends))
            groups += [(job, ends)] if ends else []
        return groups

    def _pass(self, jobs: Sequence[SlotJob], parts: Sequence[Part]) -> list[Floats | None]:
        """The logits of each part; none if the pass failed, which its jobs were told then."""
        # In the middle of a pass only its one job may end it: others would lose their places.
        cancellation = jobs[0].cancellation if len(jobs) == 1 else NEVER
        rows: list[Floats | None] = []
        with (
            self._working(jobs, sum(len(part.ids) for part in parts)),
            manner_of(self._engine, jobs),
        ):
            rows = self._engine.read_together(parts, cancellation=cancellation)
        return rows

    def _advance(self, generating: Sequence[GenerateJob], rows: Sequence[Floats | None]) -> None:
        self._tally.step_rows += len(rows)
        for job, row in zip(generating, rows, strict=False):
            with self._answering(job):
                assert row is not None
                job.advance(row)
                self._go_on(job)

    def _go_on(self, job: SlotJob) -> None:
        """What follows at once from where a job is."""
        if job.is_reading:
            return
        if isinstance(job, GenerateJob):
            job.answer_prompt()
        elif isinstance(job, ScoreJob) and job.is_over:
            job.finish()
        if job.is_over:
            if not isinstance(job, SharedReads):
                self._tally.add(job)
            self._forget(job)

    @contextmanager
    def _working(self, jobs: Sequence[SlotJob], num_tokens: int) -> Iterator[None]:
        """Around a pass: when it fails, all its jobs fail."""
        self._pending_tokens = num_tokens
        try:
            yield
        except Cancelled:
            (job,) = jobs
            assert not isinstance(job, SharedReads)
            self._cancelled(job)
        except StrataError as error:
            for job in jobs:
                self._failed(job, error)
            if _is_fatal(error):
                raise
        except MemoryError:
            for job in jobs:
                self._failed(job, out_of_host_memory(f"in a pass over {num_tokens} tokens"))
        finally:
            self._pending_tokens = 0
            self._tally.passes += 1

    @contextmanager
    def _answering(self, job: SlotJob) -> Iterator[None]:
        """Around what concerns one job alone."""
        try:
            yield
        except StrataError as error:
            self._failed(job, error)
            if _is_fatal(error):
                raise
        except MemoryError:
            self._failed(job, out_of_host_memory("behind a pass"))

    def _cancelled(self, job: AnyJob) -> None:
        self._tally.requests_cancelled += 1
        self._tally.add(job)
        job.finish_cancelled()
        self._forget(job)

    def _failed(self, job: SlotJob, error: StrataError) -> None:
        kind, message, hint = kind_of(error), error.message, error.hint
        for member in _members(job):
            self._tally.requests_failed += 1
            self._send(Failed(request_id=member.name, kind=kind, message=message, hint=hint))
            self._forget(member)

    def _forget(self, job: SlotJob) -> None:
        """A job is over; its slot keeps what it has read, and is idle when nobody shares it."""
        if not isinstance(job, SharedReads):
            self._line.remove(job)
        for slot in self._slots:
            if isinstance(slot.job, SharedReads) and job in slot.job.members:
                slot.job.members.remove(job)
            if slot.job is job or (isinstance(slot.job, SharedReads) and slot.job.is_over):
                slot.job = None
        if not isinstance(job, SharedReads):
            self._cancellations.pop(job.name, None)


def _members(job: SlotJob) -> list[AnyJob]:
    """The requests that a job is for."""
    return list(job.members) if isinstance(job, SharedReads) else [job]


def _is_fatal(error: StrataError) -> bool:
    """Whether a device that failed so cannot be used any more."""
    return isinstance(error, DeviceError | StallError) and not isinstance(error, OutOfMemory)
