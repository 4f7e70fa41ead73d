"""Which requests the engine works for next: prompts and answers in turn, all that can together.

A pass takes a piece of every prompt that is being read, and one step of every answer. Requests for
one token whose prompts begin alike share a slot: what they have in common is read once. Others
whose prompts begin alike wait until one has read that, and copy it. Every row of a pass has the
bits that it would have alone, so who shares what with whom changes no answer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Self, TypeGuard

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.conversations import ConversationCache
from strata_cli.engine.engine import Engine, Part
from strata_cli.engine.prompt_cache import CacheRules, common_tokens
from strata_cli.engine.session import Session
from strata_cli.errors import Cancelled, DeviceError, OutOfMemory, StallError, StrataError
from strata_cli.server.constraint import MakeConstraint
from strata_cli.server.engine_errors import kind_of, out_of_host_memory
from strata_cli.server.jobs import (
    AnyJob,
    Awaited,
    Floats,
    GenerateJob,
    ScoreJob,
    Send,
    SharedReads,
    SlotJob,
)
from strata_cli.server.protocol import Beat, Failed, Generate, Score, Status
from strata_cli.server.sharing import (
    LEAST_ADOPTED,
    DecodeTurns,
    SlotUse,
    choose_slot,
    find_company,
    is_worth_sharing,
    share_rows,
)
from strata_cli.server.tally import Tally, resident_bytes


@dataclass(slots=True, eq=False)
class Slot:
    """A batch slot: room for one request at a time.

    Attributes:
        session: what it has read, and is kept for requests to come.
        job: that it works for now; None: it is idle.
        used_at: the number of requests that had begun when it was last used.
    """

    session: Session
    job: SlotJob | None = None
    used_at: int = 0


class Scheduler:
    """Works for requests, as many at once as there are slots; the others wait, first come first.

    Owned by the engine's thread, but for what says otherwise.

    Args:
        engine: reads.
        send: to the server.
        parallel: slots.
        rules: what each slot keeps of what it has read; conversations that made room are kept for
            all slots together.
        make_constraint: makes constraints of answers; None: there are none.

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
        make_constraint: MakeConstraint | None = None,
    ) -> None:
        self.parallel = parallel
        self._engine = engine
        self._send = send
        self._make_constraint = make_constraint
        self._waiting: deque[AnyJob] = deque()
        self._cancellations: dict[str, Cancellation] = {}
        self._turns = DecodeTurns()
        self._tally = Tally()
        self._begun = 0
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

    @property
    def is_busy(self) -> bool:
        """Whether turn() has anything to do. Any thread may ask."""
        return bool(self._waiting) or any(slot.job is not None for slot in self._slots)

    def expect(self, request_id: str) -> None:
        """Before submit(): from now on the request can be cancelled. Any thread."""
        self._cancellations[request_id] = Cancellation()

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
        jobs = [slot.job for slot in self._slots if slot.job is not None]
        generating = sum(isinstance(job, GenerateJob) and not job.is_reading for job in jobs)
        return Status(
            waiting=len(self._waiting),
            reading=sum(len(_members(job)) for job in jobs) - generating,
            generating=generating,
            counters=self._tally.counters(self._engine.residency_counts),
            memory_bytes=resident_bytes(),
        )

    def beat(self) -> Beat:
        """Whether it goes on. Any thread."""
        return Beat(progress=self._tally.passes, pending_tokens=self._pending_tokens)

    def submit(self, request: Generate | Score) -> None:
        """Take a request; what it cannot do is told to the server at once."""
        cancellation = self._cancellations.setdefault(request.request_id, Cancellation())
        self._tally.requests += 1
        job = self._job(request, cancellation)
        with self._answering(job):
            job.check(self._engine)
            self._waiting.append(job)
            self._awaits(job, known_tokens=0)

    def turn(self) -> None:
        """One pass of the engine, at most.

        Raises:
            DeviceError: the engine cannot go on; the requests of the pass were told.
            StallError: likewise.
        """
        self._drop_cancelled()
        self._admit()
        jobs = [slot.job for slot in self._slots if slot.job is not None]
        reading = [job for job in jobs if job.is_reading]
        scoring = [job for job in jobs if not isinstance(job, GenerateJob) and not job.is_reading]
        generating = [job for job in jobs if isinstance(job, GenerateJob) and not job.is_reading]
        if not generating:
            self._turns.forget()
        if generating and (self._turns.is_due or not (reading or scoring)):
            self._step(generating)
        elif scoring and (self._scores_are_next or not reading):
            self._scores_are_next = False
            self._score(scoring[0])
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

    def _job(self, request: Generate | Score, cancellation: Cancellation) -> AnyJob:
        if isinstance(request, Generate):
            return GenerateJob(request, cancellation, self._send, self._make_constraint)
        return ScoreJob(request, cancellation, self._send)

    def _drop_cancelled(self) -> None:
        at_work = [slot.job for slot in self._slots if slot.job is not None]
        for job in [*self._waiting, *chain.from_iterable(map(_members, at_work))]:
            if job.cancellation.is_cancelled:
                self._cancelled(job)

    def _admit(self) -> None:
        """Give idle slots to those that wait, unless what they need is just being read."""
        for job in list(self._waiting):
            idle = [slot for slot in self._slots if slot.job is None]
            if not idle:
                return
            if job not in self._waiting or self._is_awaited(job):  # or it keeps one company
                continue
            with self._manner([job]):
                uses = [self._use(slot, job) for slot in idle]
            if not self._awaits(job, len(job.ids) - min(use.read_tokens for use in uses)):
                self._waiting.remove(job)
                best = choose_slot(uses)
                self._begin(job, idle[best], uses[best])

    def _is_awaited(self, job: AnyJob) -> bool:
        """Whether what a job waits for is still being read."""
        wait = job.awaited
        if wait is None or all(slot.job is not wait.job for slot in self._slots):
            return False
        reading = wait.job.reading
        assert reading is not None
        return not reading.is_over and (_is_lone(job) or reading.position < wait.position)

    def _awaits(self, job: AnyJob, known_tokens: int) -> bool:
        """Whether a slot at work will soon know much more of a job's prompt, which waits for it.

        That slot leaves a checkpoint where the prompts part.
        """
        for slot in self._slots:
            other = slot.job
            if not job.reuse or other is None or other.reading is None or not other.is_reading:
                continue
            if job.canonical and not other.canonical:  # which may leave what is not exact
                continue
            is_same = other.ids == job.ids and other.wants_logits
            common = common_tokens(other.ids, job.ids)
            common = common if is_same else min(common, len(job.ids) - 1)
            is_worth = is_worth_sharing(common - known_tokens, job.ids)
            if is_worth and other.reading.cut(common):
                job.awaited = Awaited(other, common)
                if self._is_awaited(job):
                    return True
        return False

    def _begin(self, job: AnyJob, slot: Slot, use: SlotUse) -> None:
        with self._manner([job]):
            chosen = self._with_company(job) if use.read_tokens else job
            slot.job = chosen
            self._begun += 1
            slot.used_at = self._begun
            with self._answering(chosen):
                if use.adopts_from is not None:
                    donor = self._slots[use.adopts_from].session
                    slot.session.adopt(donor, job.ids, wants_logits=job.wants_logits)
                chosen.begin(slot.session)
                self._go_on(chosen)

    def _use(self, slot: Slot, job: AnyJob) -> SlotUse:
        session, ids, wants = slot.session, job.ids, job.wants_logits
        known, adopts_from = 0, None
        if job.reuse:
            known = session.known_tokens(ids, wants_logits=wants)
            for number, other in enumerate(self._slots):
                kept = 0 if other is slot else other.session.kept_tokens(ids, wants_logits=wants)
                if kept >= known + LEAST_ADOPTED:
                    known, adopts_from = kept, number
        live = session.sequence.cached_ids
        lost = len(live) - common_tokens(live, ids)
        return SlotUse(len(ids) - known, lost, self._begun - slot.used_at, adopts_from)

    def _with_company(self, job: AnyJob) -> SlotJob:
        """A lone read and those that wait and begin alike; others stay alone."""
        if not _is_lone(job):
            return job
        others = [
            other for other in self._waiting if _is_lone(other) and other.canonical == job.canonical
        ]
        most_rows = self._engine.chunk_tokens
        company = find_company(job.ids, [other.ids for other in others], most_rows)
        if not company.others:
            return job
        members = [job, *(others[number] for number in company.others)]
        for member in members[1:]:
            self._waiting.remove(member)
        return SharedReads(members, company.shared_tokens, most_rows, self._send)

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

    def _score(self, job: ScoreJob | SharedReads) -> None:
        started, answers = time.perf_counter(), list[tuple[GenerateJob, Floats]]()
        with self._working([job], self._engine.chunk_tokens), self._manner([job]):
            if isinstance(job, SharedReads):
                answers = job.advance()
            else:
                job.advance()
            self._go_on(job)
        for member, row in answers:
            with self._answering(member):
                member.advance(row)
                self._go_on(member)
        seconds = time.perf_counter() - started
        self._tally.prompt_ms += seconds * 1e3
        self._turns.prompts_took(seconds)

    def _pass(self, jobs: Sequence[SlotJob], parts: Sequence[Part]) -> list[Floats | None]:
        """The logits of each part; none if the pass failed, which its jobs were told then."""
        # In the middle of a pass only its one job may end it: others would lose their places.
        cancellation = jobs[0].cancellation if len(jobs) == 1 else NEVER
        rows: list[Floats | None] = []
        with self._working(jobs, sum(len(part.ids) for part in parts)), self._manner(jobs):
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

    def _manner(self, jobs: Sequence[SlotJob]) -> AbstractContextManager[None]:
        """A pass is canonical for all if it is for one."""
        is_canonical = any(job.canonical for job in jobs)
        return self._engine.canonical() if is_canonical else nullcontext()

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
        if not isinstance(job, SharedReads) and job in self._waiting:
            self._waiting.remove(job)
        for slot in self._slots:
            if isinstance(slot.job, SharedReads) and job in slot.job.members:
                slot.job.members.remove(job)
            if slot.job is job or (isinstance(slot.job, SharedReads) and slot.job.is_over):
                slot.job = None
        if not isinstance(job, SharedReads):
            self._cancellations.pop(job.name, None)


def _is_lone(job: AnyJob) -> TypeGuard[GenerateJob]:
    return isinstance(job, GenerateJob) and job.is_lone_read


def _members(job: SlotJob) -> list[AnyJob]:
    """The requests that a job is for."""
    return list(job.members) if isinstance(job, SharedReads) else [job]


def _is_fatal(error: StrataError) -> bool:
    """Whether a device that failed so cannot be used any more."""
    return isinstance(error, DeviceError | StallError) and not isinstance(error, OutOfMemory)
