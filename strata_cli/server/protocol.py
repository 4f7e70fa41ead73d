"""What server and engine worker say to each other; framing.py makes bytes of it.

The server opens with Open, the worker answers with Hello when its model is loaded, or with Refused;
each names the version it speaks. Everything about a request carries the request's id, which is
never used twice: what comes late about a request that is over can be told by it, and dropped.

Log-probabilities are those of the whole vocabulary, the log-softmax of the model's logits before
temperature, penalties and masks; a float32 value each, here as a double.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import msgspec

from strata_cli.config import StrataConfig
from strata_cli.engine.decode.sampling import Sampler
from strata_cli.engine.experts.residency_counts import ResidencyCounts
from strata_cli.errors import StrataError

PROTOCOL_VERSION = 1

GREEDY = Sampler()

FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
FailureKind: TypeAlias = Literal["setting", "input", "model", "out_of_memory", "device", "internal"]


class ProtocolError(StrataError):
    """Bytes that are no message, or a message that cannot come here."""


class Ranked(NamedTuple):
    """A token id and its natural-log probability over the whole vocabulary."""

    token_id: int
    logprob: float


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages."""


class Open(Message, frozen=True, kw_only=True):
    """The server's first message.

    Attributes:
        version: of the protocol.
        config: everything that shapes the engine.
        flags: settings that were given as flags: those without effect are refused.
    """

    version: int = PROTOCOL_VERSION
    config: StrataConfig
    flags: tuple[str, ...] = ()


class Generate(Message, frozen=True, kw_only=True):
    """Read a prompt and generate behind it.

    Attributes:
        request_id: a name for the request, for logs; the server's side makes it unique.
        prompt: at least one token.
        max_tokens: to generate; 0 only reads.
        sampling: how tokens are chosen, seed included.
        stop_ids: tokens that end the answer besides the model's own.
        ignore_eos: the model's own end tokens end nothing.
        logprobs: report each generated token's log-probability and the so many likeliest tokens'.
        prompt_logprobs: the same for the prompt's tokens, which then are all read anew.
        allowed_ids: the only tokens that can come, reported whatever their rank; empty: all can.
        named_ids: tokens reported whatever their rank.
        canonical: forces a canonical read on or off; None: it is one if one token's
            log-probabilities are asked for.
        reuse: take what is known of the prompt from earlier ones; the result is the same.
        constraint: a grammar that the answer follows, as server/grammar.py writes it; None: none.
    """

    request_id: str = ""
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampler = GREEDY
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_ids: tuple[int, ...] = ()
    named_ids: tuple[int, ...] = ()
    canonical: bool | None = None
    reuse: bool = True
    constraint: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether any log-probability behind the prompt is reported."""
        return self.logprobs is not None or bool(self.allowed_ids or self.named_ids)


class Score(Message, frozen=True, kw_only=True):
    """Read a prefix once, and each suffix as if it alone came behind it.

    Attributes:
        request_id: see Generate.
        prefix: may be empty.
        suffixes: each at least one token.
        ids: for each suffix the tokens whose log-probabilities are wanted behind it.
        canonical: see Generate; None is true.
        reuse: see Generate.
    """

    request_id: str = ""
    prefix: tuple[int, ...]
    suffixes: tuple[tuple[int, ...], ...]
    ids: tuple[tuple[int, ...], ...]
    canonical: bool | None = None
    reuse: bool = True


class Stop(Message, frozen=True, kw_only=True):
    """Cancel a request, which is then Done at once; ignored when it is over."""

    request_id: str


class StatusRequest(Message, frozen=True, kw_only=True):
    """Asks for a Status."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Cancel everything and end the process."""


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is loaded.

    Attributes:
        name: the model's.
        vocab_size: ids go up to it.
        context_tokens: prompt and answer together, at most.
        model_context_tokens: what the model could hold.
        eos_ids: tokens that end an answer.
        device: "host" or "cuda:N".
        chunk_tokens: prompt tokens read in one pass, at most.
        parallel: requests that are worked on at once.
        placement: what lies where, in words.
    """

    name: str
    vocab_size: int
    context_tokens: int
    model_context_tokens: int
    eos_ids: tuple[int, ...]
    device: str
    chunk_tokens: int
    parallel: int
    placement: str = ""


class Hello(Message, frozen=True, kw_only=True):
    """The model is loaded; the worker takes requests."""

    version: int = PROTOCOL_VERSION
    facts: ModelFacts


class Refused(Message, frozen=True, kw_only=True):
    """The worker cannot start, or cannot go on, and ends."""

    version: int = PROTOCOL_VERSION
    kind: FailureKind
    message: str
    hint: str


class Loading(Message, frozen=True, kw_only=True):
    """How far loading is.

    Attributes:
        phase: "weights" counts bytes, "kernels" compiled kernels; "notice" says something in words.
        done, total: in units of the phase.
        text: the notice.
    """

    phase: Literal["weights", "kernels", "notice"]
    done: int = 0
    total: int = 0
    text: str = ""


class Started(Message, frozen=True, kw_only=True):
    """A request's prompt is begun: this much of it is known from earlier ones."""

    request_id: str
    reused_tokens: int


class Progress(Message, frozen=True, kw_only=True):
    """Prompt tokens read so far, of those to read; what was reused is in neither."""

    request_id: str
    read_tokens: int
    total_tokens: int


class PromptRow(NamedTuple):
    """A prompt's token, and the likeliest tokens of its position, best first."""

    token_id: int
    logprob: float
    top: tuple[Ranked, ...]


class PromptLogprobs(Message, frozen=True, kw_only=True):
    """What the prompt's own tokens were worth, in pieces.

    Attributes:
        request_id: whose.
        start: position of the first row; position 0 has no row, so the first piece begins at 1.
        rows: one for each position.
    """

    request_id: str
    start: int
    rows: tuple[PromptRow, ...]


class Token(Message, frozen=True, kw_only=True):
    """A generated token.

    Attributes:
        request_id: whose.
        index: of the token in the answer, from 0.
        token_id: the token.
        ends: it is the end of the answer, no part of its text.
        logprob: its own; None when none were asked for.
        top: the likeliest tokens of its position, best first.
        named: the allowed tokens, then the named ones, in the order asked.
    """

    request_id: str
    index: int
    token_id: int
    ends: bool = False
    logprob: float | None = None
    top: tuple[Ranked, ...] = ()
    named: tuple[Ranked, ...] = ()


class Timings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds of wall time: until the prompt was begun, until it was read, until the end."""

    wait_ms: float
    prompt_ms: float
    generate_ms: float


class Done(Message, frozen=True, kw_only=True):
    """A request is over.

    Attributes:
        request_id: which.
        finish_reason: "stop": an end token came; "length": the limit was reached, or the model
            repeated one token without end; "cancelled": somebody stopped it.
        prompt_tokens: of the prompt.
        reused_tokens: of those, known from earlier prompts.
        read_tokens: of those, read.
        generated_tokens: messages Token that came, the end token's included.
        canonical: whether it was a canonical read.
        timings: see Timings.
    """

    request_id: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    generated_tokens: int
    canonical: bool
    timings: Timings


class Scores(Message, frozen=True, kw_only=True):
    """The answer to Score: for each suffix the log-probability of each id asked for.

    Attributes:
        request_id: which.
        rows: as the ids were asked.
        prompt_tokens: of prefix and suffix, summed over the suffixes.
        read_tokens: of those, read; the others were shared or reused.
        timings: generate_ms is 0.
    """

    request_id: str
    rows: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    read_tokens: int
    timings: Timings


class Failed(Message, frozen=True, kw_only=True):
    """A request failed; the worker goes on."""

    request_id: str
    kind: FailureKind
    message: str
    hint: str


class Counters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Totals since the worker started.

    Attributes:
        requests: that came; those of requests_failed and requests_cancelled among them.
        canonical_reads: requests that were canonical reads.
        prompt_tokens: of requests that are over; reused_tokens and read_tokens are parts of them.
        generated_tokens: of requests that are over.
        passes: of the engine, of any kind.
        steps: passes of generated tokens alone; step_rows counts these tokens in all passes.
        prompt_ms, step_ms: time of passes with pieces of prompts, and of steps alone.
        experts: that steps were routed to; None where all experts stay put.
    """

    requests: int = 0
    requests_failed: int = 0
    requests_cancelled: int = 0
    canonical_reads: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    read_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    steps: int = 0
    step_rows: int = 0
    prompt_ms: float = 0.0
    step_ms: float = 0.0
    experts: ResidencyCounts | None = None


class Status(Message, frozen=True, kw_only=True):
    """What the worker does now.

    Attributes:
        waiting, reading, generating: requests in each state.
        counters: totals.
        memory_bytes: resident memory of the worker.
    """

    waiting: int
    reading: int
    generating: int
    counters: Counters
    memory_bytes: int


class Beat(Message, frozen=True, kw_only=True):
    """Sent every second while there is work.

    Attributes:
        progress: grows whenever the engine gets anything done; when it stands still, so does the
            engine.
        pending_tokens: of the pass that runs now: a long one may take its time.
    """

    progress: int
    pending_tokens: int


ToWorker: TypeAlias = Open | Generate | Score | Stop | StatusRequest | Shutdown
FromWorker: TypeAlias = (
    Hello
    | Refused
    | Loading
    | Started
    | Progress
    | PromptLogprobs
    | Token
    | Done
    | Scores
    | Failed
    | Status
    | Beat
)
RequestEvent: TypeAlias = Started | Progress | PromptLogprobs | Token | Done | Scores | Failed
