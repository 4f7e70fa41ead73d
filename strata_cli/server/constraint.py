"""What holds an answer to a grammar, token by token: the scheduler's side of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from strata_cli.errors import InputError


class Constraint(Protocol):
    """The state of one answer. Used from one thread, which need not be the one that made it."""

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [V]: at least one; an end token where the answer may end."""
        ...

    def accept(self, token_id: int) -> None:
        """A token came that the mask allowed; not called for an end token."""
        ...


MakeConstraint: TypeAlias = Callable[[str], Constraint]
"""A constraint from its text in a request; raises InputError where that is no constraint."""

MadeConstraint: TypeAlias = Future[Constraint | None]
"""What came of making one: it, or the error; None: its request was stopped before."""


class Rule(NamedTuple):
    """A constraint as a request carries it.

    Attributes:
        grammar: of llguidance.
        after: a token that ends a thought: until it came, anything may; None: from the first token.
    """

    grammar: str
    after: int | None = None

    def text(self) -> str:
        """For Generate.constraint."""
        return json.dumps(self._asdict())

    @classmethod
    def of_text(cls, text: str) -> Rule:
        """The opposite.

        Raises:
            InputError: it is not what text() gives.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise InputError(f"a constraint cannot be read: {text:.100}") from error
