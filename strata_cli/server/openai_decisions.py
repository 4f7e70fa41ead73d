"""POST /v1/decisions: OpenAI's Decisions format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.decisions.answers import Decision
from strata_cli.decisions.questions import MOST_LEVELS, MOST_OPTIONS, Question, yes_no
from strata_cli.server.body import read_json
from strata_cli.server.decision_backend import ContextError
from strata_cli.server.decision_forms import (
    QuestionError,
    choice_of,
    decided,
    distance_confidence,
    levels_of,
    notes,
    peak_confidence,
    placing,
    values_of,
)
from strata_cli.server.failures import RequestFailed, bad_request
from strata_cli.server.schemas import parse
from strata_cli.server.service import ignored_headers, json_response, service_of
from strata_cli.server.systemone import too_long

MOST_QUESTIONS = 400
TEXT_PARTS = ("input_text", "output_text", "text")
HINTS = ("prompt_cache_key", "prompt_cache_options")
"""Fields that may be sent and change nothing."""

Parts: TypeAlias = str | list[dict[str, Any]]


class ChoiceValue(Struct, frozen=True, kw_only=True):
    """An option; true and "true" are two."""

    value: str | bool
    description: str | None = None


class LevelLabel(Struct, frozen=True, kw_only=True):
    """A level."""

    label: str
    description: str | None = None


class _Asked(Struct, frozen=True, kw_only=True, tag_field="type"):
    instructions: Parts
    name: str | None = None


class Predicate(_Asked, frozen=True, kw_only=True, tag="predicate"):
    """True or not."""


class Choice(_Asked, frozen=True, kw_only=True, tag="choice"):
    """One of several values."""

    choices: Annotated[list[ChoiceValue], Meta(min_length=2, max_length=MOST_OPTIONS)]


class Scored(_Asked, frozen=True, kw_only=True, tag="score"):
    """A level, lowest first."""

    levels: Annotated[list[LevelLabel], Meta(min_length=2, max_length=MOST_LEVELS)]


AnyQuestion: TypeAlias = Predicate | Choice | Scored


class DecisionsRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/decisions."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    questions: Annotated[list[AnyQuestion], Meta(min_length=1, max_length=MOST_QUESTIONS)]
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None


class PredicateAnswer(Struct, frozen=True, kw_only=True, tag_field="type", tag="predicate"):
    """The probability that it is true."""

    name: str | None
    probability: float
    x_label_mass: float


class ValueProbability(Struct, frozen=True, kw_only=True):
    """Of an option."""

    value: str | bool
    probability: float


class ChoiceAnswered(Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """The likeliest value, and the probability of each."""

    name: str | None
    choice: str | bool
    probabilities: list[ValueProbability]
    confidence: float
    x_label_mass: float


class LevelProbability(Struct, frozen=True, kw_only=True):
    """Of a level."""

    value: int
    label: str
    probability: float


class ScoreAnswered(Struct, frozen=True, kw_only=True, tag_field="type", tag="score"):
    """The expected level, from 0, and the probability of each."""

    name: str | None
    score: float
    probabilities: list[LevelProbability]
    confidence: float
    x_label_mass: float


class InputDetails(Struct, frozen=True, kw_only=True):
    """Of input_tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Struct, frozen=True, kw_only=True):
    """Of output_tokens."""

    reasoning_tokens: int


class DecisionsUsage(Struct, frozen=True, kw_only=True):
    """Tokens of all prompts, what several begin with counted once; nothing is generated."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class DecisionsAnswer(Struct, frozen=True, kw_only=True):
    """Answer of /v1/decisions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswered | ScoreAnswered]
    usage: DecisionsUsage


async def decisions(request: Request) -> Response:
    """Answer a list of questions about an input."""
    service = service_of(request)
    body = await read_json(request, service.limits, DecisionsRequest)
    _check_shape(body)
    parsed = parse(body, DecisionsRequest)
    asked = parsed.request
    state = _state(asked.input)
    questions = [_question(number, one) for number, one in enumerate(asked.questions)]
    try:
        answer = await decided(request, service, state, questions)
    except ContextError as error:
        raise too_long(error) from None
    answers = [
        _answer(one, found) for one, found in zip(asked.questions, answer.decisions, strict=True)
    ]
    headers = ignored_headers(
        parsed._replace(ignored=tuple(name for name in parsed.ignored if name not in HINTS))
    )
    usage = _usage(answer.input_tokens, answer.read_tokens)
    return json_response(
        {"model": service.texts.name, "answers": answers, "usage": usage}, headers=headers
    )


def _usage(input_tokens: int, read_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {
            "cached_tokens": max(0, input_tokens - read_tokens),
            "cache_write_tokens": 0,
        },
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens,
    }


def _check_shape(body: object) -> None:
    """Other servers take other bodies on this path; say where they belong here.

    Raises:
        RequestFailed: 400 that names the route.
    """
    if not isinstance(body, Mapping):
        return
    questions = body.get("questions")
    if "state" in body or isinstance(questions, Mapping):
        raise bad_request(
            "this is System One's shape (a state and a map of questions); POST it to /v1/systemone",
            param="state" if "state" in body else "questions",
            code="wrong_route",
        )
    if "question" in body or "items" in body:
        raise bad_request(
            "this is AnyJev's shape (a question and its options); POST it to /v1/decide",
            param="question" if "question" in body else "items",
            code="wrong_route",
        )
    first = questions[0] if isinstance(questions, list) and questions else None
    if isinstance(first, Mapping) and "question" in first and "instructions" not in first:
        raise bad_request(
            "questions[0] has no instructions: this route takes OpenAI's shape (type predicate, "
            "choice or score; instructions; choices or levels); a map of questions by id goes to "
            "/v1/systemone",
            param="questions[0].instructions",
            code="wrong_route",
        )


def _state(value: str | Sequence[Mapping[str, Any]]) -> str:
    """One message is its text; of several, each is named by its role."""
    if isinstance(value, str):
        text = value
    else:
        turns = [_turn(number, item) for number, item in enumerate(value)]
        text = turns[0][1] if len(turns) == 1 else "\n".join(": ".join(turn) for turn in turns)
    if not text.strip():
        raise bad_request("input is empty; try: give some text to decide about", param="input")
    return text


def _turn(number: int, item: Mapping[str, Any]) -> tuple[str, str]:
    place = f"input[{number}]"
    if item.get("type", "message") != "message":
        raise bad_request(
            f"{place}.type: only messages are served, not {str(item['type'])[:60]!r}",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    role = item.get("role")
    if role not in ("user", "developer", "system", "assistant"):
        raise bad_request(
            f"{place}.role: must be user, developer, system or assistant", param=f"{place}.role"
        )
    return str(role), _text(item.get("content"), f"{place}.content")


def _text(parts: object, place: str) -> str:
    """Text parts, one below the other; JSON parts as JSON.

    Raises:
        RequestFailed: 400, a part is something else.
    """
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise bad_request(f"{place}: must be a text or a list of parts", param=place)
    return "\n".join(_part(part, f"{place}[{number}]") for number, part in enumerate(parts))


def _part(part: object, place: str) -> str:
    fields: Mapping[str, Any] = part if isinstance(part, Mapping) else {}
    kind = fields.get("type")
    text = fields.get("refusal" if kind == "refusal" else "text")
    if kind in (*TEXT_PARTS, "refusal") and isinstance(text, str):
        return text
    if kind == "input_json" and isinstance(fields.get("data"), dict | list):
        return json.dumps(fields["data"], indent=2, ensure_ascii=False)
    raise bad_request(
        f"{place}: only parts of text and JSON are served, not {str(kind)[:60]!r}",
        param=place,
        code="unsupported_parameter",
    )


def _question(number: int, asked: AnyQuestion) -> Question:
    """What is asked of the model; the caller's name is no part of it.

    Raises:
        RequestFailed: 400 that names the field.
    """
    place = f"questions[{number}]"
    text, id = _text(asked.instructions, f"{place}.instructions"), f"q{number}"
    try:
        if isinstance(asked, Predicate):
            with placing("instructions"):
                return yes_no(text, id)
        if isinstance(asked, Choice):
            with placing("choices"):
                names = _names([one.value for one in asked.choices])
                return choice_of(id, text, names, [one.description for one in asked.choices])
        with placing("levels"):
            return levels_of(
                id,
                text,
                [
                    f"{one.label}: {one.description}" if one.description else one.label
                    for one in asked.levels
                ],
            )
    except QuestionError as error:
        raise _refused(error, f"{place}.{error.place}") from None


def _refused(error: QuestionError, place: str) -> RequestFailed:
    hint = f"; try: {error.hint}" if error.hint else ""
    return bad_request(f"{place}: {error.message}{hint}", param=place, code="invalid_value")


def _names(values: Sequence[str | bool]) -> list[str]:
    """The options' names: booleans as JSON has them, beside which such texts stand in quotes."""
    words = {json.dumps(value) for value in values if isinstance(value, bool)}
    return [
        json.dumps(value) if isinstance(value, bool) or value in words else value
        for value in values
    ]


def _answer(asked: AnyQuestion, found: Decision) -> dict[str, Any]:
    """An answer in OpenAI's form."""
    values = values_of(found)
    if isinstance(asked, Predicate):
        probability = found.probabilities["Yes"]
        return {
            "type": "predicate",
            "name": asked.name,
            "probability": probability,
            **notes(found),
        }
    if isinstance(asked, Choice):
        best = max(range(len(values)), key=values.__getitem__)
        return {
            "type": "choice",
            "name": asked.name,
            "choice": asked.choices[best].value,
            "probabilities": [
                {"value": one.value, "probability": value}
                for one, value in zip(asked.choices, values, strict=True)
            ],
            "confidence": peak_confidence(values),
            **notes(found),
        }
    return {
        "type": "score",
        "name": asked.name,
        "score": found.answer,
        "probabilities": [
            {"value": level, "label": one.label, "probability": value}
            for level, (one, value) in enumerate(zip(asked.levels, values, strict=True))
        ],
        "confidence": distance_confidence(values),
        **notes(found),
    }
