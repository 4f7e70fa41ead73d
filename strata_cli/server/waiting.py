"""Requests that wait for a batch slot: who gets which one next, and who had better wait on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from strata_cli.engine.engine import Engine
from strata_cli.engine.model.prefixes import common_tokens
from strata_cli.engine.session import Session
from strata_cli.server.jobs import Awaited, GenerateJob, Send
from strata_cli.server.score_jobs import AnyJob, SharedReads, SlotJob
from strata_cli.server.sharing import (
    LEAST_ADOPTED,
    SlotUse,
    choose_slot,
    find_company,
    is_worth_sharing,
)


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


class Place(NamedTuple):
    """A slot for a job, and another slot that knows more of its prompt, which is copied."""

    job: SlotJob
    slot: Slot
    donor: Slot | None


class WaitingLine:
    """Requests that wait, first come first, and the slots that they get.

    Args:
        slots: of the scheduler.
        engine: reads.
        send: to the server.

    Attributes:
        jobs: that wait.
    """

    def __init__(self, slots: Sequence[Slot], engine: Engine, send: Send) -> None:
        self.jobs: deque[AnyJob] = deque()
        self._slots = slots
        self._engine = engine
        self._send = send
        self._begun = 0

    def add(self, job: AnyJob) -> None:
        """Put one at the end of the line."""
        self.jobs.append(job)
        self._awaits(job, known_tokens=0)

    def remove(self, job: AnyJob) -> None:
        """Take one out, if it is there."""
        if job in self.jobs:
            self.jobs.remove(job)

    def next_place(self) -> Place | None:
        """Give an idle slot to the first job that need not wait for what is just being read.

        A lone read takes those along whose prompts begin alike.

        Returns:
            Where it goes; None: there is no such job, or no idle slot.
        """
        idle = [slot for slot in self._slots if slot.job is None]
        for job in list(self.jobs) if idle else []:
            if self._is_awaited(job):
                continue
            with manner_of(self._engine, [job]):
                uses = [self._use(slot, job) for slot in idle]
            if not self._awaits(job, len(job.ids) - min(use.read_tokens for use in uses)):
                best = choose_slot(uses)
                return self._take(job, idle[best], uses[best])
        return None

    def _take(self, job: AnyJob, slot: Slot, use: SlotUse) -> Place:
        self.jobs.remove(job)
        slot.job = self._with_company(job) if use.read_tokens else job
        self._begun += 1
        slot.used_at = self._begun
        donor = None if use.adopts_from is None else self._slots[use.adopts_from]
        return Place(slot.job, slot, donor)

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
            other for other in self.jobs if _is_lone(other) and other.canonical == job.canonical
        ]
        most_rows = self._engine.chunk_tokens
        company = find_company(job.ids, [other.ids for other in others], most_rows)
        if not company.others:
            return job
        members = [job, *(others[number] for number in company.others)]
        for member in members[1:]:
            self.jobs.remove(member)
        return SharedReads(members, company.shared_tokens, self._send)


def manner_of(engine: Engine, jobs: Sequence[SlotJob]) -> AbstractContextManager[None]:
    """Around what is read for some jobs: canonical for all if it is for one."""
    return engine.canonical() if any(job.canonical for job in jobs) else nullcontext()


def _is_lone(job: AnyJob) -> TypeGuard[GenerateJob]:
    return isinstance(job, GenerateJob) and job.is_lone_read
