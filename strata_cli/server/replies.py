"""Bodies of answers, as OpenAI publishes them; what is ours alone stands under "strata"."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from strata_cli.server.answers import Counts
from strata_cli.server.logprobs import ChatLogprobs, CompletionLogprobs


class PromptDetails(Struct, frozen=True):
    """Of the prompt's tokens, those that were known from earlier prompts."""

    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """Of the answer's tokens, those of its thought."""

    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Timings(Struct, frozen=True, kw_only=True):
    """Tokens reused, read and generated; milliseconds of reading and generating."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float


class StrataFacts(Struct, frozen=True, kw_only=True):
    """How an answer was made.

    Attributes:
        canonical: every bit of it depends on model, prompt and build alone.
        seed: of the first choice's sampler; the others count up from it.
    """

    canonical: bool
    seed: int


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One choice of a completion, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(Struct, frozen=True, kw_only=True):
    """Answer of /v1/completions; of a stream, one chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    strata: StrataFacts | UnsetType = UNSET


class CalledFunction(Struct, frozen=True, kw_only=True):
    """A function's name, and its arguments as JSON text."""

    name: str
    arguments: str


class CallReply(Struct, frozen=True, kw_only=True):
    """A call of a function; its index is there in streams."""

    index: int | UnsetType = UNSET
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatAnswer(Struct, frozen=True, kw_only=True):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallReply] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One choice of a chat."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Chat(Struct, frozen=True, kw_only=True):
    """Answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    strata: StrataFacts | UnsetType = UNSET


class Delta(Struct, frozen=True, kw_only=True):
    """More of the assistant's turn."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallReply] | UnsetType = UNSET


class DeltaChoice(Struct, frozen=True, kw_only=True):
    """A piece of one choice of a chat."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One chunk of a chat's stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[DeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    strata: StrataFacts | UnsetType = UNSET


def usage_of(counts: Counts) -> Usage:
    """Tokens as OpenAI counts them."""
    return Usage(
        prompt_tokens=counts.prompt_tokens,
        completion_tokens=counts.generated_tokens,
        total_tokens=counts.prompt_tokens + counts.generated_tokens,
        prompt_tokens_details=PromptDetails(counts.reused_tokens),
        completion_tokens_details=CompletionDetails(counts.reasoning_tokens),
    )


def timings_of(counts: Counts) -> Timings:
    """How long it took."""
    return Timings(
        cache_n=counts.reused_tokens,
        prompt_n=counts.prompt_tokens - counts.reused_tokens,
        prompt_ms=round(counts.prompt_ms, 3),
        predicted_n=counts.generated_tokens,
        predicted_ms=round(counts.generate_ms, 3),
    )
