"""What the wire formats of decisions have in common: questions made from them, and numbers made.

Source of both confidences: System One's official helper, which states them for its two kinds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from strata_cli.decisions.answers import Decision
from strata_cli.decisions.questions import MOST_LETTERS, Question, choice, levels
from strata_cli.decisions.states import line_text, shown_names
from strata_cli.errors import InputError, StrataError
from strata_cli.server.deciders import Decided
from strata_cli.server.failures import Failure, RequestFailed, failure_of
from strata_cli.server.service import Service
from strata_cli.server.streaming import until_gone

logger = logging.getLogger(__name__)

Described: TypeAlias = str | dict[str, Any] | list[Any]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class QuestionError(InputError):
    """A question cannot be asked.

    Attributes:
        place: the field of the question that is wrong.
    """

    def __init__(self, error: InputError, place: str) -> None:
        super().__init__(error.message, hint=error.hint)
        self.place = place


@contextmanager
def placing(place: str) -> Any:
    """Inside, what is refused is refused for a field.

    Raises:
        QuestionError: see above.
    """
    try:
        yield
    except InputError as error:
        raise QuestionError(error, place) from None


def choice_of(
    id: str, text: str, names: Sequence[str], descriptions: Sequence[Described | None]
) -> Question:
    """A choice among named options; the question's options are in the same order.

    Options that are scored by their own text are named alone there: what describes them stands in
    the question.

    Raises:
        InputError: see questions.choice.
    """
    shown = shown_names(names)
    lines = [
        name
        if description is None or not line_text(description)
        else f"{name}: {line_text(description)}"
        for name, description in zip(shown, descriptions, strict=True)
    ]
    if len(names) <= MOST_LETTERS:
        return choice(text, lines, id)
    explained = [f"- {line}" for name, line in zip(shown, lines, strict=True) if line != name]
    return choice("\n".join([text, *explained]), shown, id)


def levels_of(id: str, text: str, names: Sequence[Described]) -> Question:
    """Levels, lowest first; the question's options are in the same order.

    Raises:
        InputError: see questions.levels.
    """
    return levels(text, [line_text(name) for name in names], id)


def values_of(decision: Decision) -> list[float]:
    """The probabilities of the options, in the order that they were asked in."""
    return list(decision.probabilities.values())


def peak_confidence(values: Sequence[float]) -> float:
    """Of a choice: how far the largest probability is above an even split, 0 to 1."""
    count = len(values)
    if count == 1:
        return 1.0
    return min(1.0, max(0.0, (count * max(values) - 1) / (count - 1)))


def distance_confidence(values: Sequence[float]) -> float:
    """Of levels: how close probability lies to the likeliest level, 0 to 1."""
    count = len(values)
    if count == 1:
        return 1.0
    likeliest = max(range(count), key=values.__getitem__)
    distance = math.fsum(p * abs(level - likeliest) for level, p in enumerate(values))
    even = math.fsum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / even)


def notes(decision: Decision) -> dict[str, Any]:
    """What an answer says besides what its format asks for."""
    told: dict[str, Any] = {"x_label_mass": decision.diagnostics["answer_mass"]}
    if decision.warnings:
        told["x_warnings"] = decision.warnings
    return told


async def decided(
    request: Request, service: Service, state: str, questions: Sequence[Question]
) -> Decided:
    """Have questions about a state answered, when their turn has come.

    Raises:
        RequestFailed: 503, too many requests wait; 408, the time is up.
        ClientGone: the client went away; the engine's work for it is stopped.
        StrataError: see Deciders.decide.
    """
    return (await all_decided(request, service, [(state, questions)]))[0]


async def all_decided(
    request: Request, service: Service, asked: Iterable[tuple[str, Sequence[Question]]]
) -> list[Decided]:
    """The same for several states, each of which waits in line for itself."""

    async def work() -> list[Decided]:
        found = []
        for state, questions in asked:
            async with service.queue.turn():
                found.append(
                    await service.deciders.decide(service.engine, service.texts, state, questions)
                )
        return found

    with service.queue.enter():
        return await until_gone(request, work(), service.limits)


def failing_as(shape: Callable[[Failure], Response]) -> Callable[[Endpoint], Endpoint]:
    """A route whose errors have a shape of their own."""

    def wrap(route: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                return await route(request)
            except RequestFailed as error:
                return shape(error.failure)
            except StrataError as error:
                failure = failure_of(error)
                if failure.status >= 500:
                    logger.error("%s", error)
                return shape(failure)

        return answer

    return wrap
