"""Text of an answer as its tokens come: whole characters, up to a stop string, and what it kept.

A piece of text is held back while it may still become a stop string. Each token is handed out with
the text that it begins in, so log-probabilities stay in step with what the client has seen.
"""

from __future__ import annotations

from typing import NamedTuple

from strata_cli.engine.model.tokenizer import StreamDecoder, Tokenizer
from strata_cli.server.protocol import Token


class Placed(NamedTuple):
    """A token, and the character of the answer at which its text begins."""

    token: Token
    offset: int


class Piece(NamedTuple):
    """What can be handed out: more text, and the tokens that begin in it."""

    text: str
    tokens: tuple[Placed, ...]


NOTHING = Piece("", ())


class AnswerText:
    """The text of one answer. Push its tokens in order, then finish.

    Args:
        tokenizer: the model's.
        stops: texts that end the answer, none of them empty.
        keeps_stop: whether the one that came is part of the answer.
        skips_control: whether control tokens have no text.

    Attributes:
        is_stopped: a stop string came; further tokens are dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: tuple[str, ...] = (),
        keeps_stop: bool = False,
        skips_control: bool = True,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_control=skips_control)
        self._stops = stops
        self._keeps_stop = keeps_stop
        self._held = ""
        self._sent = 0
        self._waiting: list[Placed] = []
        self.is_stopped = False

    def push(self, token: Token) -> Piece:
        """What a token completes; nothing while it may belong to a stop string."""
        if self.is_stopped:
            return NOTHING
        self._waiting.append(Placed(token, self._sent + len(self._held)))
        if not token.ends:
            self._held += self._decoder.push(token.token_id)
        return self._release()

    def finish(self) -> Piece:
        """What is left when no more tokens come."""
        if self.is_stopped:
            return NOTHING
        self._held += self._decoder.finish()
        piece = self._release()
        rest = Piece(piece.text + self._held, piece.tokens + tuple(self._waiting))
        return piece if self.is_stopped else rest

    def _release(self) -> Piece:
        found = self._first_stop()
        if found is None:
            cut = len(self._held) - self._num_suspect()
        else:
            self.is_stopped = True
            cut = found.end if self._keeps_stop else found.start
        text, self._held = self._held[:cut], self._held[cut:]
        self._sent += len(text)
        ready = tuple(placed for placed in self._waiting if placed.offset < self._sent)
        self._waiting = self._waiting[len(ready) :]
        return Piece(text, ready)

    def _first_stop(self) -> _Found | None:
        """The stop string that begins first; of several the longest."""
        found = [
            _Found(start, start + len(stop))
            for stop in self._stops
            if (start := self._held.find(stop)) >= 0
        ]
        return min(found, key=lambda item: (item.start, -item.end), default=None)

    def _num_suspect(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class _Found(NamedTuple):
    start: int
    end: int
