"""What holds an answer to a grammar, token by token: the scheduler's side of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray


class Constraint(Protocol):
    """The state of one answer. Used from one thread."""

    def mask(self) -> NDArray[np.bool_]:
        """Which tokens may come next, [V]: at least one; an end token where the answer may end."""
        ...

    def accept(self, token_id: int) -> None:
        """A token came that the mask allowed; not called for an end token."""
        ...


MakeConstraint: TypeAlias = Callable[[str], Constraint]
"""A constraint from its text in a request; raises InputError where that is no constraint."""
