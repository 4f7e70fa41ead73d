"""Questions with fixed answers: what can be asked, checked before anything is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyjev
from anyjev.question import MAX_OPTIONS

from strata_cli.errors import InputError, quoted

MOST_LETTERS: int = MAX_OPTIONS
MOST_OPTIONS = 255
MOST_LEVELS = 10


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its answers; made by choice(), yes_no(), levels() and scale().

    Attributes:
        spec: AnyJev's form of it, options in the caller's order.
        by_text: options are scored by their own text, token by token, rather than by a letter.
    """

    spec: anyjev.Question
    by_text: bool = False

    @property
    def id(self) -> str:
        """The name given, or one that follows from the question; the model never sees it."""
        return str(self.spec.id)

    @property
    def kind(self) -> str:
        """One of "choice", "noul" (yes or no) and "score"."""
        return str(self.spec.kind)

    @property
    def text(self) -> str:
        """What is asked."""
        return str(self.spec.text)

    @property
    def options(self) -> tuple[str, ...]:
        """The answers, in the caller's order."""
        return tuple(self.spec.options)

    @property
    def key(self) -> str:
        """What tells a question from any other; neither its id nor the options' order is in it."""
        return f"{self.canonical().key}{'.text' * self.by_text}"

    def canonical(self) -> anyjev.Question:
        """The same question whatever order its options are listed in.

        AnyJev sums over options in the order listed, so a rotation of sorted options alone would
        still let the order move the last bit.
        """
        if self.kind != "choice":
            return self.spec
        return replace(self.spec, options=tuple(sorted(self.options)), name=self.id)


def choice(
    text: str, options: Sequence[str], id: str | None = None, *, by_text: bool = False
) -> Question:
    """One of 2 to 255 options; an option's text may have many tokens.

    Args:
        text: what is asked.
        options: up to 26 are labelled by letters.
        id: see Question.
        by_text: score options by their own text instead, as more than 26 always are.

    Raises:
        InputError: text or an option is empty or no text of one line, options are equal, or too
            few or too many.
    """
    if len(options) < 2:
        raise InputError(
            f"{len(options)} option{'s' * (not options)} to choose from, and 2 are the least",
            hint="give more options, or ask for yes or no",
        )
    if len(options) > MOST_OPTIONS:
        raise InputError(
            f"{len(options)} options to choose from, and {MOST_OPTIONS} are the most",
            hint="ask in two steps, groups first",
        )
    _check_lines(options, "option")
    # Not by AnyJev's own function, which refuses more options than there are letters.
    spec = anyjev.Question("choice", _checked(text), tuple(options), _checked_id(id))
    return Question(spec, by_text=by_text or len(options) > MOST_LETTERS)


def yes_no(text: str, id: str | None = None) -> Question:
    """Yes or no.

    Raises:
        InputError: the text is empty.
    """
    return _made(anyjev.Question.noul(_checked(text), _checked_id(id)))


def levels(text: str, names: Sequence[str], id: str | None = None) -> Question:
    """One of 2 to 10 named levels, lowest first; the answer is the expected level, from 0.

    Raises:
        InputError: as for choice().
    """
    _check_count(len(names), "levels")
    _check_lines(names, "level")
    return _made(anyjev.Question.score(_checked(text), levels=names, name=_checked_id(id)))


def scale(text: str, low: float, high: float, bins: int = 5, id: str | None = None) -> Question:
    """A number between two ends, in 2 to 10 equal bins; the answer is the expected one.

    Raises:
        InputError: an end is not finite, the ends are not in order, or bins are too few, too many
            or too narrow to be told apart.
    """
    _check_count(bins, "bins")
    if not (math.isfinite(low) and math.isfinite(high) and math.isfinite(high - low)):
        raise InputError(
            f"a scale from {low:g} to {high:g} is not between two finite numbers",
            hint="for example 0 and 10",
        )
    if not low < high:
        raise InputError(
            f"a scale from {low:g} to {high:g} does not go up", hint="give the lower end first"
        )
    spec = anyjev.Question.score(_checked(text), bins, (low, high), _checked_id(id))
    ends = [end for label in spec.options for end in label.split(" to ")]
    if len(set(ends)) != bins + 1:
        raise InputError(
            f"{bins} bins from {low!r} to {high!r} cannot be told apart: their ends are written "
            "with 6 digits",
            hint="use fewer bins, or a scale that begins at 0",
        )
    return _made(spec)


def check_distinct(questions: Sequence[Question]) -> None:
    """Refuse questions that cannot be told apart in the answer.

    Raises:
        InputError: there are none, or two have one id; names it.
    """
    if not questions:
        raise InputError("no question", hint="ask at least one")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise InputError(
                f"two questions have the id {quoted(question.id)}", hint="give each its own"
            )
        seen.add(question.id)


def _made(spec: anyjev.Question) -> Question:
    return Question(spec)


def _checked(text: str) -> str:
    if not text.strip():
        raise InputError("the question is empty", hint="say what is to be decided")
    _check_characters(text, "the question")
    return text


def _checked_id(id: str | None) -> str | None:
    if id is None:
        return None
    if not id:
        raise InputError("a question's id is empty", hint="give it a name")
    _check_characters(id, "a question's id")
    return id


def _check_count(count: int, what: str) -> None:
    if not 2 <= count <= MOST_LEVELS:
        raise InputError(
            f"{count} {what} to choose from, and 2 to {MOST_LEVELS} are possible",
            hint=f"give from 2 to {MOST_LEVELS}",
        )


def _check_lines(texts: Sequence[str], what: str) -> None:
    """Refuse texts that a reader of the prompt could not tell apart, or take for several."""
    seen: dict[str, int] = {}
    for number, text in enumerate(texts, 1):
        name = f"{what} {number}"
        if not text.strip():
            raise InputError(f"{name} is empty", hint="give it a text")
        if text.splitlines() != [text]:
            raise InputError(
                f"{name} has a line break: {quoted(text)}",
                hint="each is shown on one line",
            )
        _check_characters(text, name)
        other = seen.setdefault(text.strip(), number)
        if other != number:
            raise InputError(
                f"{what}s {other} and {number} are the same: {quoted(text)}",
                hint="each needs a text of its own",
            )


def _check_characters(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{name} has half a surrogate pair, which is no character: {quoted(text)}",
            hint="write the character itself",
        ) from None
