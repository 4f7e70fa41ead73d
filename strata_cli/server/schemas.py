"""What requests may contain: the fields, their types and bounds, and what is done with others.

A field is served, refused with 400, or ignored; `docs/serve.md` lists which, and an answer names
ignored ones in a header. Bodies are checked here; the published OpenAPI document is made from the
same classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from strata_cli.server.failures import bad_request

MOST_LOGPROBS = 256
MOST_NAMED = 4096
MOST_STOPS = 16
LONGEST_STOP = 256
MOST_CHOICES = 64

Probability: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Temperature: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TopK: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds: TypeAlias = Annotated[list[TokenId], Meta(max_length=MOST_NAMED)]
Logprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
NumChoices: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_CHOICES)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
Stops: TypeAlias = Annotated[list[StopText], Meta(max_length=MOST_STOPS)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
RepetitionPenalty: TypeAlias = Annotated[float, Meta(ge=0.01, le=100)]
MaxTokens: TypeAlias = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
ReserveMib: TypeAlias = Annotated[int, Meta(ge=0, le=2**30)]
Json: TypeAlias = dict[str, Any]
ChatMessage: TypeAlias = Annotated[
    Json,
    Meta(
        description="A turn; what else it has is handed to the model's chat template.",
        extra_json_schema={
            "required": ["role"],
            "properties": {
                "role": {"type": "string", "minLength": 1, "maxLength": 64},
                "content": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "null"},
                        {
                            "type": "array",
                            "items": {
                                "type": "object",
                                "required": ["type", "text"],
                                "properties": {
                                    "type": {"enum": ["text", "input_text", "output_text"]},
                                    "text": {"type": "string"},
                                },
                            },
                        },
                    ]
                },
            },
        },
    ),
]

S = TypeVar("S", bound=Struct)


class StreamOptions(Struct, frozen=True, kw_only=True):
    """What a stream says besides text."""

    include_usage: bool | None = None


class Request(Struct, frozen=True, kw_only=True):
    """Fields that both kinds of completion take."""

    model: str | None = None
    n: NumChoices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    penalty_last_n: TopK | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    logprob_token_ids: TokenIds | None = None
    return_tokens_as_token_ids: bool | None = None
    strata_deterministic: Any = None


class CompletionRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: NumChoices | None = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Json | None = None
    response_format: Json | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /tokenize: a prompt, or messages that the chat template makes one of."""

    NEEDED: ClassVar[str] = "prompt or messages"

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: Json | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]


class UnloadRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/unload."""

    model: str | None = None


class LoadRequest(UnloadRequest, frozen=True, kw_only=True):
    """Body of POST /v1/load."""

    vram_reserve_mib: ReserveMib | None = None


class Refusal(NamedTuple):
    """A field that would change the answer, and is not there: refusing beats pretending.

    Attributes:
        advice: what to do instead.
        neutral: values that ask for nothing, with which the field may be sent, as it may with null.
    """

    advice: str
    neutral: tuple[Any, ...] = ()


_LEAVE_OUT = "leave it out"
_FORMAT = "give response_format to /v1/chat/completions"

REFUSED: Mapping[str, Refusal] = {
    "logit_bias": Refusal("give allowed_token_ids to restrict the answer", ({},)),
    "suffix": Refusal("only text in front of the answer is read", ("",)),
    "functions": Refusal("give tools", ([],)),
    "function_call": Refusal("give tool_choice", ("none", "auto")),
    "modalities": Refusal("text is the only output", (["text"],)),
    "audio": Refusal("text is the only output"),
    "prediction": Refusal(_LEAVE_OUT),
    "web_search_options": Refusal("the server does not search"),
    "use_beam_search": Refusal("give n and temperature for several answers", (False,)),
    "min_tokens": Refusal("give ignore_eos to go on past the end", (0,)),
    "bad_words": Refusal("give allowed_token_ids to restrict the answer", ([],)),
    "typical_p": Refusal(_LEAVE_OUT, (1,)),
    "mirostat": Refusal(_LEAVE_OUT, (0,)),
    "guided_json": Refusal(_FORMAT),
    "guided_regex": Refusal(_FORMAT),
    "guided_choice": Refusal("give allowed_token_ids for labels of one token"),
    "guided_grammar": Refusal(_FORMAT),
    "structured_outputs": Refusal(_FORMAT),
    "grammar": Refusal(_FORMAT, ("",)),
    "json_schema": Refusal(_FORMAT),
    "truncate_prompt_tokens": Refusal("shorten the prompt; nothing is cut silently"),
    "prompt_logprobs": Refusal("give echo and logprobs to /v1/completions"),
    "prompt_embeds": Refusal("give prompt"),
    "add_generation_prompt": Refusal("a last message of the assistant is continued", (True,)),
}


class Parsed(NamedTuple, Generic[S]):
    """A body that was checked.

    Attributes:
        request: its fields.
        ignored: names of fields that nothing looks at.
    """

    request: S
    ignored: tuple[str, ...]


def needed_fields(kind: type[Struct]) -> str:
    """What a body cannot lack, in words; empty: nothing, so that no body at all will do.

    Args:
        kind: the class of its fields; NEEDED in it says what their types do not.
    """
    named = getattr(kind, "NEEDED", "")
    required = [one.encode_name for one in msgspec.structs.fields(kind) if one.required]
    *others, last = required or [""]
    return named or (f"{', '.join(others)} and {last}" if others else last)


def needed_body(kind: type[Struct]) -> str:
    """What a body must be, in words."""
    fields = needed_fields(kind)
    return f"a JSON object with {fields}" if fields else "a JSON object"


def parse(body: object, kind: type[S]) -> Parsed[S]:
    """Check a request's JSON.

    Args:
        body: the JSON value.
        kind: the class of its fields.

    Raises:
        RequestFailed: 400 that names the field.
    """
    if not isinstance(body, dict):
        raise bad_request(f"the body must be {needed_body(kind)}")
    for name in REFUSED.keys() & body.keys():
        _refuse(name, body[name])
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise bad_request(f"{param or 'the body'}: {problem}", param=param) from None
    known = kind.__struct_fields__
    return Parsed(request, tuple(name for name in body if name not in known))


def _refuse(name: str, value: object) -> None:
    refusal = REFUSED[name]
    if value is None or value in refusal.neutral:
        return
    raise bad_request(
        f"{name} is not supported; try: {refusal.advice}",
        param=name,
        code="unsupported_parameter",
    )
