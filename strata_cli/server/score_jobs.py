"""Requests that read many ends of one beginning: scores, and questions that are read together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from strata_cli.engine.cancelling import Cancellation
from strata_cli.engine.engine import Engine
from strata_cli.engine.reading import next_token_logprobs
from strata_cli.errors import InputError
from strata_cli.server.jobs import Floats, GenerateJob, Job, Send
from strata_cli.server.protocol import Done, Score, Scores


class Answer(NamedTuple):
    """What answers a request for one token: the logits [V] behind its prompt."""

    job: GenerateJob
    logits: Floats


class ScoreJob(Job):
    """Reads a prefix, then suffixes of it, batch by batch.

    Attributes:
        request: see there.
    """

    wants_logits = False

    def __init__(self, request: Score, cancellation: Cancellation, send: Send) -> None:
        canonical = request.canonical is not False
        ids = list(request.prefix)
        super().__init__(request.request_id, ids, cancellation, send, canonical=canonical)
        self.request = request
        self.reuse = request.reuse
        self._rows: list[tuple[float, ...]] = []

    @property
    def is_over(self) -> bool:
        """Whether all suffixes are read."""
        return len(self._rows) == len(self.request.suffixes)

    @property
    def prompt_tokens(self) -> int:
        """See Job: the prefix counts once."""
        return len(self.ids) + sum(map(len, self.request.suffixes))

    def check(self, engine: Engine) -> None:
        """See Job."""
        request, vocab_size = self.request, engine.spec.vocab_size
        if self.ids:
            engine.check(self.ids)
        if len(request.ids) != len(request.suffixes):
            raise InputError(
                f"{len(request.suffixes)} suffixes come with the ids of {len(request.ids)}",
                hint="give a list of ids for each suffix",
            )
        for number, (suffix, ids) in enumerate(zip(request.suffixes, request.ids, strict=True), 1):
            try:
                engine.check(list(suffix), len(self.ids))
            except InputError as error:
                raise InputError(f"suffix {number}: {error.message}", hint=error.hint) from None
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                raise InputError(
                    f"suffix {number}: its token ids go from {min(ids)} to {max(ids)}, outside "
                    f"the vocabulary of {vocab_size}",
                    hint=f"ids go from 0 to {vocab_size - 1}",
                )

    def next_ends(self, most_tokens: int) -> list[list[int]]:
        """See SharedReads."""
        rest = self.request.suffixes[len(self._rows) :]
        return first_ends([list(suffix) for suffix in rest], most_tokens)

    def take(self, rows: Sequence[Floats]) -> list[Answer]:
        """See SharedReads; the answer is not given before all suffixes are read."""
        start = len(self._rows)
        for index, row in enumerate(rows, start):
            _, named = next_token_logprobs(row, 0, self.request.ids[index])
            self._rows.append(tuple(item.logprob for item in named))
            self.read_tokens += len(self.request.suffixes[index])
        return []

    def finish(self) -> None:
        """Tell the scores."""
        suffixes = self.request.suffixes
        self._send(
            Scores(
                request_id=self.name,
                rows=tuple(self._rows),
                prompt_tokens=len(self.ids) * len(suffixes) + sum(map(len, suffixes)),
                read_tokens=self.read_tokens,
                timings=self.watch.timings(),
            )
        )

    def finish_cancelled(self) -> None:
        """Tell of an end that somebody wanted."""
        self._send(
            Done(
                request_id=self.name,
                finish_reason="cancelled",
                prompt_tokens=len(self.ids),
                reused_tokens=self.reused_tokens,
                read_tokens=self.read_tokens,
                generated_tokens=0,
                canonical=self.canonical,
                timings=self.watch.timings(),
            )
        )


class SharedReads(Job):
    """Requests for one token whose prompts begin alike: that is read once, their ends together.

    Args:
        members: the requests.
        shared_tokens: that all begin with; at least one is left of each.

    Attributes:
        members: those that have no answer yet.
    """

    wants_logits = False

    def __init__(self, members: Sequence[GenerateJob], shared_tokens: int, send: Send) -> None:
        first = members[0]
        ids, mine = first.ids[:shared_tokens], Cancellation()
        super().__init__(first.name, ids, mine, send, canonical=first.canonical)
        self.members = list(members)

    @property
    def is_over(self) -> bool:
        """Whether every request has its answer."""
        return not self.members

    def begun(self, reused_tokens: int) -> None:
        """See Job. Only the first member reads what all begin with."""
        for index, member in enumerate(self.members):
            member.begun(len(self.ids) if index else reused_tokens)

    def tell_read(self, num_tokens: int) -> None:
        """See Job."""
        if self.members:
            self.members[0].tell_read(num_tokens)

    def next_ends(self, most_tokens: int) -> list[list[int]]:
        """The next ends to read, behind what all begin with: as many as so many tokens are."""
        ends = [member.ids[len(self.ids) :] for member in self.members]
        return first_ends(ends, most_tokens)

    def take(self, rows: Sequence[Floats]) -> list[Answer]:
        """The logits [V] behind the next ends; what they answer. Its jobs are members no more."""
        now, self.members = self.members[: len(rows)], self.members[len(rows) :]
        for member in now:
            member.tell_read(len(member.ids) - len(self.ids))
        return [Answer(*pair) for pair in zip(now, rows, strict=True)]


def first_ends(ends: Sequence[list[int]], most_tokens: int) -> list[list[int]]:
    """The first of some ends that are together no more than so many tokens."""
    sums = accumulate(len(end) for end in ends)
    return list(ends[: sum(total <= most_tokens for total in sums)])


AnyJob: TypeAlias = GenerateJob | ScoreJob
SlotJob: TypeAlias = AnyJob | SharedReads
