"""Requests that read many ends of one beginning: scores, and questions that are read together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from strata_cli.engine.cancelling import Cancellation
from strata_cli.engine.engine import Engine
from strata_cli.engine.prefill.branches import plan_batches
from strata_cli.engine.reading import next_token_logprobs
from strata_cli.errors import InputError
from strata_cli.server.jobs import Floats, GenerateJob, Job, Send
from strata_cli.server.protocol import Done, Score, Scores


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
        self._batches: Iterator[range] = iter(())
        self._rows: list[tuple[float, ...]] = []

    @property
    def is_over(self) -> bool:
        """Whether all suffixes are read."""
        return len(self._rows) == len(self.request.suffixes)

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
        lengths = [len(suffix) for suffix in request.suffixes]
        self._batches = plan_batches(lengths, engine.chunk_tokens)

    def advance(self) -> None:
        """Read the next suffixes in one pass.

        Raises:
            Cancelled: the request was stopped.
        """
        assert self.session is not None
        batch = next(self._batches)
        suffixes = [list(self.request.suffixes[index]) for index in batch]
        rows = self.session.sequence.score(suffixes, cancellation=self.cancellation)
        for index, row in zip(batch, rows, strict=True):
            _, named = next_token_logprobs(row, 0, self.request.ids[index])
            self._rows.append(tuple(item.logprob for item in named))
        self.read_tokens += sum(map(len, suffixes))

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
        most_rows: no end of a prompt is longer.

    Attributes:
        members: those that have no answer yet.
    """

    wants_logits = False

    def __init__(
        self, members: Sequence[GenerateJob], shared_tokens: int, most_rows: int, send: Send
    ) -> None:
        first = members[0]
        ids, mine = first.ids[:shared_tokens], Cancellation()
        super().__init__(first.name, ids, mine, send, canonical=first.canonical)
        self.members = list(members)
        self._most_rows = most_rows

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

    def advance(self) -> list[tuple[GenerateJob, Floats]]:
        """Read the ends of some prompts in one pass; their requests, which leave, and logits."""
        assert self.session is not None
        ends = [member.ids[len(self.ids) :] for member in self.members]
        batch = next(plan_batches([len(end) for end in ends], self._most_rows))
        rows = self.session.sequence.score(ends[: len(batch)])
        now, self.members = self.members[: len(batch)], self.members[len(batch) :]
        for member, end in zip(now, ends, strict=False):
            member.tell_read(len(end))
        return list(zip(now, rows, strict=True))


AnyJob: TypeAlias = GenerateJob | ScoreJob
SlotJob: TypeAlias = AnyJob | SharedReads
