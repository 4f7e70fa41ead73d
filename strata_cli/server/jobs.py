"""Requests that the worker has taken: what each is at, and what it says to the server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import Cancellation
from strata_cli.engine.decode.sampling import choose
from strata_cli.engine.engine import Engine, Part, Sequence
from strata_cli.engine.model.tokenizer import Tokenizer
from strata_cli.engine.prompt_reading import PromptReading
from strata_cli.engine.reading import ends_stuck, is_canonical, next_token_logprobs, room_hint
from strata_cli.engine.session import Session
from strata_cli.errors import InputError
from strata_cli.server.constraint import Constraint, MadeConstraint
from strata_cli.server.protocol import (
    Done,
    FinishReason,
    FromWorker,
    Generate,
    Progress,
    PromptLogprobs,
    PromptRow,
    Ranked,
    Started,
    Timings,
    Token,
)

TURN_START = "<|im_start|>"
TURN_SHARE = 4  # of a pass that is expensive: a turn as long as that is worth one of its own

Floats: TypeAlias = NDArray[np.float32]
Send: TypeAlias = Callable[[FromWorker], None]


class Stopwatch:
    """When a request came, was begun, had its prompt read, and ended."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def next(self) -> None:
        """The next of these moments is now."""
        self._times.append(time.perf_counter())

    def timings(self) -> Timings:
        """Of a request that ends now."""
        times = self._times + [time.perf_counter()] * (4 - len(self._times))
        wait, prompt, generate = ((stop - start) * 1e3 for start, stop in itertools.pairwise(times))
        return Timings(wait_ms=wait, prompt_ms=prompt, generate_ms=generate)


class Awaited(NamedTuple):
    """What a request waits for: that a job has read so much of its prompt."""

    job: Job
    position: int


class Job:
    """What requests have in common: a prompt, or a prefix, that is read into a session.

    Args:
        name: the request's id.
        ids: the prompt.
        cancellation: ends it.
        canonical: whether it is a canonical read.
        send: to the server.

    Attributes:
        name, cancellation, canonical: as given.
        session: that it has now; None while it waits.
        reading: of the prompt; None before it is begun.
        awaited: what it waits for, besides a slot.
        reuse: what is known of the prompt is not read again.
        reused_tokens: of the prompt, known from other requests.
        read_tokens: that were read for it.
    """

    wants_logits = True

    def __init__(
        self, name: str, ids: list[int], cancellation: Cancellation, send: Send, *, canonical: bool
    ) -> None:
        self.name = name
        self.ids = ids
        self.cancellation = cancellation
        self.canonical = canonical
        self.session: Session | None = None
        self.reading: PromptReading | None = None
        self.awaited: Awaited | None = None
        self.reuse = True
        self.reused_tokens = 0
        self.read_tokens = 0
        self.watch = Stopwatch()
        self._send = send

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is not read yet."""
        return self.reading is not None and not self.reading.is_over

    @property
    def live(self) -> Sequence:
        """The sequence that it is read into, once it is begun."""
        assert self.session is not None
        return self.session.sequence

    @property
    def prompt_tokens(self) -> int:
        """All that it asks to be read."""
        return len(self.ids)

    @property
    def left_tokens(self) -> int:
        """Of the prompt, still to be read."""
        return 0 if self.reading is None else self.reading.left_tokens

    @property
    def take_rows(self) -> Callable[[Floats], None] | None:
        """Takes the logits of all tokens of the prompt; None: they are not wanted."""
        return None

    def check(self, engine: Engine) -> None:
        """Refuse what cannot be answered.

        Raises:
            InputError: says what of the request is wrong.
        """
        raise NotImplementedError

    def begin(self, session: Session) -> None:
        """Have a session, which is rewound to what it knows of the prompt."""
        self.session = session
        self.reading = session.begin(self.ids, reuse=self.reuse, wants_logits=self.wants_logits)
        self.begun(self.reading.start)

    def begun(self, reused_tokens: int) -> None:
        """Tell that so many tokens of the prompt need not be read."""
        self.watch.next()
        self.reused_tokens = reused_tokens
        self._send(Started(request_id=self.name, reused_tokens=reused_tokens))

    def next_part(self, most: int) -> Part:
        """At most so many tokens of the prompt, for a pass."""
        assert self.reading is not None
        ids, wants_logits = self.reading.next(most)
        copy_end = self.reading.copy_end if wants_logits else None
        return Part(self.reading.sequence, ids, wants_logits, self.take_rows, copy_end)

    def add(self, num_tokens: int, logits: Floats | None) -> None:
        """So many tokens of the prompt were read; the logits [V] are those of its end."""
        assert self.reading is not None
        self.reading.add(logits)
        self.tell_read(num_tokens)

    def tell_read(self, num_tokens: int) -> None:
        """Tell that so many more tokens were read for it."""
        self.read_tokens += num_tokens
        total = len(self.ids) - self.reused_tokens
        self._send(Progress(request_id=self.name, read_tokens=self.read_tokens, total_tokens=total))


class GenerateJob(Job):
    """Generates behind a prompt.

    Attributes:
        request: see there.
        is_over: whether its Done is sent.
        generated: the tokens so far.
    """

    def __init__(
        self, request: Generate, cancellation: Cancellation, send: Send, made: MadeConstraint | None
    ) -> None:
        canonical = is_canonical(request.canonical, request.max_tokens, request.wants_logprobs)
        ids = list(request.prompt)
        super().__init__(request.request_id, ids, cancellation, send, canonical=canonical)
        self.request = request
        self.reuse = request.reuse and request.prompt_logprobs is None
        self.wants_logits = request.max_tokens > 0
        self.is_over = False
        self.generated: list[int] = []
        self._history = list(ids) if request.sampling.has_penalties else None
        self._made = made
        self._constraint: Constraint | None = None
        self._told = 0
        self._ends: frozenset[int] = frozenset()
        self._turn = 0  # where the prompt's last turn begins

    @property
    def is_lone_read(self) -> bool:
        """Whether its prompt's end is all that is read for it: others may share the beginning."""
        return self.request.max_tokens == 1 and self.reuse

    @property
    def take_rows(self) -> Callable[[Floats], None] | None:
        """See Job: where the prompt's own log-probabilities are wanted."""
        return None if self.request.prompt_logprobs is None else self._tell_prompt

    def check(self, engine: Engine) -> None:
        """See Job."""
        request, need = self.request, len(self.ids) + self.request.max_tokens
        engine.check(self.ids)
        for what, ids in (("allowed", request.allowed_ids), ("named", request.named_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < engine.spec.vocab_size:
                raise InputError(
                    f"the {what} token ids go from {min(ids)} to {max(ids)}, outside the "
                    f"vocabulary of {engine.spec.vocab_size}",
                    hint=f"ids go from 0 to {engine.spec.vocab_size - 1}",
                )
        if need > engine.context_tokens:
            raise InputError(
                f"{len(self.ids)} prompt tokens and {request.max_tokens} tokens to generate do not "
                f"fit the context of {engine.context_tokens} tokens",
                hint=room_hint(engine, "shorten the prompt", "ask for fewer tokens"),
            )
        self._turn = last_turn(self.ids, engine.tokenizer)
        ends = () if request.ignore_eos else engine.tokenizer.eos_ids
        self._ends = frozenset((*request.stop_ids, *ends))
        if request.constraint is not None:
            if self._made is None:
                raise InputError("answers cannot be held to a grammar here", hint="leave it out")
            self._constraint = self._made.result()

    def begin(self, session: Session) -> None:
        """See Job. Leaves a checkpoint where the last turn begins.

        The next prompt of a conversation may part from this one right behind it: templates write
        earlier turns without their thoughts, and the last one may be another.
        """
        super().begin(session)
        assert self.reading is not None
        dear = session.sequence.pass_tokens // TURN_SHARE
        least = max(session.cache.rules.least_parked_tokens, dear)
        if self.request.max_tokens > 1 and self._turn >= self.reading.start + least:
            self.reading.cut(self._turn)

    def answer_prompt(self) -> None:
        """The first token, when the prompt is read; if none is wanted, the end. Does that once."""
        if self.generated:
            return
        if self.request.max_tokens == 0:
            self.finish("length")
        else:
            assert self.reading is not None
            assert self.reading.logits is not None
            self.advance(self.reading.logits)

    def step(self) -> Part:
        """Its last token, for a pass."""
        return Part(self.live, [self.generated[-1]])

    def advance(self, logits: Floats) -> None:
        """Choose the next token from the logits [V] behind what it has; tell of it.

        Raises:
            StrataError: no token can come.
        """
        request, index = self.request, len(self.generated)
        if index == 0:
            self.watch.next()
        token_id = choose(
            logits,
            request.sampling,
            step=index,
            history=self._history or (),
            allowed=self._allowed(),
        )
        ends = token_id in self._ends
        self.generated.append(token_id)
        if self._history is not None:
            self._history.append(token_id)
        if self._constraint is not None and not ends:
            self._constraint.accept(token_id)
        self._send(self._token(logits, token_id, ends=ends))
        if ends:
            self.finish("stop")
        elif index + 1 == request.max_tokens or self._is_stuck():
            self.finish("length")

    def finish(self, reason: FinishReason) -> None:
        """Tell of the end."""
        self.is_over = True
        self._send(
            Done(
                request_id=self.name,
                finish_reason=reason,
                prompt_tokens=len(self.ids),
                reused_tokens=self.reused_tokens,
                read_tokens=self.read_tokens,
                generated_tokens=len(self.generated),
                canonical=self.canonical,
                timings=self.watch.timings(),
            )
        )

    def finish_cancelled(self) -> None:
        """Tell of an end that somebody wanted."""
        self.finish("cancelled")

    def _allowed(self) -> NDArray[np.int64] | tuple[int, ...] | None:
        allowed = self.request.allowed_ids or None
        if self._constraint is None:
            return allowed
        mask = self._constraint.mask()
        if allowed is None:
            return np.flatnonzero(mask)
        both = tuple(token_id for token_id in allowed if mask[token_id])
        if not both:
            raise InputError(
                "none of the allowed token ids fits the answer's format here",
                hint="leave out allowed_token_ids, or response_format and tools",
            )
        return both

    def _is_stuck(self) -> bool:
        return not self.request.ignore_eos and ends_stuck(self.generated)

    def _token(self, logits: Floats, token_id: int, *, ends: bool) -> Token:
        request, index = self.request, len(self.generated) - 1
        if not request.wants_logprobs:
            return Token(request_id=self.name, index=index, token_id=token_id, ends=ends)
        ids = (token_id, *request.allowed_ids, *request.named_ids)
        top, (own, *named) = next_token_logprobs(logits, request.logprobs or 0, ids)
        return Token(
            request_id=self.name,
            index=index,
            token_id=token_id,
            ends=ends,
            logprob=own.logprob,
            top=tuple(Ranked(*item) for item in top),
            named=tuple(Ranked(*item) for item in named),
        )

    def _tell_prompt(self, rows: Floats) -> None:
        """A row's logits are about the token behind it; those of the last are about none."""
        start, count = self._told + 1, self.request.prompt_logprobs or 0
        self._told += len(rows)
        told = []
        for row, token_id in zip(rows, self.ids[start:], strict=False):
            top, ((_, logprob),) = next_token_logprobs(row, count, (token_id,))
            told.append(PromptRow(token_id, logprob, tuple(Ranked(*item) for item in top)))
        if told:
            self._send(PromptLogprobs(request_id=self.name, start=start, rows=tuple(told)))


def last_turn(ids: list[int], tokenizer: Tokenizer) -> int:
    """Where a prompt's last turn begins; 0: it has none."""
    mark = tokenizer.special_ids.get(TURN_START)
    backwards = enumerate(reversed(ids), 1)
    return next((len(ids) - number for number, token_id in backwards if token_id == mark), 0)
