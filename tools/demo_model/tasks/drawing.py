"""What a decision prompt is made of, and helpers that draw its parts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal, TypeVar

from tools.demo_model.prompt import LETTERS, Question, choice, score, yes_no
from tools.demo_model.tables import Tables

T = TypeVar("T")
MAX_STATE = 600  # characters of a state in most prompts
SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z\"'(*])")


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer: `options[answer]` is right.

    A yes/no turn has the options Yes and No in the order in which the prompt names them.
    """

    kind: Literal["choice", "yes_no", "score"]
    text: str
    options: tuple[str, ...]
    answer: int

    def question(self) -> Question:
        """Word the question."""
        if self.kind == "choice":
            return choice(self.text, self.options)
        if self.kind == "score":
            return score(self.text, self.options)
        return yes_no(self.text, yes_first=self.options[0] == "Yes")

    def labels(self) -> tuple[str, ...]:
        """Return what may be answered, one token each, in the order of the options."""
        if self.kind == "choice":
            return tuple(LETTERS[: len(self.options)])
        if self.kind == "score":
            return tuple(str(number + 1) for number in range(len(self.options)))
        return self.options

    def rotated(self, shift: int) -> "Turn":
        """Move every option `shift` places towards the front; the right one stays right."""
        count = len(self.options)
        options = self.options[shift:] + self.options[:shift]
        return replace(self, options=options, answer=(self.answer - shift) % count)


@dataclass(frozen=True, slots=True)
class Example:
    """A state and the questions about it; `certain` answers follow from the state alone."""

    kind: str
    state: str
    turns: tuple[Turn, ...]
    certain: bool = False


Draw = Callable[[Tables, Random], Example | None]  # None: this draw found nothing suitable


def make_choice(text: str, right: str, wrong: Sequence[str], rng: Random) -> Turn:
    """Build a choice of the right option and the wrong ones, in random order, repeats dropped."""
    options = list(dict.fromkeys([right, *wrong]))
    rng.shuffle(options)
    return Turn("choice", text, tuple(options), options.index(right))


def is_sound(example: Example | None) -> bool:
    """Whether a draw succeeded, and every question of it offers a choice."""
    return example is not None and all(len(turn.options) > 1 for turn in example.turns)


def make_claim(text: str, holds: bool, rng: Random) -> Turn:
    """Build a yes/no question, in a random order of Yes and No."""
    options = ("Yes", "No") if rng.random() < 0.5 else ("No", "Yes")
    return Turn("yes_no", text, options, options.index("Yes" if holds else "No"))


def option_count(rng: Random, most: int = 10) -> int:
    """Draw a number of options, small ones more often."""
    return min(most, rng.choice((2, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9, 10, 10)))


def some(items: Sequence[T], count: int, rng: Random) -> list[T]:
    """Draw up to `count` different items without order."""
    return rng.sample(items, min(count, len(items)))


def wording(choices: Sequence[str], rng: Random) -> str:
    """Draw a wording; the first, which evaluation uses, comes every second time."""
    return choices[0] if rng.random() < 0.5 else rng.choice(choices)


def clip(text: str, limit: int) -> str:
    """Cut a text at the last blank before `limit` characters."""
    if len(text) <= limit:
        return text
    return text[:limit].rsplit(" ", 1)[0] + " ..."


def sentences(text: str) -> list[str]:
    """Split a paragraph into sentences."""
    return [part.strip() for part in SENTENCE_END.split(text) if part.strip()]


def article(word: str) -> str:
    """Put `a` or `an` before a word."""
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def capital(text: str) -> str:
    """Write the first letter in upper case."""
    return text[:1].upper() + text[1:]
