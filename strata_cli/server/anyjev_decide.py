"""POST /v1/decide: the format of AnyJev's gateway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from strata_cli.decisions.answers import Decision
from strata_cli.decisions.questions import MOST_LETTERS, Question, yes_no
from strata_cli.decisions.states import state_text
from strata_cli.errors import InputError
from strata_cli.server.body import read_json
from strata_cli.server.decision_forms import (
    all_decided,
    choice_of,
    failing_as,
    levels_of,
    notes,
    values_of,
)
from strata_cli.server.failures import Failure, RequestFailed, bad_request
from strata_cli.server.schemas import needed_body, parse
from strata_cli.server.service import json_response, service_of

ONE_FORWARD = "one_forward"
"""How an answer came about: without any thought in words."""

Kind: TypeAlias = Literal["choice", "yes_no", "noul", "score"]


class DecideItem(Struct, frozen=True, kw_only=True):
    """A question about a state; yes or no needs no options."""

    question: str
    state: str | dict[str, Any] | list[Any] = ""
    options: Annotated[list[str], Meta(max_length=MOST_LETTERS)] | None = None
    kind: Kind = "choice"


class DecideRequest(Struct, frozen=True, kw_only=True):
    """Body of POST /v1/decide: the fields of an item, or a list of items."""

    NEEDED: ClassVar[str] = "question and state, or items"

    question: str | None = None
    state: str | dict[str, Any] | list[Any] | None = None
    options: list[str] | None = None
    kind: Kind | None = None
    items: list[DecideItem] | None = None


class DecideAnswer(Struct, frozen=True, kw_only=True):
    """Answer of /v1/decide about one item."""

    answer: str
    index: int
    probs: dict[str, float]
    margin: float | None
    route: str
    x_label_mass: float


class DecideAnswers(Struct, frozen=True, kw_only=True):
    """Answer of /v1/decide about items, in their order."""

    decisions: list[DecideAnswer]


def failure_answer(failure: Failure) -> Response:
    """An error in AnyJev's form."""
    return json_response({"error": failure.message}, status=failure.status, headers=failure.headers)


@failing_as(failure_answer)
async def decide(request: Request) -> Response:
    """Answer one question, or each of a list."""
    service = service_of(request)
    body = await read_json(request, service.limits, DecideRequest)
    _check_shape(body)
    assert isinstance(body, Mapping)
    if body.get("items") is None:
        (found,) = await _decide_all(request, [_item(body, "")])
        return json_response(found)
    items = body["items"]
    if not isinstance(items, list):
        raise bad_request("items: must be a list", param="items")
    most = service.limits.max_prompts
    if len(items) > most:
        raise bad_request(f"{len(items)} items, and {most} are the most", param="items")
    asked = [_item(item, f"items[{number}]: ") for number, item in enumerate(items)]
    return json_response({"decisions": await _decide_all(request, asked)})


def _check_shape(body: object) -> None:
    if not isinstance(body, Mapping):
        raise bad_request(f"the body must be {needed_body(DecideRequest)}")
    if "questions" in body and "question" not in body and "items" not in body:
        raise bad_request(
            "this route takes one question, or items; a map of questions goes to /v1/systemone, "
            "a list of them to /v1/decisions",
            param="questions",
        )


class _Item(NamedTuple):
    """What is asked about a state, and the options as they were sent."""

    state: str
    question: Question
    options: Sequence[str]


def _item(body: object, place: str) -> _Item:
    """An item of the body.

    Raises:
        RequestFailed: 400 that says what is wrong.
    """
    try:
        item = parse(body, DecideItem).request
        if item.kind not in ("yes_no", "noul") and item.options is None:
            raise bad_request("options: missing")
        question = _question(item)
    except RequestFailed as error:
        raise bad_request(f"{place}{error.failure.message}") from None
    except InputError as error:
        hint = f"; try: {error.hint}" if error.hint else ""
        raise bad_request(f"{place}{error.message}{hint}") from None
    state = state_text(item.state)
    if not state.strip():
        raise bad_request(f"{place}the state is empty; try: give some text to decide about")
    names = question.options if question.kind == "noul" else item.options or ()
    return _Item(state, question, names)


def _question(item: DecideItem) -> Question:
    options = item.options or []
    if item.kind in ("yes_no", "noul"):
        return yes_no(item.question, "q")
    if item.kind == "score":
        return levels_of("q", item.question, options)
    return choice_of("q", item.question, options, [None] * len(options))


async def _decide_all(request: Request, asked: Sequence[_Item]) -> list[dict[str, Any]]:
    """The answers, in order. Each item takes a turn: its state's reads are reused by the next."""
    found = await all_decided(
        request, service_of(request), ((item.state, [item.question]) for item in asked)
    )
    return [_answer(item.options, one.decisions[0]) for item, one in zip(asked, found, strict=True)]


def _answer(options: Sequence[str], found: Decision) -> dict[str, Any]:
    values = values_of(found)
    best = max(range(len(values)), key=values.__getitem__)
    return {
        "answer": options[best],
        "index": best,
        "probs": dict(zip(options, values, strict=True)),
        "margin": _margin(values),
        "route": ONE_FORWARD,
        **notes(found),
    }


def _margin(values: Sequence[float]) -> float | None:
    """Between the log-probabilities of the two likeliest; None: it has no end."""
    second, first = sorted(values)[-2:]
    return math.log(first) - math.log(second) if second > 0 else None
