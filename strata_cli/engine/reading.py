"""One read: a prompt's tokens in; next-token log-probabilities, and text tokens on wish, out.

Log-probabilities are the raw full-vocabulary log-softmax of the model's logits, before temperature
and any other sampling rule.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.decode.sampling import Sampler, choose
from strata_cli.engine.engine import Engine, Sequence
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.engine.forward.state import StateHash
from strata_cli.engine.kernels.head import log_softmax_row, top_k
from strata_cli.engine.prefill.chunks import Wanted
from strata_cli.engine.session import Session
from strata_cli.errors import InputError

logger = logging.getLogger(__name__)

FinishReason: TypeAlias = Literal["stop", "length"]

GREEDY = Sampler()

REPEAT_LIMIT = 256
"""A run of this many equal tokens ends the answer: the model is stuck."""


def is_canonical(deterministic: bool | None, max_tokens: int, wants_logprobs: bool) -> bool:
    """Whether a request is a canonical read.

    Args:
        deterministic: forces it on or off; None: it is one if the log-probabilities of one token
            are asked for.
        max_tokens: to generate.
        wants_logprobs: of any kind.
    """
    return max_tokens <= 1 and wants_logprobs if deterministic is None else deterministic


class TokenLogprob(NamedTuple):
    """A token id and its natural-log probability over the whole vocabulary."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """What to read and what to report.

    Attributes:
        ids: the prompt's tokens, at least one.
        top: how many of the most likely next tokens to report.
        allowed_ids: tokens reported whatever their rank, in this order.
        max_tokens: tokens to generate after the prompt.
        sampler: how they are chosen.
        all_logits: keep the logits of every prompt position.
        state_hash: fingerprint the state after the prompt and what was generated.
        deterministic: see is_canonical().
        reuse: take what is known of the prompt from earlier reads; the result is the same.
    """

    ids: list[int]
    top: int = 0
    allowed_ids: tuple[int, ...] = ()
    max_tokens: int = 0
    sampler: Sampler = GREEDY
    all_logits: bool = False
    state_hash: bool = False
    deterministic: bool | None = None
    reuse: bool = True

    @property
    def is_canonical(self) -> bool:
        """Whether this is a canonical read."""
        return is_canonical(self.deterministic, self.max_tokens, bool(self.top or self.allowed_ids))

    def manner(self, engine: Engine) -> AbstractContextManager[None]:
        """Around everything that is read for it, by one thread."""
        return engine.canonical() if self.is_canonical else engine.alone()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Milliseconds of wall time, and tokens per second that follow from them."""

    prompt_ms: float
    generate_ms: float
    prompt_tokens_per_s: float
    generate_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """What a read found.

    Attributes:
        logits: the last prompt position's, [V].
        all_logits: [prompt tokens, V] when asked for.
        top: most likely next tokens after the prompt, best first, ties to the lower id.
        allowed: one entry per allowed id, in the order asked.
        generated_ids: without the token that ended the answer.
        finish_reason: "stop" (the model ended its answer), "length", or None when nothing was
            to be generated.
        state_hash: when asked for.
        reused_tokens: of the prompt, those that an earlier read had read.
        residency: what became of the experts that steps wanted; None where all of them stay put.
    """

    logits: NDArray[np.float32]
    all_logits: NDArray[np.float32] | None
    top: list[TokenLogprob]
    allowed: list[TokenLogprob]
    generated_ids: list[int]
    finish_reason: FinishReason | None
    state_hash: StateHash | None
    timings: Timings
    reused_tokens: int = 0
    residency: ResidencyCounts | None = None


def read(
    engine: Engine,
    sequence: Sequence,
    request: ReadRequest,
    *,
    on_token: Callable[[int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancellation: Cancellation = NEVER,
) -> ReadResult:
    """Read a prompt into a sequence and answer the request.

    Args:
        engine: the sequence's engine.
        sequence: where the tokens go; advances by the prompt and what is generated.
        request: what to report.
        on_token: called with each generated token as soon as it is known.
        progress: called with (tokens read, tokens in all) while the prompt is read.
        cancellation: ends the prompt, see Sequence.prefill, or the answer before its next token.

    Raises:
        InputError: the prompt is empty, has ids outside the vocabulary, or prompt and answer do
            not fit the context; or see check_request().
        Cancelled: somebody asked for the end.
    """
    check_request(engine, request)
    _check_room(engine, sequence.position, request)
    wanted: Wanted = "all" if request.all_logits else "last"
    with request.manner(engine):
        started = time.perf_counter()
        logits = sequence.prefill(
            request.ids, logits=wanted, progress=progress, cancellation=cancellation
        )
        prompt = _Prompt(logits, 0, time.perf_counter() - started)
        return _answer(engine, sequence, request, prompt, on_token, cancellation)


def read_in(
    session: Session,
    request: ReadRequest,
    *,
    on_token: Callable[[int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancellation: Cancellation = NEVER,
) -> ReadResult:
    """Read a prompt in a session, resuming from what it knows, and answer the request.

    A request for all logits reads everything anew, in a sequence of its own.

    Raises:
        InputError, Cancelled: see read().
    """
    engine = session.engine
    if request.all_logits:
        with engine.sequence() as sequence:
            return read(
                engine,
                sequence,
                request,
                on_token=on_token,
                progress=progress,
                cancellation=cancellation,
            )
    check_request(engine, request)
    _check_room(engine, 0, request)
    with request.manner(engine):
        started = time.perf_counter()
        logits, reused = session.read(
            request.ids, reuse=request.reuse, progress=progress, cancellation=cancellation
        )
        prompt = _Prompt(logits, reused, time.perf_counter() - started)
        return _answer(engine, session.sequence, request, prompt, on_token, cancellation)


class _Prompt(NamedTuple):
    """A prompt that was read: its logits, [V] or [T, V]."""

    logits: NDArray[np.float32]
    reused_tokens: int
    seconds: float


def _answer(
    engine: Engine,
    sequence: Sequence,
    request: ReadRequest,
    prompt: _Prompt,
    on_token: Callable[[int], None] | None,
    cancellation: Cancellation,
) -> ReadResult:
    before = engine.residency_counts
    last = prompt.logits[-1] if request.all_logits else prompt.logits
    top, allowed = next_token_logprobs(last, request.top, request.allowed_ids)
    started = time.perf_counter()
    generated, finish, steps = _generate(engine, sequence, request, last, on_token, cancellation)
    generate_s = time.perf_counter() - started
    read_tokens = len(request.ids) - prompt.reused_tokens
    return ReadResult(
        logits=last,
        all_logits=prompt.logits if request.all_logits else None,
        top=top,
        allowed=allowed,
        generated_ids=generated,
        finish_reason=finish,
        state_hash=sequence.state_hash() if request.state_hash else None,
        timings=Timings(
            prompt_ms=prompt.seconds * 1e3,
            generate_ms=generate_s * 1e3,
            prompt_tokens_per_s=read_tokens / prompt.seconds,
            generate_tokens_per_s=steps / generate_s if steps else 0.0,
        ),
        reused_tokens=prompt.reused_tokens,
        residency=_difference(before, engine.residency_counts),
    )


def _difference(
    before: ResidencyCounts | None, after: ResidencyCounts | None
) -> ResidencyCounts | None:
    return None if before is None or after is None else after - before


def next_token_logprobs(
    logits: NDArray[np.float32], top: int, allowed_ids: tuple[int, ...]
) -> tuple[list[TokenLogprob], list[TokenLogprob]]:
    """The most likely tokens and the named ones.

    Args:
        logits: [V].
        top: how many of the most likely, at most V.
        allowed_ids: ids inside the vocabulary.
    """
    if not top and not allowed_ids:
        return [], []
    logprobs = log_softmax_row(logits)
    best = [int(i) for i in top_k(logprobs, min(top, logprobs.size))] if top else []
    return _name(logprobs, best), _name(logprobs, allowed_ids)


def _name(logprobs: NDArray[np.float32], ids: Iterable[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, float(logprobs[token_id])) for token_id in ids]


def check_request(engine: Engine, request: ReadRequest) -> None:
    """Refuse what no prompt could be asked.

    Raises:
        InputError: an allowed id is outside the vocabulary, or a number is negative.
    """
    engine.tokenizer.check_ids(request.allowed_ids)
    for what, number in (("top", request.top), ("max_tokens", request.max_tokens)):
        if number < 0:
            raise InputError(f"{what} must not be negative, got {number}", hint="0 asks for none")


def _check_room(engine: Engine, position: int, request: ReadRequest) -> None:
    need = position + len(request.ids) + request.max_tokens
    if need > engine.context_tokens:
        ways = ["shorten the prompt"]
        if request.max_tokens:
            ways.append("lower --max-tokens")
        before = f"{position} tokens before, " if position else ""
        raise InputError(
            f"{before}{len(request.ids)} prompt tokens and {request.max_tokens} tokens to generate "
            f"do not fit the context of {engine.context_tokens} tokens",
            hint=room_hint(engine, *ways),
        )


def room_hint(engine: Engine, *ways: str) -> str:
    """What to try where the context does not hold what is asked for.

    Args:
        engine: whose context it is; that may be made larger, up to the model's own.
        ways: what else helps, at least one.
    """
    most = engine.spec.context_tokens
    if engine.context_tokens < most:
        ways = (*ways, f"raise --max-context, to {most} at most")
    return " or ".join([", ".join(ways[:-1]), ways[-1]]) if ways[1:] else ways[0]


def _generate(
    engine: Engine,
    sequence: Sequence,
    request: ReadRequest,
    logits: NDArray[np.float32],
    on_token: Callable[[int], None] | None,
    cancellation: Cancellation,
) -> tuple[list[int], FinishReason | None, int]:
    generated: list[int] = []
    if not request.max_tokens:
        return generated, None, 0
    for index in range(request.max_tokens):
        token_id = choose(logits, request.sampler, step=index)
        if token_id in engine.tokenizer.eos_ids:
            return generated, "stop", index + 1
        generated.append(token_id)
        if on_token is not None:
            on_token(token_id)
        if index + 1 == request.max_tokens or ends_stuck(generated):
            break
        cancellation.check()
        logits = sequence.step(token_id)
    return generated, "length", len(generated)


def ends_stuck(generated: list[int]) -> bool:
    """Whether an answer is so many equal tokens at its end that no other will come; logs that."""
    tail = generated[-REPEAT_LIMIT:]
    is_stuck = len(tail) == REPEAT_LIMIT and len(set(tail)) == 1
    if is_stuck:
        logger.warning(
            "an answer was ended after %d tokens: its last %d are one and the same",
            len(generated),
            REPEAT_LIMIT,
        )
    return is_stuck
