"""A prompt on its way into a sequence, a piece at a time, with the checkpoints that it leaves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from strata_cli.engine.engine import Sequence
from strata_cli.engine.forward.state import Snapshot
from strata_cli.engine.prompt_cache import Checkpoint, PromptCache

Floats = NDArray[np.float32]


class Upcoming(NamedTuple):
    """Tokens to read, and whether the logits behind them are wanted."""

    ids: list[int]
    wants_logits: bool


class PromptReading:
    """What is left to read of a prompt. Who reads it takes next(), then calls add().

    The sequence must be read by nobody else meanwhile; the reading may be given up at any time.

    Args:
        sequence: holds what is known of the prompt.
        cache: of the sequence; gets the checkpoints, if it keeps any.
        ids: the whole prompt.
        wants_logits: of its end.
        logits: [V] of its end, where all of it is known.
        parting: up to there the prompt before began alike, so others may too.
        keeps_end: leave a checkpoint at the prompt's end too, which waits until it is read.

    Attributes:
        sequence: as given.
        start: tokens that were known.
        logits: [V] of the prompt's end, once it is read; None where they are not wanted.
    """

    def __init__(
        self,
        sequence: Sequence,
        cache: PromptCache,
        ids: list[int],
        *,
        wants_logits: bool = True,
        logits: Floats | None = None,
        parting: int = 0,
        keeps_end: bool = True,
    ) -> None:
        self.sequence = sequence
        self.start = sequence.position
        self.logits = logits
        self._position = self.start
        self._cache = cache
        self._ids = ids
        self._wants_logits = wants_logits
        self._keeps_end = keeps_end
        cache.keep_prefixes(ids)
        cuts = cache.cuts(self.start, len(ids), parting, sequence.pass_tokens)
        self._stops = [*cuts, len(ids)]
        self._end: Snapshot | None = None

    @property
    def is_over(self) -> bool:
        """Whether all of the prompt is read. The sequence may then go on from there."""
        return self.left_tokens == 0

    @property
    def left_tokens(self) -> int:
        """Tokens that are not read yet."""
        return len(self._ids) - self._position

    @property
    def position(self) -> int:
        """Tokens of the prompt that are read, or were known."""
        return self._position

    def cut(self, position: int) -> bool:
        """Leave a checkpoint at a position too, if it is still ahead; whether there will be one."""
        if not self._cache.rules.prompt_cache:
            return False
        if self._position < position < len(self._ids):
            self._stops = sorted({*self._stops, position})
        return position in self._stops

    def next(self, most: int | None = None) -> Upcoming:
        """What to read next: up to the next checkpoint, at most so many tokens."""
        position = self._position
        stop = next(stop for stop in self._stops if stop > position)
        ids = self._ids[position : stop if most is None else min(stop, position + most)]
        return Upcoming(ids, self._wants_logits and len(ids) == self.left_tokens)

    def copy_end(self) -> None:
        """All tokens that are left are on their way: have the state behind them copied as well.

        Without this, add() does it. Nobody waits for the copies, and what add() costs the host then
        is spent while the device works.
        """
        if self._keeps_end and self._cache.rules.prompt_cache:
            self._end = self.sequence.snapshot(waits=False)

    def add(self, logits: Floats | None = None) -> None:
        """The next tokens were read.

        Args:
            logits: [V] behind them, where they are wanted.
        """
        self._position = self.sequence.position
        if self.is_over and self._wants_logits:
            assert logits is not None
            self.logits = logits
        is_kept = self._position in self._stops and (self._keeps_end or not self.is_over)
        if is_kept and self._cache.rules.prompt_cache:
            end = self.logits.copy() if self.is_over and self.logits is not None else None
            # Whoever waits for logits has them: what they make of them runs beside the copies.
            snapshot = self._end or self.sequence.snapshot(waits=end is None)
            self._cache.add(Checkpoint(snapshot, end))
