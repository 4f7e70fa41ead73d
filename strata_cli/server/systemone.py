"""POST /v1/systemone: TypeSafe's System One format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.decisions.answers import Decision
from strata_cli.decisions.questions import MOST_LEVELS, MOST_OPTIONS, Question, yes_no
from strata_cli.decisions.states import state_text
from strata_cli.json_objects import RepeatedKeyError, check_keys
from strata_cli.server.body import empty_body, is_empty, read_body
from strata_cli.server.decision_backend import ContextError
from strata_cli.server.decision_forms import (
    Described,
    QuestionError,
    choice_of,
    decided,
    distance_confidence,
    failing_as,
    levels_of,
    notes,
    peak_confidence,
    placing,
    values_of,
)
from strata_cli.server.failures import (
    CONTEXT_EXCEEDED,
    INVALID,
    Failure,
    RequestFailed,
    bad_request,
    for_system_one,
)
from strata_cli.server.schemas import needed_body
from strata_cli.server.service import json_response, request_id, service_of

MOST_QUESTIONS = 400
MEDIA = ("assets", "images", "audio", "videos")
DEFAULT_TEXT = {
    "noul": "Does this apply?",
    "choice": "Which of these applies?",
    "score": "Which level applies?",
}

Text: TypeAlias = Annotated[
    Described, Meta(description="A text; objects and arrays are shown as JSON.")
]


class Sides(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What yes and no mean."""

    true: Text | None = None
    false: Text | None = None


class _Asked(Struct, frozen=True, kw_only=True, tag_field="type"):
    instructions: Text | None = None


class NoulQuestion(_Asked, frozen=True, kw_only=True, tag="noul"):
    """Yes or no; without instructions, a side must be described."""

    criteria: Sides | None = None


class ChoiceQuestion(_Asked, frozen=True, kw_only=True, tag="choice"):
    """One of the named options."""

    criteria: Annotated[dict[str, Text | None], Meta(min_length=1, max_length=MOST_OPTIONS)]


class ScoreQuestion(_Asked, frozen=True, kw_only=True, tag="score"):
    """A level, lowest first."""

    criteria: Annotated[list[Text], Meta(min_length=1, max_length=MOST_LEVELS)]


AnyQuestion: TypeAlias = NoulQuestion | ChoiceQuestion | ScoreQuestion


class SystemOneRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/systemone; other fields are ignored."""

    state: Text
    questions: Annotated[dict[str, AnyQuestion], Meta(min_length=1, max_length=MOST_QUESTIONS)]
    model: str | None = None


class NoulAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="noul"):
    """The probability of yes."""

    noul: float
    x_label_mass: float


class ChoiceAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest option, and the probability of each."""

    choice: str
    probabilities: dict[str, float]
    confidence: float
    x_label_mass: float


class ScoreAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """The expected level, from 0, and the probability of each."""

    score: float
    legend: dict[str, Text]
    probabilities: dict[str, float]
    confidence: float
    x_label_mass: float


class SystemOneUsage(Struct, frozen=True, kw_only=True):
    """Tokens of all prompts, what several begin with counted once; nothing is generated."""

    input_tokens: int
    output_tokens: int


class SystemOneAnswer(Struct, frozen=True, kw_only=True):
    """Answer of /v1/systemone."""

    model: str
    answers: dict[str, NoulAnswer | ChoiceAnswer | ScoreAnswer]
    usage: SystemOneUsage
    x_canonical: bool
    x_level: str


class Invalid(RequestFailed):
    """A body that does not fit the format.

    Args:
        loc: where, without "body".
        msg: what is wrong there.
        kind: a word for programs.
    """

    def __init__(self, loc: tuple[str | int, ...], msg: str, kind: str = "value_error") -> None:
        where = ".".join(map(str, loc))
        super().__init__(
            Failure(
                status=422,
                kind=INVALID,
                message=f"{where}: {msg}" if where else msg,
                param=str(loc[0]) if loc else None,
                detail=[{"loc": ["body", *loc], "msg": msg, "type": kind}],
            )
        )


class _Item(NamedTuple):
    """A question of the body, and what is asked for it; None: its only option is the answer."""

    asked: AnyQuestion
    question: Question | None


def failure_answer(failure: Failure) -> Response:
    """An error in System One's form, with OpenAI's beside it."""
    told = for_system_one(failure)
    return Response(
        told.body(), told.status, headers=dict(told.headers), media_type="application/json"
    )


@failing_as(failure_answer)
async def systemone(request: Request) -> Response:
    """Answer a map of questions about a state."""
    service = service_of(request)
    _check_media_type(request)
    body = _object(await read_body(request, service.limits))
    parsed = _parse(body)
    items = {
        id: _item(f"q{number}", id, asked)
        for number, (id, asked) in enumerate(parsed.questions.items())
    }
    questions = [item.question for item in items.values() if item.question is not None]
    state = state_text(parsed.state)
    if not state.strip():
        raise Invalid(("state",), "must not be empty")
    found: dict[str, Decision] = {}
    input_tokens = 0
    if questions:
        try:
            answer = await decided(request, service, state, questions)
        except ContextError as error:
            raise too_long(error) from None
        found = {one.question.id: one for one in answer.decisions}
        input_tokens = answer.input_tokens
    return json_response(
        {
            "model": service.texts.name,
            "answers": {
                id: _answer(item.asked, None if item.question is None else found[item.question.id])
                for id, item in items.items()
            },
            "usage": {"input_tokens": input_tokens, "output_tokens": 0},
            "x_canonical": True,
            "x_level": service.deciders.rules.level,
        },
        headers={"x-typesafe-request-id": request_id(request)},
    )


def too_long(error: ContextError) -> RequestFailed:
    """What is said of a state that does not fit the context."""
    return bad_request(f"{error.message}; try: {error.hint}", code=CONTEXT_EXCEEDED)


def _check_media_type(request: Request) -> None:
    if request.headers.get("content-type", "").lower().startswith("multipart/"):
        raise Invalid((), "images are not served: the body must be JSON", "media_type")


def _object(data: bytes) -> dict[str, Any]:
    """The body; a key that occurs twice in an object of it is refused.

    Raises:
        Invalid: it is empty, no object, or no JSON.
    """
    if is_empty(data):
        raise Invalid((), empty_body(SystemOneRequest), "missing")
    try:
        body = msgspec.json.decode(data)
        check_keys(data)
    except RepeatedKeyError as error:
        raise Invalid((), f"the key {error}", "duplicate_key") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise Invalid((), f"not valid JSON: {error}", "json_invalid") from None
    except RecursionError:
        raise Invalid((), "nested too deeply", "json_invalid") from None
    if not isinstance(body, dict):
        raise Invalid((), f"must be {needed_body(SystemOneRequest)}", "dict_type")
    return body


def _parse(body: Mapping[str, Any]) -> SystemOneRequest:
    for name in MEDIA:
        if body.get(name):
            raise Invalid((name,), "only text is served", "unsupported")
    if "state" not in body and "input" in body:
        raise Invalid(
            ("state",), "is missing; OpenAI's shape goes to POST /v1/decisions", "missing"
        )
    questions = body.get("questions")
    if isinstance(questions, dict):
        for id, item in questions.items():
            _check_question(id, item)
    try:
        return msgspec.convert(body, SystemOneRequest)
    except msgspec.ValidationError as error:
        loc, msg, kind = _told(error)
        raise Invalid(loc, msg, kind) from None


def _check_question(id: str, item: object) -> None:
    if not id:
        raise Invalid(("questions",), "a question's id is empty")
    kind = item.get("type") if isinstance(item, dict) else None
    try:
        msgspec.convert(item, AnyQuestion)
    except msgspec.ValidationError as error:
        loc, msg, word = _told(error)
        where = (kind, *loc) if isinstance(kind, str) and loc != ("type",) else loc
        raise Invalid(("questions", id, *where), msg, word) from None


def _told(error: msgspec.ValidationError) -> tuple[tuple[str, ...], str, str]:
    """Where msgspec found what, and a word for it."""
    msg, _, path = str(error).partition(" - at `$")
    plain = path.rstrip("`").replace("[", ".").replace("]", "")
    loc = tuple(part for part in plain.split(".") if part)
    if msg.startswith("Object missing required field"):
        name = msg.split("`")[1]
        return (*loc, name), "is missing", "missing"
    return loc, msg[:1].lower() + msg[1:], "value_error"


def _item(name: str, id: str, asked: AnyQuestion) -> _Item:
    """What is asked of the model; the caller's id is no part of it.

    Raises:
        Invalid: it cannot be asked.
    """
    try:
        return _Item(asked, _question(name, asked))
    except QuestionError as error:
        raise Invalid(("questions", id, _kind(asked), error.place), _said(error)) from None


def _kind(asked: AnyQuestion) -> str:
    return str(type(asked).__struct_config__.tag)


def _said(error: QuestionError) -> str:
    return f"{error.message}; try: {error.hint}" if error.hint else error.message


def _question(name: str, asked: AnyQuestion) -> Question | None:
    text = None if asked.instructions is None else state_text(asked.instructions)
    if isinstance(asked, NoulQuestion):
        with placing("instructions"):
            return yes_no(_noul_text(text, asked.criteria or Sides()), name)
    if text is None or not text.strip():
        text = DEFAULT_TEXT[_kind(asked)]
    with placing("criteria"):
        if len(asked.criteria) == 1:
            return None
        if isinstance(asked, ScoreQuestion):
            return levels_of(name, text, asked.criteria)
        return choice_of(name, text, list(asked.criteria), list(asked.criteria.values()))


def _noul_text(text: str | None, sides: Sides) -> str:
    """Instructions, then what yes and no mean; empty if there is neither."""
    described = [
        f"{word}: {state_text(side)}"
        for word, side in (("Yes", sides.true), ("No", sides.false))
        if side is not None and _describes(state_text(side), word)
    ]
    if text is None or not text.strip():
        text = DEFAULT_TEXT["noul"] if described else ""
    return "\n".join([text, *described])


def _describes(text: str, word: str) -> bool:
    """Whether a side says more than its own word, which some clients send for none."""
    return text.strip().casefold() not in ("", word.casefold())


def _answer(asked: AnyQuestion, found: Decision | None) -> dict[str, Any]:
    """An answer in System One's form."""
    extra = {"x_label_mass": 1.0} if found is None else notes(found)
    if isinstance(asked, NoulQuestion):
        assert found is not None
        return {"type": "noul", "noul": found.probabilities["Yes"], **extra}
    values = [1.0] if found is None else values_of(found)
    if isinstance(asked, ChoiceQuestion):
        names = list(asked.criteria)
        return {
            "type": "choice",
            "choice": names[max(range(len(values)), key=values.__getitem__)],
            "probabilities": dict(zip(names, values, strict=True)),
            "confidence": peak_confidence(values),
            **extra,
        }
    keys = [str(level) for level in range(len(values))]
    return {
        "type": "score",
        "score": 0.0 if found is None else found.answer,
        "legend": dict(zip(keys, asked.criteria, strict=True)),
        "probabilities": dict(zip(keys, values, strict=True)),
        "confidence": distance_confidence(values),
        **extra,
    }
