"""Sequence: one conversation or prompt, and what can be done with it. An Engine makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.cancelling import NEVER, Cancellation
from strata_cli.engine.forward.loading import Progress
from strata_cli.engine.forward.parking import ParkedRows, park, parked_bytes, unpark
from strata_cli.engine.forward.state import SequenceState, Snapshot, StateHash
from strata_cli.engine.prefill.branches import Branch
from strata_cli.engine.prefill.chunks import Wanted
from strata_cli.engine.prefill.mixed import Piece, TakeRows
from strata_cli.errors import InputError, StateError

if TYPE_CHECKING:
    from strata_cli.engine.engine import Engine


class Sequence:
    """One conversation or prompt: tokens read so far and all state that follows from them.

    Every method but close() raises StateError once it, or its engine, is closed.
    """

    def __init__(self, engine: Engine, state: SequenceState) -> None:
        self._engine = engine
        self._state = state
        self._is_closed = False

    @property
    def position(self) -> int:
        """Tokens read; the position of the next one."""
        return self._state.position

    @property
    def ids(self) -> tuple[int, ...]:
        """The tokens read."""
        return tuple(self._state.ids)

    @property
    def pass_tokens(self) -> int:
        """Tokens of a pass over a prompt if every pass brings experts anew, else 1: any will do."""
        return self._engine.pass_tokens

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The tokens whose K/V is there: those read, and after a rewind those behind them."""
        return tuple(self._state.cached_ids)

    @property
    def is_consistent(self) -> bool:
        """False after a call that was interrupted halfway, until restore() or reset()."""
        return self._state.is_consistent

    @property
    def is_exact(self) -> bool:
        """Whether canonical reads may go on from here: all of it was computed as theirs are."""
        return self._state.is_exact

    @property
    def exact_rows(self) -> int:
        """How many of the first cached_ids have K/V that canonical reads may go on from."""
        return self._state.exact_rows

    def prefill(
        self,
        ids: list[int],
        *,
        logits: Wanted = "last",
        progress: Progress | None = None,
        cancellation: Cancellation = NEVER,
        meanwhile: Callable[[], None] | None = None,
    ) -> NDArray[np.float32]:
        """Read tokens in chunks; the cuts do not change a bit of the result.

        Args:
            ids: at least one token id.
            logits: which rows' logits to return.
            progress: called with (tokens read, tokens in all) after each chunk.
            cancellation: ends it between two chunks, or while a chunk waits for its experts.
            meanwhile: called while the device makes the last token's logits, if these are wanted;
                the sequence is at its end already, and nobody waits for what is enqueued.

        Returns:
            "last": [V]; "all": [len(ids), V]; "none": [0].

        Raises:
            InputError: no tokens, an id outside the vocabulary, or more than the context holds.
            StateError: an earlier call was interrupted halfway.
            Cancelled: the chunks before are read; see is_consistent.
        """
        self._check(ids)
        return self._engine._prefill(
            self._state,
            ids,
            wanted=logits,
            progress=progress,
            cancellation=cancellation,
            meanwhile=meanwhile,
        )

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Read one token and return its logits [V]; equal to prefill([token_id]) in every bit.

        Raises:
            InputError: the id is outside the vocabulary, or the context is full.
            StateError: an earlier call was interrupted halfway.
        """
        self._check([token_id])
        (row,) = self._engine._step([Piece(self._state, [token_id])])
        return row

    def score(
        self,
        suffixes: list[list[int]],
        *,
        logits: Literal["last", "all"] = "last",
        cancellation: Cancellation = NEVER,
    ) -> list[NDArray[np.float32]]:
        """Read each suffix as if the sequence went on by it alone; the sequence stays as it is.

        Many suffixes share a pass. Snapshots of later positions can no longer be restored.

        Args:
            suffixes: each at least one token.
            logits: which rows' logits to return.
            cancellation: ends it between two passes, or while one waits for its experts.

        Returns:
            For each suffix "last": the logits [V] of its last token; "all": [its tokens, V]; equal
            in every bit to those that prefill(suffix) returns.

        Raises:
            InputError: a suffix is empty, has an id outside the vocabulary or does not fit the
                context; names the suffix.
            StateError: an earlier call was interrupted halfway.
            Cancelled: somebody asked for the end.
        """
        (rows,) = self._engine.score_together(
            [(self, suffixes)], logits=logits, cancellation=cancellation
        )
        return rows

    def snapshot(self, *, waits: bool = True) -> Snapshot:
        """The state at this position, for restore(). K/V is positional and is not copied.

        Args:
            waits: until it is copied. It may be restored before, on its engine's stream.

        Raises:
            StateError: an earlier call was interrupted halfway.
        """
        self._require_open()
        self._state.require_consistent()
        return self._state.snapshot(waits=waits)

    def restore(self, snapshot: Snapshot) -> None:
        """Rewind to a snapshot of this sequence; mends one that was interrupted halfway.

        Raises:
            StateError: other tokens were read over the snapshot's positions since.
        """
        self._require_open()
        if not self._state.can_restore(snapshot):
            raise StateError(
                f"the snapshot at position {snapshot.position} is no longer a prefix of what "
                "this sequence has read",
                hint="read the tokens again, or snapshot before branching",
            )
        self._state.restore(snapshot)

    def can_restore(self, snapshot: Snapshot) -> bool:
        """Whether restore() would take this snapshot of the sequence."""
        return self._state.can_restore(snapshot)

    def park(self, num_tokens: int | None = None) -> ParkedRows:
        """Copy K/V to host memory, for restore_parked(); also when interrupted halfway.

        Args:
            num_tokens: of so many of the first cached_ids; None: of all.
        """
        self._require_open()
        return park(self._state, num_tokens)

    @property
    def parked_bytes(self) -> int:
        """Host memory that park() would take."""
        return parked_bytes(self._state)

    def restore_parked(self, rows: ParkedRows, snapshot: Snapshot) -> None:
        """Become what was parked, as it was at a snapshot of it; like restore() otherwise."""
        self._require_open()
        unpark(self._state, rows)
        self.restore(snapshot)

    def reset(self) -> None:
        """Back to position 0; mends a sequence that was interrupted halfway."""
        self._require_open()
        self._state.reset()

    def state_hash(self) -> StateHash:
        """Fingerprint of everything the next token depends on.

        Raises:
            StateError: an earlier call was interrupted halfway.
        """
        self._require_open()
        self._state.require_consistent()
        return self._state.hash()

    def close(self) -> None:
        """Gives the sequence's memory back. Safe to call twice."""
        self._is_closed = True
        self._engine._forget(self._state)
        self._state.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _checked_branches(self, engine: Engine, suffixes: list[list[int]]) -> list[Branch]:
        """For a pass of an engine. Raises as Engine.score_together does."""
        self._require_of(engine)
        self._require_open()
        for number, suffix in enumerate(suffixes, 1):
            if not suffix:
                raise InputError(f"suffix {number} has no tokens", hint="give it some text")
            try:
                self._check(suffix)
            except InputError as error:
                raise InputError(f"suffix {number}: {error.message}", hint=error.hint) from None
        return [Branch(self._state, suffix) for suffix in suffixes]

    def _require_open(self) -> None:
        self._engine.require_open()
        if self._is_closed:
            raise StateError("the sequence is closed", hint="make a new one: Engine.sequence()")

    def _require_of(self, engine: Engine) -> None:
        if self._engine is not engine:
            raise StateError(
                "the sequence is of another engine", hint="make one with sequence() of this engine"
            )

    def _check(self, ids: list[int]) -> None:
        self._require_open()
        self._engine.check(ids, self.position)


class Part(NamedTuple):
    """What one sequence reads of a pass that it shares.

    Attributes:
        sequence: reads it.
        ids: at least one token.
        wants_logits: of the last token.
        take_rows: called with the logits of all tokens, [n, V] at a time, within the pass; None:
            nobody wants them.
        meanwhile: see Sequence.prefill(); not called where a single token is stepped.
    """

    sequence: Sequence
    ids: list[int]
    wants_logits: bool = True
    take_rows: TakeRows | None = None
    meanwhile: Callable[[], None] | None = None


def checked_pieces(engine: Engine, parts: Iterable[Part]) -> list[Piece]:
    """Parts for a pass of an engine. Raises as Engine.read_together does."""
    pieces = list[Piece]()
    numbers = dict[Sequence, int]()
    for number, part in enumerate(parts, 1):
        sequence = part.sequence
        first = numbers.setdefault(sequence, number)
        if first != number:
            raise StateError(
                f"parts {first} and {number} are of one sequence", hint="give each sequence once"
            )
        sequence._require_of(engine)
        sequence._check(part.ids)
        pieces.append(Piece(sequence._state, *part[1:]))
    return pieces
